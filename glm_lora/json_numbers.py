"""Numbers that JSON has no spelling for, spelled the same wherever this package writes JSON."""

from __future__ import annotations

import math


def jsonable(value: float) -> float | str:
    """A number as JSON can spell it: NaN and infinity as "NaN", "Infinity" and "-Infinity"."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
