"""Keeping the report of a running run up to date."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from glm_lora.report.html import write_report
from glm_lora.report.run_data import load_run
from glm_lora.report.run_folder import EVENTS, METRICS


def watch(
    run: Path,
    output: Path | None,
    seconds: int,
    written: Callable[[Path], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Write the report whenever the run wrote something, until the run has ended.

    The page reloads itself every ``seconds`` meanwhile; the last one written does not.

    Args:
        run: The run folder.
        output: Where to write; None for the run folder.
        seconds: Time between two looks.
        written: Called with the file after each writing.
        sleep: Waits.

    Raises:
        ConfigError: ``run`` is no run folder.
        OSError: A file cannot be written.
    """
    seen: tuple[int, ...] | None = None
    while load_run(run).running:
        now = tuple(_size(run / name) for name in (METRICS, EVENTS))
        if now != seen:
            written(write_report(run, output, refresh=seconds))
            seen = now
        sleep(seconds)
    path = write_report(run, output)
    written(path)
    return path


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
