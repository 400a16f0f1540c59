"""From a resolved configuration to a finished run: check, start the processes, run, stop them.

Everything that can be wrong with the command is found before a process starts: the selection, the
base, the prompts, the run folder. Only then trainer and engine are built, as Ray actors, as
torchrun's ranks or in this process; the loop (``pipeline.run``) is the same.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from glm_lora.cluster.plan import Plan
from glm_lora.config import RolloutConfig, TrainConfig
from glm_lora.errors import ConfigError, DataError
from glm_lora.protocols import RolloutEngine, Trainer
from glm_lora.report.console import Listener
from glm_lora.report.run_folder import RunFolder
from glm_lora.report.sinks import JsonlSink, MetricSink, TensorBoardSink, WandbSink
from glm_lora.rl.chat import ChatFormat
from glm_lora.rl.data import Prompt, PromptData, load_prompts
from glm_lora.rl.rewards import Reward, reward_of
from glm_lora.rl.stream import PromptStream
from glm_lora.settings import torchrun_world
from glm_lora.train.experience import Explorer
from glm_lora.train.job import Job, StopRequest

PROBE_TOKENS = 64
"""Longest probe prompt."""


@dataclass(frozen=True)
class Text:
    """Chat format, prompts and reward of a run."""

    chat: ChatFormat
    data: PromptData
    eval_prompts: tuple[Prompt, ...]
    reward: Reward


def load_text(plan: Plan) -> Text:
    """Read tokenizer and prompts, and build the reward.

    Raises:
        ConfigError, DataError: The tokenizer, a prompt file or the reward cannot be used.
    """
    rollout = plan.config.rollout
    if rollout.eval_interval and not rollout.eval_prompt_data:
        raise ConfigError("--eval-interval without --eval-prompt-data", "prompt files to evaluate")
    chat = ChatFormat.load(plan.config.hf_checkpoint, plan.spec.eos_token_ids)
    reward = reward_of(rollout)
    try:
        data = prompts_of(rollout, rollout.prompt_data, chat, reward)
        evaluation = (
            prompts_of(rollout, rollout.eval_prompt_data, chat, reward)
            if rollout.eval_prompt_data
            else PromptData(())
        )
    except DataError:
        reward.close()
        raise
    return Text(chat, data, tuple(p for f in evaluation.files for p in f.prompts), reward)


def prompts_of(
    rollout: RolloutConfig, sources: Sequence[str], chat: ChatFormat, reward: Reward
) -> PromptData:
    """Read prompt files with the keys and limits of ``rollout``; DataError lists bad rows."""
    return load_prompts(
        sources,
        chat.encode,
        input_key=rollout.input_key,
        label_key=rollout.label_key,
        metadata_key=rollout.metadata_key,
        check_label=reward.check_label,
        max_prompt_tokens=rollout.rollout_max_prompt_len,
        skip_bad_rows=rollout.skip_bad_rows,
    )


def train(
    plan: Plan,
    listener: Listener,
    *,
    resume: bool = False,
    force: bool = False,
) -> RunFolder | None:
    """Run the whole training of a checked command.

    Returns:
        The run folder, or None on a torchrun rank that only followed.
    """
    config = plan.config
    world = torchrun_world() if config.launcher == "torchrun" else None
    if world is not None and world[0] != 0:
        _follow_rank_zero(plan, world)
        return None
    text = load_text(plan)
    if resume:
        folder = RunFolder.resume(config, plan.selection, plan.base)
    else:
        folder = RunFolder.create(config, plan.selection, plan.base, force=force)
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(text.reward.close)
            listener.phase("starting")
            stop = stack.enter_context(stop_on_signal(listener))
            trainer, engine = stack.enter_context(_parts(plan, world))
            sinks = _sinks(config, folder)
            stack.callback(lambda: [sink.close() for sink in sinks])
            job = _job(plan, text, trainer, engine, folder, sinks, listener)
            job.resume, job.stop = resume, stop
            stack.push(job.ended)
            first = text.data.files[0].prompts[0]
            listener.note(f"first {text.chat.describe(first.ids)}")
            for row in text.data.bad_rows:
                listener.note(f"left out: {row}")
            from glm_lora.pipeline import run

            run(job)
    finally:
        folder.close()
    return folder


def _job(
    plan: Plan,
    text: Text,
    trainer: Trainer,
    engine: RolloutEngine,
    folder: RunFolder,
    sinks: list[MetricSink],
    listener: Listener,
) -> Job:
    config = plan.config
    longest = max((p.ids for f in text.data.files for p in f.prompts), key=len)
    probe = (*longest, *text.chat.stop_token_ids)[:PROBE_TOKENS]
    prompts = PromptStream(text.data, shuffle=config.rollout.rollout_shuffle, seed=config.seed)
    return Job(
        config=config,
        selection=plan.selection,
        trainer=trainer,
        engine=engine,
        explorer=Explorer(config, engine, prompts, text.reward, text.chat),
        eval_prompts=text.eval_prompts,
        probe_tokens=probe,
        base_model=str(config.hf_checkpoint),
        folder=folder,
        sinks=sinks,
        listener=listener,
    )


def _sinks(config: TrainConfig, folder: RunFolder) -> list[MetricSink]:
    sinks: list[MetricSink] = [JsonlSink(folder.metrics)]
    if config.tensorboard:
        sinks.append(TensorBoardSink(folder.logs / "tensorboard"))
    if config.wandb:
        sinks.append(WandbSink(folder.logs, config.model_dump(mode="json")))
    return sinks


@contextlib.contextmanager
def stop_on_signal(listener: Listener) -> Iterator[StopRequest]:
    """SIGINT and SIGTERM ask the loop to save and stop; a second one stops at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: Any) -> None:
        if request.requested:
            raise KeyboardInterrupt
        request.requested = True
        listener.note("stopping after this rollout; everything is saved (again to stop at once)")

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _parts(plan: Plan, world: tuple[int, int] | None) -> Iterator[tuple[Trainer, RolloutEngine]]:
    """Trainer and engine for the length of the block."""
    launcher = plan.config.launcher
    if launcher == "ray":
        with _ray_parts(plan) as parts:
            yield parts
        return
    from glm_lora.rollout.engine import build_engine
    from glm_lora.train.worker import build_worker, init_process_group

    config = plan.config
    if world is None:
        init_process_group(config, 0, 1, None)
        trainer: Any = build_worker(config, plan.selection)
    else:
        trainer = _leading_trainer(plan, world)
    engine = build_engine(config, plan.selection)
    try:
        yield trainer, engine
    finally:
        engine.close()
        trainer.close()


