"""Log-softmax statistics of a block of logits, and the factors of its gradient, in two passes.

Shapes: R rows, V local vocabulary.
"""

# Triton is not installed where there is no GPU, and its decorator has no types.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096


@triton.jit
def _statistics(
    logits, targets, first, top, total, product, own, temperature, V: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best = -float("inf")
    sums = 0.0
    weighted = 0.0
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        z = tl.load(logits + row * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
        z = z / temperature
        new = tl.maximum(best, tl.max(z, 0))
        power = tl.exp(z - new)
        shrink = tl.exp(best - new)
        sums = sums * shrink + tl.sum(power, 0)
        weighted = weighted * shrink + tl.sum(tl.where(v < V, z * power, 0.0), 0)
        best = new
    place = tl.load(targets + row) - first
    mine = (place >= 0) & (place < V)
    z = tl.load(logits + row * V + place, mask=mine, other=0.0).to(tl.float32)
    tl.store(top + row, best)
    tl.store(total + row, sums)
    tl.store(product + row, weighted)
    tl.store(own + row, z / temperature)


@triton.jit
def _factors(
    logits, second, targets, first, log_sum, entropy, temperature, V: tl.constexpr,
    BV: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = v < V
    z = tl.load(logits + row * V + v, mask=inside, other=0.0).to(tl.float32) / temperature
    log_share = z - tl.load(log_sum + row)
    share = tl.exp(log_share)
    if ENTROPY:
        slope = -(log_share + tl.load(entropy + row)) * share
        tl.store(second + row * V + v, slope.to(second.dtype.element_ty), mask=inside)
    hit = v == tl.load(targets + row) - first
    out = tl.where(hit, 1.0 - share, -share)
    tl.store(logits + row * V + v, out.to(logits.dtype.element_ty), mask=inside)


def statistics(
    logits: Tensor, targets: Tensor, first: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of z = logits / temperature: max, sum of exp(z - max), sum of z exp(z - max), own z.

    Args:
        logits: ``[R, V]``, contiguous.
        targets: int64 ``[R]``, global ids; the own z is 0 where the target is not of this rank.
        first: Global id of column 0.
        temperature: Divides the logits.

    Returns:
        Four fp32 ``[R]``.
    """
    rows, columns = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    _statistics[(rows,)](
        logits, targets, first, *out.unbind(), temperature, columns, _COLUMNS, num_warps=8
    )
    top, total, product, own = out.unbind()
    return top, total, product, own


def factors_(
    logits: Tensor,
    targets: Tensor,
    first: int,
    log_sum: Tensor,
    entropy: Tensor | None,
    temperature: float,
) -> list[Tensor]:
    """Overwrite logits by ``onehot - p``; with entropy also ``-(log p + entropy) p``.

    Args:
        logits: ``[R, V]``; overwritten.
        targets: As in ``statistics``.
        first: As in ``statistics``.
        log_sum: fp32 ``[R]``, logarithm of the partition function.
        entropy: fp32 ``[R]`` when its gradient is wanted.
        temperature: Divides the logits.
    """
    rows, columns = logits.shape
    second = logits if entropy is None else torch.empty_like(logits)
    _factors[(rows, triton.cdiv(columns, _COLUMNS))](
        logits, second, targets, first, log_sum, log_sum if entropy is None else entropy,
        temperature, columns, _COLUMNS, entropy is not None, num_warps=8,
    )  # fmt: skip
    return [logits] if entropy is None else [logits, second]
