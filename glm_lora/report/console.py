"""What a person sees while a run goes on: a progress bar, or plain lines without a terminal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

from rich import filesize
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from glm_lora.checkpoint.progress import Progress, Report
from glm_lora.errors import GlmLoraError, Interrupted
from glm_lora.json_numbers import jsonable
from glm_lora.protocols import LOGPROB_DIFF


@contextlib.contextmanager
def prepare_progress(console: Console) -> Iterator[Report]:
    """A bar per step of ``prepare`` with rate and time left; silent without a terminal."""
    progress = RichProgress(
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=32),
        TextColumn("{task.fields[amount]}"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def report(now: Progress) -> None:
        amount = (
            f"{filesize.decimal(now.done)} of {filesize.decimal(now.total)}"
            if now.unit == "bytes"
            else f"{now.done}/{now.total}"
        )
        if now.step not in tasks:
            tasks[now.step] = progress.add_task(now.step, total=now.total, amount=amount)
        progress.update(tasks[now.step], completed=now.done, total=now.total, amount=amount)

    with progress:
        yield report


class Listener(Protocol):
    """Hears what the loop does."""

    def phase(self, name: str) -> None:
        """A part of the run begins: starting, sample, train, sync, ..."""
        ...

    def rollout(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rollout ``step`` is done."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...


class SilentListener:
    """Hears and says nothing."""

    def phase(self, name: str) -> None:
        """Ignore."""

    def rollout(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""


def describe(metrics: Mapping[str, float]) -> str:
    """The figures of one rollout in one line."""
    parts = []
    for label, key, form in (
        ("reward", "rollout/raw_reward", "{:.3f}"),
        ("logprob diff", LOGPROB_DIFF, "{:.1e}"),
        ("kl", "train/ppo_kl", "{:.1e}"),
        ("grad norm", "train/grad_norm", "{:.3f}"),
        ("length", "rollout/response_length", "{:.1f}"),
        ("s", "time/rollout", "{:.2f}"),
        ("", "time/train", "/ {:.2f}"),
        ("", "time/sync", "/ {:.2f}"),
    ):
        if key in metrics:
            parts.append(f"{label} {form.format(metrics[key])}".strip())
    return "  ".join(parts)


class ConsoleListener:
    """A progress bar on a terminal; one line per rollout elsewhere. Use as a context manager."""

    def __init__(self, console: Console, first: int, total: int) -> None:
        self.console = console
        self._progress = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
            transient=False,
        )
        self._task = self._progress.add_task("starting", total=total, completed=first, figures="")

    def __enter__(self) -> ConsoleListener:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def phase(self, name: str) -> None:
        """Show the phase beside the bar."""
        self._progress.update(self._task, description=f"{name:<8}")

    def rollout(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar, or print the line."""
        figures = describe(metrics)
        self._progress.update(self._task, completed=step + 1, figures=figures)
        if not self.console.is_terminal:
            self.console.print(f"rollout {step:>4}  {figures}", soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, soft_wrap=True, markup=False)


class JsonListener:
    """One JSON object per line, for machines.

    Args:
        write: Takes one line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def event(self, event: str, **facts: Any) -> None:
        """Say that something happened."""
        self._write(json.dumps({"event": event, **facts}, allow_nan=False))

    def failed(self, error: GlmLoraError) -> None:
        """Say which error ends the run: ``stopped`` when it was asked to, else ``failed``."""
        self.event(
            "stopped" if isinstance(error, Interrupted) else "failed",
            error=type(error).__name__,
            what=error.what,
            expected=error.expected,
            next_step=error.next_step,
        )

    def phase(self, name: str) -> None:
        """Say that a phase begins."""
        self.event("phase", name=name)

    def rollout(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give all metrics of the rollout."""
        self.event("rollout", step=step, metrics={k: jsonable(v) for k, v in metrics.items()})

    def note(self, text: str) -> None:
        """Give the note."""
        self.event("note", text=text)
