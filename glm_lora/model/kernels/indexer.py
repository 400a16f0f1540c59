"""Scores of the k-pool indexer: ``sum_h w[n, h] relu(q[n, h] . key[p])`` without per-head scores.

Shapes: R query rows, h heads, D head size, P pools.
"""

# Triton is not installed where there is no GPU, and its decorator has no types.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scores(
    query, weights, keys, out, rows, pools, first, scale, POOL: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A pool that is not complete at a query gets the lowest score."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    d = tl.arange(0, D)
    complete = (p * POOL + POOL - 1)[None, :] <= (first + r)[:, None]
    inside = (r[:, None] < rows) & (p[None, :] < pools)
    total = tl.zeros([BR, BP], tl.float32)
    if tl.program_id(1) * BP * POOL + POOL - 1 <= first + tl.program_id(0) * BR + BR - 1:
        key = tl.load(keys + p[None, :] * D + d[:, None], mask=p[None, :] < pools, other=0.0)
        for head in range(HEADS):
            at = (r[:, None].to(tl.int64) * HEADS + head) * D + d[None, :]
            q = tl.load(query + at, mask=r[:, None] < rows, other=0.0)
            score = tl.dot(q, key, input_precision="ieee") * scale
            score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
            w = tl.load(weights + r * HEADS + head, mask=r < rows, other=0.0)
            total += w[:, None] * score
    lowest = -3.4028234663852886e38
    total = tl.where(complete, total, lowest)
    at = r[:, None].to(tl.int64) * pools + p[None, :]
    tl.store(out + at, total, mask=inside)


def scores(query: Tensor, weights: Tensor, keys: Tensor, first: int, pool: int) -> Tensor:
    """Scores of one sequence's pools for consecutive queries, fp32 ``[R, P]``.

    Args:
        query: ``[R, h, D]``, contiguous.
        weights: fp32 ``[R, h]``.
        keys: ``[P, D]``.
        first: Position of query 0 in the sequence.
        pool: Tokens per pool.
    """
    rows, heads, size = query.shape
    pools = keys.shape[0]
    out = torch.empty(rows, pools, dtype=torch.float32, device=query.device)
    _scores[(triton.cdiv(rows, 64), triton.cdiv(pools, 128))](
        query, weights, keys, out, rows, pools, first, size**-0.5, pool, heads, size, 64, 128,
        num_warps=8,
    )  # fmt: skip
    return out
