"""What happened in a run beside its metrics: how it began and ended, and sampled responses.

``events.jsonl`` holds one object per event, ``samples.jsonl`` a few best and worst responses per
rollout. Both are only ever appended to, so that they survive a run that dies; a resume drops the
samples of rollouts that will be run again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from glm_lora import __version__
from glm_lora.checkpoint.files import append_line
from glm_lora.errors import Interrupted, StopNow
from glm_lora.report.run_folder import EVENTS, SAMPLES, truncate_metrics
from glm_lora.report.sinks import STEP_KEY

STARTED, FINISHED, STOPPED, FAILED = "started", "finished", "stopped", "failed"
ENDS = frozenset({FINISHED, STOPPED, FAILED})
PACKAGES = ("torch", "megatron-core", "transformers", "peft", "ray", "flash-linear-attention")
GROUPS_KEPT = 2
"""Prompts per rollout of which the best and the worst response are kept."""
TEXT_KEPT = 2000
"""Characters kept of each prompt and response: the first and the last half of them."""


class Scored(NamedTuple):
    """One response with its reward, as a report shows it."""

    prompt: str
    label: str
    response: str
    reward: float
    tokens: int
    finish: str


class RunHistory:
    """Appends to the history in a run folder.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run

    def started(self, first: int, **facts: Any) -> None:
        """Record that the run begins (or goes on) with rollout ``first``, and with what."""
        truncate_metrics(self._run / SAMPLES, first)
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        self._append(
            EVENTS, {"event": STARTED, "rollout": first, **process, "versions": versions(), **facts}
        )

    def ended(self, error: BaseException | None) -> None:
        """Record how the run ended: finished, stopped by the user, or failed with an error."""
        if error is None:
            self._append(EVENTS, {"event": FINISHED})
            return
        stopped = isinstance(error, Interrupted | StopNow | KeyboardInterrupt)
        self._append(
            EVENTS,
            {
                "event": STOPPED if stopped else FAILED,
                "error": type(error).__name__,
                "text": str(error),
            },
        )

    def samples(self, step: int, groups: Sequence[Sequence[Scored]]) -> None:
        """Keep the best and the worst response of the groups whose rewards differ most."""
        known = [group for group in groups if group]
        spread = sorted(known, key=_spread, reverse=True)[:GROUPS_KEPT]
        for group in spread:
            best, worst = max(group, key=_reward), min(group, key=_reward)
            row = {
                STEP_KEY: step,
                "prompt": shorten(best.prompt),
                "label": shorten(best.label),
                "best": _response(best),
                "worst": _response(worst),
            }
            self._append(SAMPLES, row)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        append_line(self._run / name, json.dumps({**row, "time": round(time.time(), 3)}))


def versions() -> dict[str, str]:
    """Versions of this package, Python and the packages that decide the numbers."""
    found = {"glm-lora": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def shorten(text: str) -> str:
    """``text``, or its first and last part with the number of characters left out."""
    if len(text) <= TEXT_KEPT:
        return text
    half = TEXT_KEPT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _reward(scored: Scored) -> float:
    return scored.reward


def _spread(group: Sequence[Scored]) -> float:
    rewards = [scored.reward for scored in group]
    return max(rewards) - min(rewards)


def _response(scored: Scored) -> dict[str, Any]:
    return {
        "text": shorten(scored.response),
        "reward": scored.reward,
        "tokens": scored.tokens,
        "finish": scored.finish,
    }
