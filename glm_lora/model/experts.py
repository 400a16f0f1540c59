"""Grouped matrix products of the routed experts (frozen weights, no weight gradient).

Rows are sorted by expert; ``counts[e]`` rows belong to local expert ``e``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(weight, ends)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, ends = ctx.saved_tensors
        return F.grouped_mm(grads[0].contiguous(), weight, offs=ends), None, None


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


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """``x[rows of e] @ weight[e]^T`` for each expert that has rows.

    Args:
        x: ``[rows, I]``, sorted by expert.
        weight: ``[E, O, I]``, frozen.
        counts: Rows per expert; adds up to ``rows``. Or, for one product on the device, int32
            ``[E]`` there: where the rows of each expert end.

    Returns:
        ``[rows, O]``.
    """
    if isinstance(counts, Tensor):
        return _GroupedProduct.apply(x, weight, counts)  # pyright: ignore[reportReturnType]
    return _GroupedLinear.apply(x, weight, counts)  # pyright: ignore[reportReturnType]
