"""The parts of one run, and what happens around the loop: phases, records, checkpoints, the end."""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from glm_lora.checkpoint.train_state import (
    iteration_folder,
    latest_checkpoint,
    passed_over,
    prune_checkpoints,
)
from glm_lora.config import TrainConfig
from glm_lora.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    ProcessLost,
    RolloutError,
    StopNow,
    SyncError,
    TrainingError,
    first_line,
)
from glm_lora.protocols import (
    AdapterRef,
    AdapterState,
    Capabilities,
    RolloutEngine,
    Trainer,
)
from glm_lora.report.console import Listener
from glm_lora.report.history import RunHistory
from glm_lora.report.html import write_report
from glm_lora.report.resuming import changes
from glm_lora.report.run_folder import RunFolder, truncate_metrics
from glm_lora.report.sinks import MetricSink
from glm_lora.rl.data import Prompt
from glm_lora.rl.evaluate import evaluate
from glm_lora.rl.metrics import HEALTH_BANDS, health_lines
from glm_lora.sync.push import Probe, check_base
from glm_lora.targets.selection import Selection
from glm_lora.train.experience import Explorer
from glm_lora.train.finish import write_result
from glm_lora.train.recorder import Recorder


@dataclass(frozen=True)
class Snapshot:
    """The adapter as the trainer holds it, and what the trainer says of the probe prompt."""

    adapter: AdapterState
    probe_logprobs: np.ndarray


@dataclass
class StopRequest:
    """Set by a signal handler; the loop looks at it where stopping is safe."""

    requested: bool = False
    sampling: bool = False
    """While this is set the run may be ended at once: nothing is lost but samples."""
    polled: bool = False
    """Who waits calls ``check``; else the handler itself raises (Ray's own code does not allow)."""
    deadline: float = math.inf
    """When an update that is still running is given up (``time.monotonic``)."""
    lost_output: str = ""
    """Why the run cannot be heard any more, if that is what stops it."""

    def check(self) -> None:
        """End what the run waits for now, when it is to.

        Raises:
            StopNow: Only samples are lost; ``Job.stoppable`` and ``stoppable_start`` save the rest.
            Interrupted: An update did not finish in time.
        """
        if self.requested and self.sampling:
            raise StopNow
        if time.monotonic() > self.deadline:
            self.deadline = math.inf  # what ends the run must not be interrupted again
            raise Interrupted(
                "the update did not finish in time after the signal and is given up; the last "
                "checkpoint stands"
            )


