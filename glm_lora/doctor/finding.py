"""What a check of the machine says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How a part of the machine is."""

    OK = "ok"
    MISSING = "missing"
    """Not there; what needs it cannot be used, everything else can."""
    BROKEN = "broken"
    """There, and does not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    name: str
    state: State
    detail: str
    mend: str = ""
    """A command, or what to do; empty when all is well."""
    required: bool = False
    """Whether nothing works without it."""

    @property
    def fatal(self) -> bool:
        """Whether training on this machine is impossible because of it."""
        return self.state is State.BROKEN or (self.required and self.state is State.MISSING)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "state": self.state.value}


def ok(name: str, detail: str) -> Finding:
    """All is well."""
    return Finding(name, State.OK, detail)


def missing(name: str, detail: str, mend: str, *, required: bool = False) -> Finding:
    """Not there."""
    return Finding(name, State.MISSING, detail, mend, required)


def broken(name: str, detail: str, mend: str) -> Finding:
    """There, and does not work."""
    return Finding(name, State.BROKEN, detail, mend)
