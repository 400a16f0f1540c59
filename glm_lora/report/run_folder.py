"""The run folder: what a run leaves behind, and who may write to it.

``config.toml`` (resolved), ``selection.json``, ``base.json`` (fingerprint), ``inputs.json`` (sha256
of prompts and of a reward file), ``metrics.jsonl``, ``events.jsonl``, ``samples.jsonl``,
``checkpoints/iter_*``, ``adapter/`` (PEFT), ``logs/`` and the report. A folder that already holds a
run is refused unless the run is resumed or overwritten on purpose, and two processes never write
to one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glm_lora.checkpoint.files import write_atomic
from glm_lora.checkpoint.iterations import iterations, leftovers
from glm_lora.checkpoint.removal import remove_all
from glm_lora.config import TrainConfig, to_toml
from glm_lora.errors import ConfigError, GlmLoraError
from glm_lora.lora.serving import CONFIG_FILE, WEIGHTS_FILE
from glm_lora.report.sinks import STEP_KEY
from glm_lora.targets.selection import Selection

CONFIG, SELECTION, BASE_FILE = "config.toml", "selection.json", "base.json"
INPUTS = "inputs.json"
METRICS, EVENTS, SAMPLES = "metrics.jsonl", "events.jsonl", "samples.jsonl"
REPORT, REPORT_PNGS = "report.html", "report"


class RunFolder:
    """A run folder that this process has opened for writing.

    Use ``RunFolder.create`` or ``report.resuming.resume_run``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)

    @property
    def checkpoints(self) -> Path:
        """Training state, one folder per saved rollout."""
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        """The exported PEFT adapter."""
        return self.path / "adapter"

    @property
    def logs(self) -> Path:
        """Log files and TensorBoard events."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON object per rollout."""
        return self.path / METRICS

    @property
    def report(self) -> Path:
        """The report that is written at the end."""
        return self.path / REPORT

    @classmethod
    def create(
        cls,
        config: TrainConfig,
        selection: Selection,
        base: Mapping[str, Any],
        inputs: Mapping[str, str],
        *,
        force: bool,
    ) -> RunFolder:
        """Make the folder of a new run.

        Args:
            config: The resolved configuration.
            selection: What is trained.
            base: What identifies the base (its fingerprint among it).
            inputs: sha256 of the files that decide what the run learns.
            force: Remove an earlier run in the same folder; other files are never removed.

        Raises:
            ConfigError: The folder holds a run or other files, or cannot be written.
        """
        with _write_errors(config.run_dir):
            held = check_new(config, force=force)
            config.run_dir.mkdir(parents=True, exist_ok=True)
            folder = cls(config.run_dir)
            with folder._closed_on_failure():
                folder._begin(config, selection, base, inputs, replace=held)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run; ConfigError when it is in use or cannot be written."""
        with _write_errors(path):
            return cls(path)

    def write_config(self, config: TrainConfig) -> None:
        """Replace the configuration by the one the run goes on with.

        Raises:
            ConfigError: The folder cannot be written.
        """
        with _write_errors(self.path):
            write_atomic(self.path / CONFIG, to_toml(config))

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ConfigError):
            self.close()
            raise

    def _begin(
        self,
        config: TrainConfig,
        selection: Selection,
        base: Mapping[str, Any],
        inputs: Mapping[str, str],
        *,
        replace: bool,
    ) -> None:
        if replace:
            _remove_run(self.path)
        self.checkpoints.mkdir(exist_ok=True)  # it may hold files of others
        self.logs.mkdir()
        write_atomic(self.path / SELECTION, selection.to_json())
        write_atomic(self.path / BASE_FILE, json.dumps(dict(base), indent=1) + "\n")
        write_atomic(self.path / INPUTS, json.dumps(dict(inputs), indent=1) + "\n")
        # Last: a folder without it is not a run.
        write_atomic(self.path / CONFIG, to_toml(config))

    def close(self) -> None:
        """Give the folder's lock back."""
        os.close(self._lock)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn an operating-system error of the block into a ConfigError that names the option."""
    try:
        yield
    except GlmLoraError:
        raise
    except OSError as error:
        raise ConfigError(
            f"--run-dir {path} cannot be written ({error.strerror or error})",
            "a folder on a disk with free space that this user may write to",
        ) from error


def _lock(path: Path) -> int:
    handle = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise
        raise ConfigError(
            f"--run-dir {path} is in use by another process", "a folder of its own per run"
        ) from None
    return handle


def _remove_run(path: Path) -> None:
    """Remove what a run wrote, but for ``config.toml``, which the next run's replaces at the end.

    A folder in which this or the next run's start came to a stop is then still a run, for another
    ``--force``. Other files stay, in ``checkpoints`` and ``adapter``, too; ``logs`` and the charts'
    folder go whole. Of a link only the link goes; what it names stays.

    Raises:
        ConfigError: Something cannot be removed; nothing was.
    """
    checkpoints, adapter = path / "checkpoints", path / "adapter"
    names = (SELECTION, BASE_FILE, INPUTS, METRICS, EVENTS, SAMPLES, REPORT, REPORT_PNGS, "logs")
    written = [path / name for name in names]
    written += [folder for folder in (checkpoints, adapter) if folder.is_symlink()]
    if not checkpoints.is_symlink():
        written += [*iterations(checkpoints), *leftovers(checkpoints)]
    if not adapter.is_symlink():
        written += [adapter / name for name in (CONFIG_FILE, WEIGHTS_FILE, SELECTION)]
    try:
        remove_all(written)
    except OSError as error:
        raise ConfigError(
            f"--force: {error.filename} cannot be removed ({error.strerror})",
            "a run that this user may remove",
            "Mend that, or name another folder with --run-dir",
        ) from error
    for folder in (checkpoints, adapter):
        with contextlib.suppress(OSError):  # it holds other files, or is not there
            folder.rmdir()


def check_new(config: TrainConfig, *, force: bool) -> bool:
    """Whether the folder of a new run already holds one that ``force`` may remove.

    Raises:
        ConfigError: It holds a run or other files, or a file is in its place.
    """
    path = config.run_dir
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise ConfigError(f"--run-dir {path}: {there} is a file", "a new folder, or an empty one")
    held = sorted(p.name for p in path.iterdir() if p.name != ".lock") if path.is_dir() else []
    if held and (path / CONFIG).exists() and not force:
        raise ConfigError(
            f"--run-dir {path} already holds a run",
            "a new folder",
            "Continue it with --resume, overwrite it with --force, or name another folder",
        )
    if held and not (path / CONFIG).exists():
        raise ConfigError(
            f"--run-dir {path} is not empty ({', '.join(held[:3])} ...)",
            "an empty or a new folder",
        )
    return bool(held)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path} cannot be used: {reason}", "the file as the run wrote it"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}", "a JSON object")
    return value


def truncate_metrics(path: Path, rollouts: int) -> None:
    """Drop metric lines of rollouts that will be run again after a resume."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = json.loads(line)[STEP_KEY]
        except (json.JSONDecodeError, KeyError, TypeError, IndexError):
            continue  # the line that was being written when the earlier run died, or damage
        if isinstance(step, int) and step < rollouts:
            kept.append(line)
    write_atomic(path, "".join(line + "\n" for line in kept))


def last_metrics(path: Path) -> dict[str, Any]:
    """The last whole metric record, empty where there is none.

    A run that was killed while it wrote leaves half a line behind; the one before it counts.
    """
    if not path.exists():
        return {}
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(line)
    return {}
