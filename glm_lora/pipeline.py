"""The whole flow: select -> attach -> loop (sample -> score -> train -> sync) -> export.

Selecting and attaching happen when the parts are built (``cluster.driver``); this is what they do
together. The loop knows neither Ray nor SGLang: only the protocols of ``protocols.py``.
"""

from __future__ import annotations

from glm_lora.errors import Interrupted
from glm_lora.protocols import AdapterState
from glm_lora.rl.batch import make_batch
from glm_lora.rl.metrics import check_logprob_difference, logprob_difference, rollout_metrics
from glm_lora.sync.push import Probe, check_base, push_and_verify, record_probe
from glm_lora.train.experience import score_samples
from glm_lora.train.job import Job


def run(job: Job) -> AdapterState:
    """Train until the last rollout; returns the adapter, which then also lies in the run folder.

    Raises:
        RunError: A part failed, or two parts disagree; the last checkpoint stays valid.
        Interrupted: The user asked to stop; everything is saved.
    """
    config, trainer = job.config, job.trainer
    first = job.restore()
    probe = record_probe(job.engine, job.probe_tokens)
    adapter = sync(job, probe)
    for step in range(first, config.rollout.num_rollout):
        one_rollout(job, step, adapter)
        adapter = sync(job, probe)
        job.finish_rollout(step)
        if job.stop.requested:
            job.save(step + 1)
            raise Interrupted(f"stopped after rollout {step}; saved in {job.folder.path}")
    job.listener.phase("check")
    trainer.verify_base()
    check_base(job.engine, probe)
    job.save(config.rollout.num_rollout)
    job.export(adapter)
    return adapter


def one_rollout(job: Job, step: int, adapter: AdapterState) -> None:
    """Sample with ``adapter``, score, and make one update."""
    config, record = job.config, job.recorder
    prompts = job.prompts.take(config.rollout.rollout_batch_size)
    with job.phase("rollout"):
        samples = job.sampler.sample(job.engine, prompts, adapter.ref(), step)
    with job.phase("reward"):
        scores = score_samples(job.reward, prompts, samples, job.decode, job.sampler.stop_token_ids)
    batch, report = make_batch(
        samples,
        [score.value for score in scores],
        config.rollout.n_samples_per_prompt,
        algorithm=config.algorithm,
        step=step,
        temperature=config.rollout.rollout_temperature,
    )
    record.add(rollout_metrics(samples, scores, report, step))
    with job.phase("train"):
        stats = job.trainer.step(batch)
    record.add(stats.metrics)
    record.add({"train/update_applied": float(stats.applied)})
    if stats.logprobs:
        difference = logprob_difference(stats.logprobs, batch.samples)
        record.add(difference)
        check_logprob_difference(difference, config.rollout.logprob_diff_limit, job.dtype)


def sync(job: Job, probe: Probe) -> AdapterState:
    """Send the adapter, and only the adapter, to the engine; nothing is believed unchecked."""
    with job.phase("sync"):
        adapter = job.trainer.adapter(job.sync_dtype)
        report = push_and_verify(
            adapter,
            job.engine,
            probe,
            lambda tokens: job.trainer.logprobs([tokens])[0],
            capabilities=job.capabilities,
            limit=job.config.rollout.logprob_diff_limit,
        )
    job.recorder.add(report.metrics())
    return adapter
