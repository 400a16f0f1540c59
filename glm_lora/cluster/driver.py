"""From a resolved configuration to a finished run: check, start the processes, run, stop them.

Everything that can be wrong with the command is found before a process starts: the selection, the
base, the prompts, the run folder. Only then trainer and engine are built, as Ray actors, as
torchrun's ranks or in this process; the loop (``pipeline.run``) is the same.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from glm_lora.checkpoint.train_state import latest_checkpoint
from glm_lora.cluster.limits import allow_open_files
from glm_lora.cluster.placement import Placement
from glm_lora.cluster.plan import Plan
from glm_lora.cluster.stopping import (
    HeardOrStopped,
    output_blamed,
    stop_on_signal,
    stoppable_start,
)
from glm_lora.cluster.warm_start import starting_adapter
from glm_lora.config import RolloutConfig, TrainConfig
from glm_lora.errors import (
    ConfigError,
    DataError,
    GlmLoraError,
    Interrupted,
    ProcessLost,
    RolloutError,
    RunError,
    SyncError,
    TrainingError,
    first_line,
)
from glm_lora.protocols import RolloutEngine, Trainer
from glm_lora.report.console import Listener
from glm_lora.report.history import RunHistory
from glm_lora.report.resuming import inputs_of, resume_run
from glm_lora.report.run_folder import RunFolder, truncate_metrics
from glm_lora.report.sinks import JsonlSink, MetricSink, TensorBoardSink, WandbSink
from glm_lora.rl.chat import ChatFormat
from glm_lora.rl.data import Prompt, PromptData, load_prompts
from glm_lora.rl.rewards import Reward, reward_of
from glm_lora.rl.stream import PromptStream
from glm_lora.rollout.engine import check_interpreter
from glm_lora.settings import torchrun_world
from glm_lora.sync.push import probe_tokens
from glm_lora.train.experience import Explorer
from glm_lora.train.job import Job, StopRequest


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
    allow_open_files()
    world = torchrun_world() if config.launcher == "torchrun" else None
    if world is not None and world[0] != 0:
        _follow_rank_zero(plan, world)
        return None
    with contextlib.ExitStack() as outer:
        stop = StopRequest()
        listener = HeardOrStopped(listener, stop)
        outer.enter_context(stop_on_signal(stop, listener))
        with stoppable_start(stop, None):
            text = load_text(plan)
            outer.callback(text.reward.close)
            start = None if resume else starting_adapter(plan)
        stop.polled = config.launcher == "ray"
        check_interpreter(config)
        # Before the run folder is made: a shape that does not fit is a wrong command.
        with stoppable_start(stop, None):
            placement = _fitting_placement(config, outer, stop.check)
        folder = _folder(plan, text, resume=resume, force=force)
        outer.callback(folder.close)
        with contextlib.ExitStack() as stack:
            jobs: list[Job] = []
            # The last one tells how the run ended; this is called last.
            stack.push(lambda *error: _ended(folder, jobs, *error))
            stack.enter_context(output_blamed(stop))
            listener.phase("starting")
            for row in text.data.bad_rows:
                listener.note(f"left out: {row}")
            listener.note(f"first {text.chat.describe(text.data.files[0].prompts[0].ids)}")
            sinks = _sinks(config, folder)
            stack.callback(lambda: [sink.close() for sink in sinks])

            def run(trainer: Trainer, engine: RolloutEngine, resume: bool, restarts: int) -> None:
                from glm_lora.pipeline import run

                job = _job(plan, text, trainer, engine, folder, sinks, listener)
                job.resume, job.stop, job.start, job.restarts = resume, stop, start, restarts
                jobs.append(job)
                try:
                    run(job)
                except (TrainingError, RolloutError, SyncError):
                    # The ranks are alive: what they are writing gets finished.
                    with contextlib.suppress(GlmLoraError):
                        job.finish_save()
                    raise

            if config.launcher == "ray":
                if placement is None:
                    from glm_lora.cluster.ray_parts import ray_runtime

                    with stoppable_start(stop, folder.path):
                        placement = stack.enter_context(ray_runtime(config, stop.check))
                _run_on_ray(plan, placement, run, folder, listener, stop, resume)
            else:
                with contextlib.ExitStack() as parts:
                    with stoppable_start(stop, folder.path):
                        trainer, engine = parts.enter_context(
                            _local_parts(plan, world, listener.note)
                        )
                    run(trainer, engine, resume, 0)
    return folder


def _folder(plan: Plan, text: Text, *, resume: bool, force: bool) -> RunFolder:
    inputs = inputs_of(plan.config, text.data.fingerprint)
    if resume:
        return resume_run(plan.config, plan.selection, plan.base, inputs)
    return RunFolder.create(plan.config, plan.selection, plan.base, inputs, force=force)


def _ended(
    folder: RunFolder,
    jobs: Sequence[Job],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Record how the run ended, also one that never came to its loop."""
    if jobs:
        jobs[-1].ended(kind, error, trace)
    elif error is not None:
        with contextlib.suppress(OSError):
            RunHistory(folder.path).ended(error)


