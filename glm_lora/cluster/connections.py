"""Telling a lost connection between ranks from a fault of one's own; needs no Ray."""

from __future__ import annotations


def is_broken_connection(cause: BaseException) -> bool:
    """Whether a collective failed because of a peer: torch's own class, or gloo's plain one."""
    names = {kind.__name__ for kind in type(cause).__mro__}
    return "DistError" in names or (isinstance(cause, RuntimeError) and "gloo" in str(cause))
