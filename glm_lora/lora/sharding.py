"""How tensor parallelism cuts the factors of an adapter: pure functions of kinds and shapes.

For ``y = W x + s B A x`` with ``W [out, in]``:

| projection | A ``[r, in]`` | B ``[out, r]`` | partial gradients |
|---|---|---|---|
| column (``out`` cut) | replicated | cut on axis 0 | A |
| row (``in`` cut) | cut on axis 1 | replicated | B |
| replicated | replicated | replicated | both, under sequence parallelism only |

A partial gradient holds one rank's contribution and must be summed over the tensor-parallel group.
A of a column projection sees only the outputs of its rank; B of a row projection sees only the
inputs of its rank; under sequence parallelism a replicated projection sees only its rank's tokens.
"""

from __future__ import annotations

from typing import Literal

from glm_lora.arch.projections import Kind

Letter = Literal["A", "B"]
"""Which of the two factors of an adapter."""


def tp_axis(kind: Kind, letter: Letter) -> int | None:
    """The axis of the factor that tensor parallelism cuts, or None."""
    if kind is Kind.COLUMN and letter == "B":
        return 0
    if kind is Kind.ROW and letter == "A":
        return 1
    return None


def is_partial(kind: Kind, letter: Letter, *, sequence_parallel: bool) -> bool:
    """Whether the factor's gradient must be summed over the tensor-parallel ranks."""
    if kind is Kind.REPLICATED:
        return sequence_parallel
    return tp_axis(kind, letter) is None


def local_shape(full: tuple[int, int], axis: int | None, tp_size: int) -> tuple[int, int]:
    """Shape of one rank's part of a factor."""
    if axis is None:
        return full
    return (full[0] // tp_size, full[1]) if axis == 0 else (full[0], full[1] // tp_size)


def local_slice(
    full: tuple[int, int], axis: int | None, tp_size: int, tp_rank: int
) -> tuple[slice, slice]:
    """The index of one rank's part in the full factor."""
    if axis is None:
        return slice(None), slice(None)
    width = full[axis] // tp_size
    part = slice(tp_rank * width, (tp_rank + 1) * width)
    return (part, slice(None)) if axis == 0 else (slice(None), part)