@dataclass
class Job:
    """The parts of one run; ``cluster.driver`` builds it, ``pipeline.run`` uses it."""

    config: TrainConfig
    selection: Selection
    trainer: Trainer
    engine: RolloutEngine
    explorer: Explorer
    probe_tokens: tuple[int, ...]
    """A fixed prompt whose log-probabilities are compared after every sync."""
    base_model: str
    """Name of the base in the exported adapter's configuration."""
    folder: RunFolder
    sinks: Sequence[MetricSink]
    listener: Listener
    eval_prompts: Sequence[Prompt] = ()
    """Prompts of ``--eval-prompt-data``."""
    resume: bool = False
    start: AdapterState | None = None
    """The adapter of ``--lora-adapter-path``; a resumed run has its own."""
    restarts: int = 0
    """How often the trainer's processes were lost so far."""
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.sinks)
        self.history = RunHistory(self.folder.path)
        self.cursor = self.explorer.prompts.state_dict()
        self.failed_saves = 0
        self.saving: int | None = None
        self.capabilities: Capabilities = self.engine.capabilities()

    @property
    def dtype(self) -> str:
        """The less exact compute dtype of trainer and engine."""
        both = (self.config.dtype, self.capabilities.dtype)
        return "bfloat16" if "bfloat16" in both else "float32"

    @property
    def sync_dtype(self) -> str:
        """Adapters travel in the engine's own dtype."""
        return self.capabilities.dtype

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase and record its seconds."""
        self.listener.phase(name)
        start = time.perf_counter()
        yield
        self.recorder.add({f"time/{name}": time.perf_counter() - start})

    @contextlib.contextmanager
    def trainer_on_device(self, probe: Probe) -> Iterator[None]:
        """The trainer computes inside; where both share GPUs, the engine gives its memory first.

        Afterwards the engine's base must answer the probe prompt bit for bit as at the start:
        without its host copy the weights would come back as garbage.
        """
        if not self.config.sglang.sglang_colocated:
            yield
            return
        with self.phase("release"):
            self.engine.release()
        try:
            self.recorder.add(self.trainer.onload())
            yield
            self.recorder.add(self.trainer.offload())
        except Exception as error:
            self._wake_engine(error)
            raise
        with self.phase("resume"):
            self.engine.resume()
            check_base(self.engine, probe)

    def _wake_engine(self, error: Exception) -> None:
        """Give servers that are not ours their memory back, as ``error`` ends the run."""
        if not self.config.sglang.rollout_engine_urls:
            return  # ours ends with the run
        # Ranks that are lost, or still in the update that was given up, would not answer.
        gone = isinstance(error, ProcessLost) or (self.stop.polled and self.stop.requested)
        if not gone:
            with contextlib.suppress(Exception):
                self.trainer.offload()
        try:
            self.engine.resume()
        except Exception as second:  # what ended the run is told, whatever comes after it
            self.listener.note(
                f"the engine did not take its memory back ({first_line(second)}): restart it "
                "before the next run"
            )

    @contextlib.contextmanager
    def sampler(self) -> Iterator[ThreadPoolExecutor]:
        """A thread that samples ahead; an error in the loop does not wait for its samples."""
        executor = ThreadPoolExecutor(1)
        try:
            yield executor
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def stoppable(self, step: int) -> Iterator[None]:
        """A wish to stop ends the block, which samples rollout ``step``, and the run is saved.

        Raises:
            Interrupted: Saved, or why not.
        """
        try:
            self.stop.sampling = True
            self.stop.check()
            yield
            self.stop.sampling = False
        except RolloutError:
            self.stop.sampling = False
            if step and latest_checkpoint(self.folder.path) != iteration_folder(
                self.folder.path, step
            ):
                self.save(step)  # the engine is lost, what was trained is not
            raise
        except StopNow as error:
            self.stop.sampling = False
            saved = self.save(step)
            where = f"saved in {self.folder.path}" if saved else "the checkpoint before it stands"
            raise Interrupted(f"stopped before rollout {step}; {where}") from error
        finally:
            self.stop.sampling = False

    @contextlib.contextmanager
    def saved_on_failure(self, step: int) -> Iterator[None]:
        """What stops the run inside, after its update, leaves a checkpoint and its figures."""
        try:
            yield
        except (TrainingError, SyncError):
            metrics = self.recorder.flush(step)
            self.listener.rollout(step, metrics)
            self.save(step + 1)
            raise

    def snapshot(self) -> Snapshot:
        """Gather the adapter and score the probe prompt with it."""
        with self.phase("sync"):
            adapter = self.trainer.adapter(self.sync_dtype)
            (logprobs,) = self.trainer.logprobs([self.probe_tokens])
        return Snapshot(adapter, logprobs)

    def restore(self) -> int:
        """Load the last checkpoint when resuming; returns the next rollout's number."""
        first = 0
        if self.resume:
            first = self._load_checkpoint()
        elif self.start is not None:
            self.trainer.set_adapter(self.start)
            self.listener.note(f"starting from {self.config.lora_adapter_path}")
        self.history.started(
            first,
            bands=[asdict(band) for band in HEALTH_BANDS],
            engine=f"{self.capabilities.engine} {self.capabilities.version}",
            device=self.config.device,
        )
        return first

    def ended(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Record how the run ended and write its report, whatever happened (an exit callback)."""
        # The error that ended the run is not hidden by a disk that is full by now.
        with contextlib.suppress(OSError) if error else contextlib.nullcontext():
            self.history.ended(error)
            try:
                write_report(self.folder.path)
            except ConfigError as damage:  # of an older line; what was trained is whole
                self.listener.note(f"no report was written: {damage}")

    def _load_checkpoint(self) -> int:
        folder = latest_checkpoint(self.folder.path)
        for line in passed_over(self.folder.path):
            self.listener.note(f"passed over: {line}")
        assert folder is not None, "who resumes has checked that there is one"
        extra = self.trainer.load(folder)
        self.explorer.prompts.load_state_dict(extra["prompts"])
        self.mark_cursor()
        truncate_metrics(self.folder.metrics, extra["rollouts"])
        self.listener.note(f"continuing after rollout {extra['rollouts'] - 1} from {folder}")
        for line in changes(self.config):
            self.listener.note(line)
        if self.config.rollout.async_level:
            self.listener.note(
                "the first rollout is sampled with the newest adapter, not with the one before it"
            )
        self.folder.write_config(self.config)
        return int(extra["rollouts"])

    def mark_cursor(self) -> None:
        """The prompts dealt so far are used up; a resumed run continues from here."""
        self.cursor = self.explorer.prompts.state_dict()

    def save(self, rollouts: int) -> bool:
        """Write a checkpoint after ``rollouts`` rollouts, wait for it and drop the oldest ones.

        A disk that is full or gone does not end the run: it says so and keeps what it has.

        Args:
            rollouts: Rollouts done.

        Returns:
            Whether the checkpoint was written.
        """
        self._copy_for_save(rollouts)
        self._write_save(rollouts)
        return self.finish_save()

    def _copy_for_save(self, rollouts: int) -> None:
        """The part of a save for which the training stands still."""
        self.finish_save()
        extra: dict[str, Any] = {"rollouts": rollouts, "prompts": self.cursor}
        with self.phase("save"):
            self.trainer.begin_save(iteration_folder(self.folder.path, rollouts), extra)

    def _write_save(self, rollouts: int) -> None:
        """The part that goes on beside the training; the next ``finish_save`` says how it went."""
        self.trainer.write_save()
        self.saving = rollouts

    def finish_save(self) -> bool:
        """Wait for the checkpoint that is being written, if any; see ``save``."""
        if self.saving is None:
            return True
        rollouts, self.saving = self.saving, None
        try:
            with self.phase("save_wait"):
                self.recorder.add(self.trainer.finish_save())
        except CheckpointError as error:
            last = latest_checkpoint(self.folder.path)
            kept = f"the last good one is {last}" if last else "there is none before it"
            self.failed_saves += 1
            self.listener.note(f"no checkpoint after {rollouts} rollouts: {error.what} ({kept})")
            return False
        prune_checkpoints(self.folder.path, self.config.keep_last, self.config.keep_every)
        return True

    def finish_rollout(self, step: int, adapter: AdapterState) -> None:
        """Evaluate and save when due, write the rollout's metrics, say what is out of its band."""
        self.finish_save()
        interval = self.config.rollout.eval_interval
        if interval and (step + 1) % interval == 0:
            with self.phase("eval"):
                self.recorder.add(self.evaluate(adapter.ref()))
        self.recorder.add(
            {"run/restarts": float(self.restarts), "run/failed_saves": float(self.failed_saves)}
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.recorder.add({"memory/driver_peak_bytes": float(peak)})
        interval, done = self.config.save_interval, step + 1
        due = interval and done % interval == 0 and done < self.config.rollout.num_rollout
        if due:
            self._copy_for_save(done)
        metrics = self.recorder.flush(step)
        self.listener.rollout(step, metrics)
        for line in health_lines(metrics):
            self.listener.note(line)
        if due:  # after the record: a checkpoint must not be ahead of it, whoever dies in between
            self._write_save(done)

    def evaluate(self, adapter: AdapterRef) -> dict[str, float]:
        """``eval/...`` scalars of ``adapter`` on the evaluation prompts."""
        return evaluate(
            self.engine,
            adapter,
            self.eval_prompts,
            self.explorer.reward,
            self.explorer.chat.decode,
            sampling=self.explorer.chat.sampling(self.config.rollout),
            seed=self.config.seed,
            note=lambda text: self.listener.note(f"evaluation: {text}"),
        )

    def finish(self, adapter: AdapterState, *, saved: bool) -> None:
        """Write the adapter into the run folder; see ``train.finish``."""
        self.listener.phase("export")
        write_result(adapter, self.folder, self.base_model, saved=saved)