def _fitting_placement(
    config: TrainConfig, stack: contextlib.ExitStack, check: Callable[[], None]
) -> Placement | None:
    """Who sits where on a cluster that is joined now; None where Ray is not up yet.

    Raises:
        ConfigError: The cluster, or this machine, cannot hold the shape, or Ray is not installed.
    """
    if config.launcher != "ray":
        return None
    try:
        from glm_lora.cluster.ray_parts import check_local, ray_runtime
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(
            f"--launcher ray needs Ray, which cannot be imported: {error}",
            "Ray, or another launcher",
            "pip install 'ray[default]'; or --launcher inline for one process, or torchrun",
        ) from error

    if config.ray_address:
        return stack.enter_context(ray_runtime(config, check))
    check_local(config)
    return None


def _run_on_ray(
    plan: Plan,
    placement: Placement,
    run: Callable[[Trainer, RolloutEngine, bool, int], None],
    folder: RunFolder,
    listener: Listener,
    stop: StopRequest,
    resume: bool,
) -> None:
    """Run on Ray; after lost processes, again from the last checkpoint.

    Raises:
        RunError: Processes were lost more often than ``--max-restarts`` allows.
    """
    from glm_lora.cluster.ray_parts import ray_parts

    config, losses = plan.config, 0
    while True:
        parts = ray_parts(
            config, plan.selection, placement, listener.note, stop.check, again=losses > 0
        )
        try:
            with contextlib.ExitStack() as stack:
                with stoppable_start(stop, folder.path):
                    trainer, engine = stack.enter_context(parts)
                run(trainer, engine, resume, losses)
            return
        except ProcessLost as error:
            if stop.requested:
                raise Interrupted(
                    f"a process went while the run was stopping ({first_line(error)}); the last "
                    "checkpoint stands"
                ) from error
            losses += 1
            if losses > config.max_restarts:
                raise RunError(
                    f"processes were lost {losses} times, the last time because: {error}",
                    f"at most --max-restarts {config.max_restarts}",
                    _next_step(folder),
                ) from error
            listener.note(f"restart {losses} of {config.max_restarts}: {first_line(error)}")
            resume = latest_checkpoint(folder.path) is not None
            if not resume:
                truncate_metrics(folder.metrics, 0)


def _next_step(folder: RunFolder) -> str:
    last = latest_checkpoint(folder.path)
    if last is None:
        return "Nothing was saved yet: start it anew with --force, best with a --save-interval"
    return f"{last} is valid: continue with --resume"


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
    prompt_ids = [prompt.ids for file in text.data.files for prompt in file.prompts]
    prompts = PromptStream(text.data, shuffle=config.rollout.rollout_shuffle, seed=config.seed)
    return Job(
        config=config,
        selection=plan.selection,
        trainer=trainer,
        engine=engine,
        explorer=Explorer(config, engine, prompts, text.reward, text.chat),
        eval_prompts=text.eval_prompts,
        probe_tokens=probe_tokens(prompt_ids, text.chat.stop_token_ids),
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
def _local_parts(
    plan: Plan, world: tuple[int, int] | None, note: Callable[[str], None]
) -> Iterator[tuple[Trainer, RolloutEngine]]:
    """Trainer and engine in this process (and torchrun's) for the length of the block."""
    from glm_lora.cluster.local_engine import build_local_engine
    from glm_lora.train.worker import build_worker, init_process_group

    config = plan.config
    if world is None:
        init_process_group(config, 0, 1, None)
        trainer: Any = build_worker(config, plan.selection)
    else:
        trainer = _leading_trainer(plan, world)
    try:
        if config.sglang.sglang_colocated:
            # The engine measures the memory that is free when it starts.
            trainer.offload()
            note(trainer.host_copy_summary())
        engine = build_local_engine(config, plan.selection)
        try:
            yield trainer, engine
        finally:
            engine.close()
    finally:
        trainer.close()


def _leading_trainer(plan: Plan, world: tuple[int, int]) -> Trainer:
    from glm_lora.cluster.spmd import LeadingTrainer

    return LeadingTrainer(*_torchrun_worker(plan, world))


def _follow_rank_zero(plan: Plan, world: tuple[int, int]) -> None:
    from glm_lora.cluster.spmd import follow

    # A signal goes to all ranks; rank 0 decides, and needs the others to save.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    worker, control = _torchrun_worker(plan, world)
    try:
        follow(worker, control)
    finally:
        worker.close()


def _torchrun_worker(plan: Plan, world: tuple[int, int]) -> tuple[Any, Any]:
    from glm_lora.cluster.agreement import check_same_on_all_ranks
    from glm_lora.cluster.spmd import open_control
    from glm_lora.train.worker import build_worker, init_process_group

    init_process_group(plan.config, world[0], world[1], None)
    check_same_on_all_ranks(plan.config, plan.selection)
    control = open_control()
    return build_worker(plan.config, plan.selection), control
