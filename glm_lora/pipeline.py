"""The whole flow: select -> attach -> loop (sample -> score -> train -> sync) -> export.

Selecting and attaching happen when the parts are built (``cluster.driver``); this is what they do
together. The loop knows neither Ray nor SGLang: only the protocols of ``protocols.py``.
"""

from __future__ import annotations

from concurrent.futures import Future, wait

from glm_lora.protocols import AdapterState
from glm_lora.rl.metrics import check_logprob_difference, logprob_difference
from glm_lora.sync.push import Probe, check_base, push_and_verify, record_probe
from glm_lora.train.experience import Experience
from glm_lora.train.job import Job, Snapshot


def run(job: Job) -> AdapterState:
    """Train until the last rollout; returns the adapter, which then also lies in the run folder.

    Raises:
        RunError: A part failed, or two parts disagree; the last checkpoint stays valid.
        Interrupted: The user asked to stop; says what is saved.
    """
    rollouts = job.config.rollout.num_rollout
    probe = record_probe(job.engine, job.probe_tokens)
    with job.trainer_on_device(probe):
        first = job.restore()
        snapshot = job.snapshot()
    adapter = sync(job, probe, snapshot)
    ahead: Future[Experience] | None = None
    with job.sampler() as sampler:
        for step in range(first, rollouts):
            with job.stoppable(step):
                experience = ahead.result() if ahead else sample(job, step, adapter)
            job.mark_cursor()
            if job.config.rollout.async_level and step + 1 < rollouts:
                ahead = sampler.submit(sample, job, step + 1, adapter)
            with job.trainer_on_device(probe):
                train(job, experience)
                snapshot = job.snapshot()
            if ahead:
                wait([ahead])  # the engine finishes with this adapter before it gets the next
            with job.saved_on_failure(step):
                adapter = sync(job, probe, snapshot)
            job.finish_rollout(step, adapter)
    job.listener.phase("check")
    with job.trainer_on_device(probe):
        job.trainer.verify_base()
        saved = job.save(rollouts)
    check_base(job.engine, probe)
    job.finish(adapter, saved=saved)
    return adapter


def sample(job: Job, step: int, adapter: AdapterState) -> Experience:
    """Sample the next prompts with ``adapter`` and score them."""
    job.listener.phase("sample")
    experience = job.explorer.collect(step, adapter.ref())
    job.history.samples(step, experience.groups)
    for reason in experience.unscored[:3]:
        job.listener.note(f"rollout {step}: a response has no reward: {reason}")
    return experience


def train(job: Job, experience: Experience) -> None:
    """One update; trainer and engine must agree on the tokens it was made from."""
    job.recorder.add(experience.metrics)
    with job.phase("train"):
        stats = job.trainer.step(experience.batch)
    job.recorder.add(stats.metrics)
    job.recorder.add({"train/update_applied": float(stats.applied)})
    if not stats.logprobs:
        return
    difference = logprob_difference(stats.logprobs, experience.batch.samples)
    job.recorder.add(difference)
    if not experience.batch.stale:  # an older adapter's samples differ by the update in between
        limit = job.config.rollout.logprob_diff_limit
        with job.saved_on_failure(experience.batch.step):
            check_logprob_difference(difference, limit, job.dtype)


def sync(job: Job, probe: Probe, snapshot: Snapshot) -> AdapterState:
    """Send the adapter, and only the adapter, to the engine; nothing is believed unchecked."""
    with job.phase("sync"):
        report = push_and_verify(
            snapshot.adapter,
            job.engine,
            probe,
            lambda tokens: snapshot.probe_logprobs,
            capabilities=job.capabilities,
            limit=job.config.rollout.logprob_diff_limit,
        )
    job.recorder.add(report.metrics())
    return snapshot.adapter
