"""Attention over chosen pools of latents: keys and values of all heads are one latent per token.

Each head's keys and values are linear in the latent c of a token, so the queries are carried into
the latent space (``Wk^T q``), attend to the latents themselves, and what they find is carried out
(``Wv``): the absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1.2).
A query then reads only the tokens of its pools, once for all heads.

Shapes: L tokens of one sequence, R queries at its end, h heads, D latent size, K chosen pools.
"""

# Triton is not installed where there is no GPU, and its decorator has no types.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_lora.model.kept import kept

QUERIES_PER_BLOCK = 1024
"""Queries whose latent-space tensors, ``[h, queries, D]`` each, are in memory at a time."""

FORWARD_TILES = {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 8, 2)}
BACKWARD_TILES = {16: (32, 4, 2), 32: (64, 8, 2), 64: (64, 8, 1)}
"""Tokens of a tile, warps and stages, by the heads of a program. The most heads, because a program
of the backward pass adds to each of its tokens once. For 512 latents on Hopper: 197 KB of shared
memory at most, 255 registers."""
_LOG2_E = 1.4426950408889634


@triton.jit
def _tokens(
    chosen, query, position, start, K: tl.constexpr, POOL: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Tokens ``start + [0, BN)`` of those listed for a query, and whether it sees them.

    The list is the K chosen pools, then the pool that is incomplete at the query.
    """
    place = start + tl.arange(0, BN)
    slot = place // POOL
    pool = tl.load(chosen + query * K + slot, mask=slot < K, other=-1)
    pool = tl.where(slot == K, (position + 1) // POOL, pool)
    token = pool * POOL + place % POOL
    return token, (pool >= 0) & (token <= position)


@triton.jit
def _forward(
    query, latents, chosen, out, log_sum, rows, heads, first, scale, K: tl.constexpr,
    POOL: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One query: softmax over its tokens, a tile at a time; ``scale`` is for exponents of 2."""
    r = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, D)
    position = first + tl.program_id(0)
    row = h.to(tl.int64) * rows + r
    at = row[:, None] * D + d[None, :]
    q = tl.load(query + at, mask=h[:, None] < heads, other=0.0)
    best = tl.full([BH], -float("inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    found = tl.zeros([BH, D], tl.float32)
    for start in range(0, (K + 1) * POOL, BN):
        token, seen = _tokens(chosen, r, position, start, K, POOL, BN)
        c = tl.load(latents + token[:, None] * D + d[None, :], mask=seen[:, None], other=0.0)
        score = tl.dot(q, tl.trans(c), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        new = tl.maximum(best, tl.max(score, 1))
        # Nothing seen so far: any finite number keeps infinities from being subtracted.
        level = tl.where(new == -float("inf"), 0.0, new)
        power = tl.exp2(score - level[:, None])
        shrink = tl.exp2(best - level)
        total = total * shrink + tl.sum(power, 1)
        found = tl.dot(power.to(c.dtype), c, found * shrink[:, None], input_precision="ieee")
        best = new
    empty = total == 0.0
    found = found / tl.where(empty, 1.0, total)[:, None]
    inside = h < heads
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside[:, None])
    level = tl.where(empty, 0.0, best + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(log_sum + row, level, mask=inside)


@triton.jit
def _backward(
    query, latents, chosen, up, log_sum, delta, d_query, d_latents, rows, heads, first, scale,
    slope, K: tl.constexpr, POOL: tl.constexpr, D: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """One query and one half of the columns; ``slope`` is the scale itself.

    Halves, because the gradients of 64 whole queries and of a tile do not fit in the registers;
    each computes the scores over both. A latent gets its gradient as a key and as a value.
    """
    r = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.program_id(2) * (D // 2) + tl.arange(0, D // 2)
    other = D // 2 - tl.program_id(2) * (D // 2) + tl.arange(0, D // 2)
    position = first + tl.program_id(0)
    row = h.to(tl.int64) * rows + r
    inside = h < heads
    at = row[:, None] * D
    q = tl.load(query + at + d[None, :], mask=inside[:, None], other=0.0)
    q_other = tl.load(query + at + other[None, :], mask=inside[:, None], other=0.0)
    u = tl.load(up + at + d[None, :], mask=inside[:, None], other=0.0)
    u_other = tl.load(up + at + other[None, :], mask=inside[:, None], other=0.0)
    level = tl.load(log_sum + row, mask=inside, other=0.0)
    along = tl.load(delta + row, mask=inside, other=0.0)
    dq = tl.zeros([BH, D // 2], tl.float32)
    for start in range(0, (K + 1) * POOL, BN):
        token, seen = _tokens(chosen, r, position, start, K, POOL, BN)
        at_token = token[:, None] * D
        c = tl.load(latents + at_token + d[None, :], mask=seen[:, None], other=0.0)
        c_other = tl.load(latents + at_token + other[None, :], mask=seen[:, None], other=0.0)
        score = tl.dot(q, tl.trans(c), input_precision="ieee")
        score = tl.dot(q_other, tl.trans(c_other), score, input_precision="ieee")
        share = tl.exp2(score * scale - level[:, None])
        share = tl.where(seen[None, :] & inside[:, None], share, 0.0)
        d_share = tl.dot(u, tl.trans(c), input_precision="ieee")
        d_share = tl.dot(u_other, tl.trans(c_other), d_share, input_precision="ieee")
        d_score = (share * (d_share - along[:, None]) * slope).to(c.dtype)
        dq = tl.dot(d_score, c, dq, input_precision="ieee")
        # Columns first: a product of 64 rows or more is what Hopper's matrix units take.
        dc = tl.dot(tl.trans(q), d_score, input_precision="ieee")
        dc = tl.dot(tl.trans(u), share.to(c.dtype), dc, input_precision="ieee")
        place = token[None, :] * D + d[:, None]
        tl.atomic_add(d_latents + place, dc, mask=seen[None, :], sem="relaxed")
    tl.store(d_query + at + d[None, :], dq.to(d_query.dtype.element_ty), mask=inside[:, None])


def heads_of_a_program(heads: int) -> int:
    """How many heads one program computes together; a matrix unit takes 16 or more."""
    return min(64, max(16, triton.next_power_of_2(heads)))


def _grid(tensor: Tensor, halves: int) -> tuple[int, tuple[int, int, int]]:
    """Heads of a program and the grid for ``[h, R, ...]``."""
    heads, rows = tensor.shape[:2]
    block = heads_of_a_program(heads)
    return block, (rows, triton.cdiv(heads, block), halves)


def attend(
    query: Tensor, latents: Tensor, chosen: Tensor, first: int, pool: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of consecutive queries to their chosen pools and their incomplete one.

    Args:
        query: In the latent space, ``[h, R, D]``, contiguous; D a power of two, at least
            ``fast.SMALLEST_LATENT``.
        latents: Of one sequence, ``[L, D]``, contiguous.
        chosen: int32 ``[R, K]``, contiguous; different pools, complete at the query; -1 for none.
        first: Position of query 0.
        pool: Tokens per pool.
        scale: Of the products.

    Returns:
        ``[h, R, D]`` in the queries' dtype, zero for a query that sees nothing, and the base-2
        logarithms of the softmax's sums, fp32 ``[h, R]``.
    """
    heads, rows, size = query.shape
    out = torch.empty_like(query)
    log_sum = query.new_empty(heads, rows, dtype=torch.float32)
    block, grid = _grid(query, 1)
    tokens, warps, stages = FORWARD_TILES[block]
    _forward[grid](
        query, latents, chosen, out, log_sum, rows, heads, first, scale * _LOG2_E,
        chosen.shape[1], pool, size, block, tokens, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, log_sum


def gradients(
    query: Tensor,
    latents: Tensor,
    chosen: Tensor,
    up: Tensor,
    log_sum: Tensor,
    delta: Tensor,
    first: int,
    pool: int,
    scale: float,
    total: Tensor,
) -> Tensor:
    """Gradient of ``attend`` with respect to its queries; that of the latents is added to a buffer.

    The order of those additions is left to the device.

    Args:
        query: As for ``attend``.
        latents: As for ``attend``.
        chosen: As for ``attend``.
        up: Gradient of the result, ``[h, R, D]``, contiguous.
        log_sum: As ``attend`` returned it.
        delta: fp32 ``[h, R]``, products of the result and its gradient, summed over D.
        first: As for ``attend``.
        pool: As for ``attend``.
        scale: As for ``attend``.
        total: fp32 ``[L, D]``, contiguous; added to.
    """
    heads, rows, size = query.shape
    out = torch.empty_like(query)
    block, grid = _grid(query, 2)
    tokens, warps, stages = BACKWARD_TILES[block]
    _backward[grid](
        query, latents, chosen, up, log_sum, delta, out, total, rows, heads, first,
        scale * _LOG2_E, scale, chosen.shape[1], pool, size, block, tokens,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


class _Absorbed(torch.autograd.Function):
    """A block of queries at a time through the latent space; see ``sparse_attention``.

    Kept are the queries and results of the heads, half as wide as those in the latent space.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latents: Tensor,
        weight: Tensor,
        chosen: Tensor,
        pool: int,
        scale: float,
    ) -> Tensor:
        latents = latents.contiguous()
        ctx.pool, ctx.scale = pool, scale
        sums: list[Tensor] = []

        def run() -> Tensor:
            out, log_sum = _run(q, latents, weight, chosen, pool, scale)
            sums.append(log_sum)
            return out

        out, log_sum = kept(run), kept(sums.pop)
        # What is kept must not point back to the graph.
        out = out.detach()
        ctx.save_for_backward(q, latents, weight, chosen, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, latents, weight, chosen, out, log_sum = ctx.saved_tensors
        key, value = weight.split([q.shape[2], out.shape[2]], dim=1)
        first = latents.shape[0] - q.shape[0]
        total = torch.zeros_like(latents, dtype=torch.float32)
        dq = torch.empty_like(q)
        for rows in _blocks(q.shape[0]):
            up = grads[0][rows].transpose(0, 1)
            # The same number in the latent space and outside: the products are linear.
            delta = (up.float() * out[rows].transpose(0, 1).float()).sum(-1)
            d_query = gradients(
                torch.bmm(q[rows].transpose(0, 1), key), latents, chosen[rows],
                torch.bmm(up, value), log_sum[:, rows].contiguous(), delta.contiguous(),
                first + rows.start, ctx.pool, ctx.scale, total,
            )  # fmt: skip
            dq[rows] = torch.bmm(d_query, key.transpose(1, 2)).transpose(0, 1)
        return dq, total.to(latents.dtype), None, None, None, None


def _run(
    q: Tensor, latents: Tensor, weight: Tensor, chosen: Tensor, pool: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Results ``[R, h, v_dim]`` and logarithms of sums ``[h, R]``."""
    rows_all, heads, width = q.shape
    key, value = weight.split([width, weight.shape[1] - width], dim=1)
    first = latents.shape[0] - rows_all
    out = q.new_empty(rows_all, heads, value.shape[1])
    log_sum = q.new_empty(heads, rows_all, dtype=torch.float32)
    for rows in _blocks(rows_all):
        query = torch.bmm(q[rows].transpose(0, 1), key)
        found, log_sum[:, rows] = attend(
            query, latents, chosen[rows], first + rows.start, pool, scale
        )
        out[rows] = torch.bmm(found, value.transpose(1, 2)).transpose(0, 1)
    return out, log_sum


def _blocks(rows: int) -> list[slice]:
    starts = range(0, rows, QUERIES_PER_BLOCK)
    return [slice(start, min(start + QUERIES_PER_BLOCK, rows)) for start in starts]


def sparse_attention(
    q: Tensor, latents: Tensor, weight: Tensor, chosen: Tensor, pool: int, scale: float
) -> Tensor:
    """Attention of a sequence's last R tokens to their chosen pools and their incomplete one.

    An enclosing checkpoint keeps the result (``glm_lora.model.kept``). The gradient of the latents
    is summed in fp32 in no fixed order.

    Args:
        q: ``[R, h, d]``.
        latents: ``[L, D]``; D as for ``attend``.
        weight: ``[h, d + v_dim, D]``, frozen: from latents to each head's key, then value.
        chosen: int32 ``[R, K]``, contiguous; different pools, complete at the query; -1 for none.
        pool: Tokens per pool.
        scale: Of the products.

    Returns:
        ``[R, h, v_dim]``.
    """
    assert latents.numel() < 2**31, "the kernels count a sequence's latents in 32 bits"
    return _Absorbed.apply(q, latents, weight, chosen, pool, scale)  # pyright: ignore[reportReturnType]
