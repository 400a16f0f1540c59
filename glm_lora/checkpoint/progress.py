"""How long-running checkpoint work reports on itself; the command line draws the bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple


class Progress(NamedTuple):
    """How far one step of the work is."""

    step: str
    """What is being done: ``pre-training``, ``converting``, ``downloading``, ..."""
    done: int
    total: int
    unit: Literal["steps", "bytes"]


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The report that says nothing."""