@contextlib.contextmanager
def _ray_parts(plan: Plan) -> Iterator[tuple[Trainer, RolloutEngine]]:
    import ray

    from glm_lora.cluster.actors import EngineActor, RankActor, RayEngine, RayTrainer
    from glm_lora.cluster.ray_runtime import ray_session

    config = plan.config
    with ray_session(config.ray_address, num_cpus=config.world_size + 1, num_gpus=0):
        rank_class = ray.remote(num_cpus=1)(RankActor)
        engine_class = ray.remote(num_cpus=1)(EngineActor)
        # Both sides load their model at the same time.
        engine_actor = engine_class.remote(config, plan.selection)
        ranks = [rank_class.remote() for _ in range(config.world_size)]
        trainer = RayTrainer(config, plan.selection, ranks)
        engine = RayEngine(engine_actor)
        try:
            trainer.wait_ready()
            yield trainer, engine
        finally:
            engine.close()
            trainer.close()


def _leading_trainer(plan: Plan, world: tuple[int, int]) -> Trainer:
    from glm_lora.cluster.spmd import LeadingTrainer

    worker, control = _torchrun_worker(plan, world)
    return LeadingTrainer(worker, control)


def _follow_rank_zero(plan: Plan, world: tuple[int, int]) -> None:
    from glm_lora.cluster.spmd import follow

    worker, control = _torchrun_worker(plan, world)
    try:
        follow(worker, control)
    finally:
        worker.close()


def _torchrun_worker(plan: Plan, world: tuple[int, int]) -> tuple[Any, Any]:
    import torch.distributed as dist

    from glm_lora.cluster.spmd import CONTROL_TIMEOUT
    from glm_lora.train.worker import build_worker, init_process_group

    init_process_group(plan.config, world[0], world[1], None)
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    return build_worker(plan.config, plan.selection), control
