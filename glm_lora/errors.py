"""The errors a user can meet: one base, one class per step.

Every message has the same four parts: what is wrong, the value that was given, what is expected
and the next step. Each class is also the standard-library error it replaces, so callers may catch
``ValueError`` or ``OSError``. All of them survive pickling (Ray and multiprocessing send them
between processes). ``exit_code`` follows the command line's contract: 2 when the command or a file
given is wrong and nothing was started, 1 when a run failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GlmLoraError(Exception):
    """Base of all errors of this package.

    Args:
        what: What is wrong, with the value that was given.
        expected: What would have been right.
        next_step: What the reader can do now.
    """

    exit_code = 1

    def __init__(self, what: str, expected: str = "", next_step: str = "") -> None:
        super().__init__(what, expected, next_step)
        self.what = what
        self.expected = expected
        self.next_step = next_step

    def __str__(self) -> str:
        text = self.what
        if self.expected:
            text += f"; expected {self.expected}"
        text = text.rstrip(".") + "."
        if self.next_step:
            end = "" if self.next_step.endswith("?") else "."
            text += f" {self.next_step.rstrip('.')}{end}"
        return text


class UserError(GlmLoraError, ValueError):
    """The command, an option or a file given is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UserError):
    """An option or a configuration value is wrong."""


class ModelError(UserError):
    """A model description (``config.json``, model name) is not one we can use."""


class TargetError(UserError):
    """A target selection selects nothing, too much, or something that cannot be trained."""


class DataError(UserError):
    """A prompt file or a reward cannot be used."""


MAKE_AGAIN = "Run glm-lora prepare --force with the --model-name and folders of the first time"
"""The next step where something that ``prepare`` made is damaged."""


class CheckpointError(GlmLoraError, OSError):
    """A checkpoint is missing, truncated or not the expected one."""

    exit_code = 2

    def __init__(self, what: str, expected: str = "", next_step: str = "") -> None:
        # OSError.__new__ would turn the three texts into errno, strerror and filename.
        GlmLoraError.__init__(self, what, expected, next_step)


class RunError(GlmLoraError, RuntimeError):
    """A run that had started cannot go on."""


class Interrupted(RunError):
    """The user asked the run to stop; the message says what is saved."""

    exit_code = 130


class StopNow(BaseException):
    """A signal gives up what the run waits for; ``Interrupted``, with what is saved, follows.

    It may be raised between any two lines of any library, so no ``except Exception`` there may
    take it for a failure of its own.
    """


class ProcessLost(RunError):
    """A trainer rank or an engine is gone or silent; what it held can be built again."""


class TrainingError(RunError):
    """The training step found something that must not happen (dead adapter, NaN, drift)."""


class RolloutError(RunError):
    """The rollout engine failed, or answered for another adapter than the one asked for."""


class SyncError(RunError):
    """The adapter did not arrive at the rollout engine as it was sent."""


class ExportError(GlmLoraError, RuntimeError):
    """An adapter cannot be written, or does not load back as it was written."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(value: str, allowed: Iterable[str], count: int = 3) -> list[str]:
    """The names of ``allowed`` that look most like ``value``, best first (possibly none)."""
    return difflib.get_close_matches(value, list(allowed), n=count, cutoff=0.6)


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """A sentence that names the nearest allowed spellings, or the empty string."""
    names = nearest(value, allowed)
    return "Did you mean " + " or ".join(f"'{n}'" for n in names) + "?" if names else ""
