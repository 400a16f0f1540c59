"""Grouped matrix products of the routed experts (frozen weights, no weight gradient).

Rows are sorted by expert; ``counts[e]`` rows belong to local expert ``e``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.counts = counts
        return _per_expert(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _per_expert(grads[0], weight, ctx.counts), None, None


def _per_expert(x: Tensor, weight_E_I_O: Tensor, counts: Sequence[int]) -> Tensor:
    out = x.new_empty(x.shape[0], weight_E_I_O.shape[2])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            torch.mm(x[start:stop], weight_E_I_O[expert], out=out[start:stop])
            start = stop
    return out


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """``x[rows of e] @ weight[e]^T`` for each expert that has rows.

    Args:
        x: ``[rows, I]``, sorted by expert.
        weight: ``[E, O, I]``, frozen.
        counts: Rows per expert; adds up to ``rows``.

    Returns:
        ``[rows, O]``.
    """
    return _GroupedLinear.apply(x, weight, counts)  # pyright: ignore[reportReturnType]
