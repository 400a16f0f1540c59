"""Where metrics go: ``metrics.jsonl`` always, TensorBoard by default, W&B on request.

NaN and infinity are written as the strings "NaN", "Infinity" and "-Infinity": JSON has no spelling
for them, and dropping or zeroing them would hide what they say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from glm_lora.checkpoint.files import append_line
from glm_lora.errors import ConfigError
from glm_lora.json_numbers import jsonable

STEP_KEY = "rollout/step"


class MetricSink(Protocol):
    """Takes the scalars of one rollout."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` of rollout ``step``."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


class JsonlSink:
    """One JSON object per rollout, on disk when ``log`` returns.

    The file is opened for each line: a resume may have replaced it since the run started.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        record = {STEP_KEY: step, **{k: jsonable(v) for k, v in metrics.items()}}
        append_line(self._path, json.dumps(record, allow_nan=False))

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoardSink:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        # tensorboard itself, without torch.utils: its writer is enough for scalars.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event that holds every scalar."""
        import time

        values = [self._summary.Value(tag=k, simple_value=v) for k, v in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """Weights & Biases; its own settings say where (offline too)."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(
                "--wandb: the package wandb is not installed",
                next_step="Install it with: pip install 'glm-lora[wandb]'",
            ) from None
        self._run = wandb.init(project="glm-lora", dir=str(folder), config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the scalars of one rollout."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
