"""A run folder read for a report, while the run goes on too. No torch."""

from __future__ import annotations

import json
import math
import os
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_lora.config import TrainConfig, from_toml
from glm_lora.errors import ConfigError, UserError
from glm_lora.report.history import ENDS, STARTED
from glm_lora.report.run_folder import (
    BASE_FILE,
    CONFIG,
    EVENTS,
    METRICS,
    SAMPLES,
    SELECTION,
    read_object,
)
from glm_lora.report.sinks import STEP_KEY
from glm_lora.settings import spec_of
from glm_lora.targets.selection import Selection
from glm_lora.targets.summary import as_ranges, projections


@dataclass(frozen=True)
class SelectionRow:
    """Selected projections of one kind."""

    projection: str
    group: str
    layers: str
    count: int
    rank: int
    shape: str
    parameters: int | None
    """None where the model's description is gone."""


@dataclass(frozen=True)
class RunData:
    """Everything a report shows of one run."""

    path: Path
    name: str
    config: dict[str, Any]
    """``config.toml``."""
    base: dict[str, Any]
    selection: list[SelectionRow]
    records: list[dict[str, Any]]
    """``metrics.jsonl`` as it is: one object per rollout."""
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def steps(self) -> list[int]:
        """Rollout number of each record."""
        return [int(record[STEP_KEY]) for record in self.records]

    def series(self, key: str) -> list[float]:
        """One value per record; NaN where it is missing or not a number."""
        return [number(record.get(key)) for record in self.records]

    @property
    def started(self) -> dict[str, Any]:
        """The newest start, or an empty object."""
        return next((e for e in reversed(self.events) if e["event"] == STARTED), {})

    @property
    def end(self) -> dict[str, Any] | None:
        """How the run ended; None while it goes on or when it died without a word."""
        last = self.events[-1] if self.events else None
        return last if last is not None and last["event"] in ENDS else None

    @property
    def running(self) -> bool:
        """Whether the run goes on: no end is recorded and its process is alive (or elsewhere)."""
        if not self.events or self.end is not None:
            return False
        return self.started.get("host") != socket.gethostname() or _alive(self.started.get("pid"))


def load_run(path: Path, name: str = "") -> RunData:
    """Read a run folder.

    Args:
        path: The run folder.
        name: How a comparison calls it; default is the folder's name.

    Raises:
        ConfigError: ``path`` is no run folder, or a file of it is not what a run writes.
    """
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not a run folder", f"a folder with {CONFIG}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path / CONFIG} cannot be read: {error}", "the file as the run wrote it"
        ) from error
    return RunData(
        path=path,
        name=name or path.resolve().name,
        config=config,
        base=read_object(path / BASE_FILE) if (path / BASE_FILE).exists() else {},
        selection=_selection_rows(path),
        records=read_lines(path / METRICS, {STEP_KEY: int}),
        events=read_lines(path / EVENTS, {"event": str}),
        samples=read_lines(path / SAMPLES, {STEP_KEY: int, "best": dict, "worst": dict}),
    )


def read_lines(path: Path, needed: Mapping[str, type] | None = None) -> list[dict[str, Any]]:
    """The finished lines of a JSONL file; one that is being written at the end is left out.

    Args:
        path: The file; one that does not exist has no lines.
        needed: Keys that every object has, with the type of their values.

    Raises:
        ConfigError: A line is not such a JSON object.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    *finished, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line_number, line in enumerate(finished, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path} line {line_number} is not valid JSON: {error}",
                "one JSON object per line",
                "Take the line out",
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path} line {line_number} is {line[:40]}", "a JSON object")
        for key, kind in (needed or {}).items():
            if not isinstance(row.get(key), kind):
                raise ConfigError(
                    f"{path} line {line_number} has {row.get(key)!r} as {key!r}",
                    f"a value of type {kind.__name__}, as the run wrote it",
                    "Take the line out",
                )
        rows.append(row)
    return rows


def number(value: Any) -> float:
    """A metric as a float; the sinks write NaN and infinity as strings."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return math.nan


def _selection_rows(path: Path) -> list[SelectionRow]:
    if not (path / SELECTION).exists():
        return []
    stored = read_object(path / SELECTION)
    try:
        config = from_toml(TrainConfig, path / CONFIG)
        spec = spec_of(config.model_name, config.hf_checkpoint)
        selection = Selection.from_json(json.dumps(stored), spec)
    except UserError:
        return _rows_by_name(stored.get("sites", []))
    return [
        SelectionRow(
            p.leaf,
            p.group,
            as_ranges(p.layers),
            len(p.layers),
            p.rank,
            f"{p.shape[0]} x {p.shape[1]}",
            p.parameters,
        )
        for p in projections(selection)
    ]


def _rows_by_name(sites: list[list[Any]]) -> list[SelectionRow]:
    """From names alone: the model's folder was moved since."""
    kinds: dict[tuple[str, str, int], list[int]] = {}
    for name, rank, _ in sites:
        parts = name.split(".")
        layer = int(parts[parts.index("layers") + 1])
        kinds.setdefault((parts[-1], parts[-2], rank), []).append(layer)
    return [
        SelectionRow(leaf, group, as_ranges(layers), len(layers), rank, "-", None)
        for (leaf, group, rank), layers in kinds.items()
    ]


def _alive(pid: Any) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True
