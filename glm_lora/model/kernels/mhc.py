"""Hyper-connections of four streams: read and write in a handful of passes.

The definitions are those of ``glm_lora.model.hyper``; here the small tensors keep the tokens first.
The file is long because the kernels share one layout of the small tensors.
Shapes: n tokens, H hidden, K = 4 H, W = 24 logits per token (4 pre, 4 post, 16 comb), P = 32.
"""

# Triton is not installed where there is no GPU, and its decorator has no types.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

STREAMS = 4
_LOGITS, _PADDED = 24, 32
_PARTS = 8


@triton.jit
def _project(
    x, fn, raw, squares, tokens, K: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``x fn^T`` and the sum of squares of each token over one part of K."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    w = tl.arange(0, P)
    real = n[:, None] < tokens
    row = x + n.to(tl.int64)[:, None] * K
    acc = tl.zeros([BN, P], tl.float32)
    square = tl.zeros([BN, BK], tl.float32)
    for step in range(K // (PARTS * BK)):
        k = part * (K // PARTS) + step * BK + tl.arange(0, BK)
        value = tl.load(row + k[None, :], mask=real, other=0.0)
        weight = tl.load(fn + w[:, None] * K + k[None, :], mask=w[:, None] < W, other=0.0)
        acc = tl.dot(value, tl.trans(weight), acc, input_precision="ieee")
        wide = value.to(tl.float32)
        square += wide * wide
    n = part * tokens + n
    tl.store(raw + n[:, None] * P + w[None, :], acc, mask=real)
    tl.store(squares + n, tl.sum(square, 1), mask=n < (part + 1) * tokens)


@triton.jit
def _add_parts(raw_parts, square_parts, raw, squares, tokens, P: tl.constexpr, PARTS: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = n[:, None] * P + tl.arange(0, P)[None, :]
    real = n < tokens
    acc = tl.zeros([BN, P], tl.float32)
    square = tl.zeros([BN], tl.float32)
    for part in tl.static_range(PARTS):
        acc += tl.load(raw_parts + part * tokens * P + at, mask=real[:, None], other=0.0)
        square += tl.load(square_parts + part * tokens + n, mask=real, other=0.0)
    tl.store(raw + at, acc, mask=real[:, None])
    tl.store(squares + n, square, mask=real)


@triton.jit
def _weights(
    raw, squares, base, scale, pre, post, comb, totals, tokens, eps, norm_eps,
    K: tl.constexpr, P: tl.constexpr, IT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gates and the doubly stochastic matrix of each token; ``totals [2 IT - 1, n, 4]`` is kept."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    real = n < tokens
    m = tl.arange(0, 4)
    inverse = tl.rsqrt(tl.load(squares + n, mask=real, other=1.0) / K + norm_eps)
    pair = n[:, None] * 4 + m[None, :]
    logit = tl.load(raw + n[:, None] * P + m[None, :], mask=real[:, None], other=0.0)
    logit = logit * inverse[:, None] * tl.load(scale) + tl.load(base + m)[None, :]
    tl.store(pre + pair, tl.sigmoid(logit) + eps, mask=real[:, None])
    logit = tl.load(raw + n[:, None] * P + 4 + m[None, :], mask=real[:, None], other=0.0)
    logit = logit * inverse[:, None] * tl.load(scale + 1) + tl.load(base + 4 + m)[None, :]
    tl.store(post + pair, 2.0 * tl.sigmoid(logit), mask=real[:, None])
    cell = m[:, None] * 4 + m[None, :]
    where = n[:, None, None] * P + 8 + cell[None, :, :]
    logits = tl.load(raw + where, mask=real[:, None, None], other=0.0) * inverse[:, None, None]
    logits = logits * tl.load(scale + 2) + tl.load(base + 8 + cell)[None, :, :]
    powers = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    matrix = powers / tl.sum(powers, 2, keep_dims=True) + eps
    for step in range(IT):
        if step > 0:
            total = tl.sum(matrix, 2) + eps
            matrix = matrix / total[:, :, None]
            kept = totals + (2 * step - 1) * tokens * 4
            tl.store(kept + pair, total, mask=real[:, None])
        total = tl.sum(matrix, 1) + eps
        matrix = matrix / total[:, None, :]
        kept = totals + (2 * step) * tokens * 4
        tl.store(kept + pair, total, mask=real[:, None])
    at = n[:, None, None] * 16 + cell[None, :, :]
    tl.store(comb + at, matrix, mask=real[:, None, None])


@triton.jit
def _collapse(x, pre, out, H: tl.constexpr, BH: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros([BH], tl.float32)
    for i in tl.static_range(4):
        value = tl.load(x + (n * 4 + i) * H + h, mask=h < H, other=0.0).to(tl.float32)
        total += tl.load(pre + n * 4 + i) * value
    tl.store(out + n * H + h, total.to(out.dtype.element_ty), mask=h < H)


@triton.jit
def _pre_slope(x, d_read, d_pre, H: tl.constexpr, BH: tl.constexpr):
    """``d_pre[n, i] = sum_h x[n, i, h] d_read[n, h]``."""
    n = tl.program_id(0).to(tl.int64)
    a0 = tl.zeros([BH], tl.float32)
    a1 = tl.zeros([BH], tl.float32)
    a2 = tl.zeros([BH], tl.float32)
    a3 = tl.zeros([BH], tl.float32)
    row = x + n * 4 * H
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        inside = h < H
        up = tl.load(d_read + n * H + h, mask=inside, other=0.0).to(tl.float32)
        a0 += up * tl.load(row + h, mask=inside, other=0.0).to(tl.float32)
        a1 += up * tl.load(row + H + h, mask=inside, other=0.0).to(tl.float32)
        a2 += up * tl.load(row + 2 * H + h, mask=inside, other=0.0).to(tl.float32)
        a3 += up * tl.load(row + 3 * H + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_pre + n * 4, tl.sum(a0, 0))
    tl.store(d_pre + n * 4 + 1, tl.sum(a1, 0))
    tl.store(d_pre + n * 4 + 2, tl.sum(a2, 0))
    tl.store(d_pre + n * 4 + 3, tl.sum(a3, 0))


@triton.jit
def _weights_backward(
    raw, squares, scale, pre, post, comb, totals, d_pre, d_post, d_comb, slope, along, tokens,
    eps, norm_eps, K: tl.constexpr, P: tl.constexpr, IT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Back to ``slope [n, P]`` (of ``x fn^T``) and ``along [n]`` (of ``x``, through the RMS).

    Dividing by a total is undone by multiplying with it, so only the totals are needed.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    real = n < tokens
    m = tl.arange(0, 4)
    inverse = tl.rsqrt(tl.load(squares + n, mask=real, other=1.0) / K + norm_eps)
    pair = n[:, None] * 4 + m[None, :]
    cell = m[:, None] * 4 + m[None, :]
    at = n[:, None, None] * 16 + cell[None, :, :]
    matrix = tl.load(comb + at, mask=real[:, None, None], other=0.0)
    up = tl.load(d_comb + at, mask=real[:, None, None], other=0.0)
    for back in range(IT):
        step = IT - 1 - back
        kept = totals + (2 * step) * tokens * 4
        total = tl.load(kept + pair, mask=real[:, None], other=1.0)
        up = (up - tl.sum(up * matrix, 1)[:, None, :]) / total[:, None, :]
        matrix = matrix * total[:, None, :]
        if step > 0:
            kept = totals + (2 * step - 1) * tokens * 4
            total = tl.load(kept + pair, mask=real[:, None], other=1.0)
            up = (up - tl.sum(up * matrix, 2)[:, :, None]) / total[:, :, None]
            matrix = matrix * total[:, :, None]
    soft = matrix - eps
    up = up * soft
    up = up - soft * tl.sum(up, 2)[:, :, None]
    up = up * tl.load(scale + 2)
    where = n[:, None, None] * P + 8 + cell[None, :, :]
    value = tl.load(raw + where, mask=real[:, None, None], other=0.0)
    total = tl.sum(tl.sum(up * value, 2), 1)
    tl.store(slope + where, up * inverse[:, None, None], mask=real[:, None, None])

    gate = tl.load(pre + pair, mask=real[:, None], other=0.0) - eps
    up2 = tl.load(d_pre + pair, mask=real[:, None], other=0.0) * gate * (1.0 - gate)
    up2 = up2 * tl.load(scale)
    at2 = n[:, None] * P + m[None, :]
    total += tl.sum(up2 * tl.load(raw + at2, mask=real[:, None], other=0.0), 1)
    tl.store(slope + at2, up2 * inverse[:, None], mask=real[:, None])

    gate = 0.5 * tl.load(post + pair, mask=real[:, None], other=0.0)
    up2 = 2.0 * tl.load(d_post + pair, mask=real[:, None], other=0.0) * gate * (1.0 - gate)
    up2 = up2 * tl.load(scale + 1)
    total += tl.sum(up2 * tl.load(raw + at2 + 4, mask=real[:, None], other=0.0), 1)
    tl.store(slope + at2 + 4, up2 * inverse[:, None], mask=real[:, None])
    # inverse = (|x|^2 / K + eps)^(-1/2)  =>  d inverse / dx = -inverse^3 x / K
    tl.store(along + n, -total * inverse * inverse * inverse / K, mask=real)


@triton.jit
def _read_backward(
    x, fn, pre, slope, along, d_read, d_kept, dx, tokens, K: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """``dx = d_kept + pre d_read + slope fn + along x``; one block lies within one stream."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    per_stream: tl.constexpr = (H + BK - 1) // BK
    stream = tl.program_id(1) // per_stream
    h = (tl.program_id(1) % per_stream) * BK + tl.arange(0, BK)
    w = tl.arange(0, P)
    row = n.to(tl.int64)[:, None]
    inside = (n[:, None] < tokens) & (h[None, :] < H)
    k = stream * H + h
    weight = tl.load(
        fn + w[:, None] * K + k[None, :], mask=(w[:, None] < W) & (h[None, :] < H), other=0.0
    )
    real = (n[:, None] < tokens) & (w[None, :] < W)
    factor = tl.load(slope + n[:, None] * P + w[None, :], mask=real, other=0.0)
    if SPLIT:
        # Two bfloat16 factors hold 16 bits of the slope: more than the result keeps.
        high = factor.to(tl.bfloat16)
        low = (factor - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, weight)
        total = tl.dot(low, weight, total)
    else:
        total = tl.dot(factor, weight, input_precision="ieee")
    up = tl.load(d_read + row * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    total += tl.load(pre + n * 4 + stream, mask=n < tokens, other=0.0)[:, None] * up
    at = row * K + k[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(along + n, mask=n < tokens, other=0.0)[:, None] * value
    total += tl.load(d_kept + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _write_forward(x, y, post, comb, out, H: tl.constexpr, BH: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    m = tl.arange(0, 4)
    inside = (h < H)[None, :]
    value = tl.load(y + n * H + h, mask=h < H, other=0.0).to(tl.float32)
    total = tl.load(post + n * 4 + m)[:, None] * value[None, :]
    for i in tl.static_range(4):
        mix = tl.load(comb + n * 16 + i * 4 + m)
        stream = tl.load(x + (n * 4 + i) * H + h, mask=h < H, other=0.0).to(tl.float32)
        total += mix[:, None] * stream[None, :]
    at = (n * 4 + m)[:, None] * H + h[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _write_backward(
    x, y, post, comb, d_out, dx, dy, d_post, d_comb, H: tl.constexpr, BH: tl.constexpr
):
    """All four gradients of one token in one pass."""
    n = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, 4)
    p0 = tl.load(post + n * 4)
    p1 = tl.load(post + n * 4 + 1)
    p2 = tl.load(post + n * 4 + 2)
    p3 = tl.load(post + n * 4 + 3)
    d_post_acc = tl.zeros([4], tl.float32)
    c0 = tl.zeros([4], tl.float32)
    c1 = tl.zeros([4], tl.float32)
    c2 = tl.zeros([4], tl.float32)
    c3 = tl.zeros([4], tl.float32)
    mix = comb + n * 16
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        inside = h < H
        g = d_out + n * 4 * H + h
        g0 = tl.load(g, mask=inside, other=0.0).to(tl.float32)
        g1 = tl.load(g + H, mask=inside, other=0.0).to(tl.float32)
        g2 = tl.load(g + 2 * H, mask=inside, other=0.0).to(tl.float32)
        g3 = tl.load(g + 3 * H, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + n * H + h, mask=inside, other=0.0).to(tl.float32)
        d_value = p0 * g0 + p1 * g1 + p2 * g2 + p3 * g3
        tl.store(dy + n * H + h, d_value.to(dy.dtype.element_ty), mask=inside)
        d_post_acc += _four(g0, g1, g2, g3, value, m)
        for i in tl.static_range(4):
            at = (n * 4 + i) * H + h
            stream = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            d_stream = tl.load(mix + 4 * i) * g0 + tl.load(mix + 4 * i + 1) * g1
            d_stream += tl.load(mix + 4 * i + 2) * g2 + tl.load(mix + 4 * i + 3) * g3
            tl.store(dx + at, d_stream.to(dx.dtype.element_ty), mask=inside)
            slope = _four(g0, g1, g2, g3, stream, m)
            if i == 0:
                c0 += slope
            elif i == 1:
                c1 += slope
            elif i == 2:
                c2 += slope
            else:
                c3 += slope
    tl.store(d_post + n * 4 + m, d_post_acc)
    tl.store(d_comb + n * 16 + m, c0)
    tl.store(d_comb + n * 16 + 4 + m, c1)
    tl.store(d_comb + n * 16 + 8 + m, c2)
    tl.store(d_comb + n * 16 + 12 + m, c3)


@triton.jit
def _four(g0, g1, g2, g3, value, m):
    """The four sums ``sum_h g_j value`` as one vector of length 4."""
    s0 = tl.sum(g0 * value, 0)
    s1 = tl.sum(g1 * value, 0)
    s2 = tl.sum(g2 * value, 0)
    s3 = tl.sum(g3 * value, 0)
    return tl.where(m == 0, s0, tl.where(m == 1, s1, tl.where(m == 2, s2, s3)))


def _block(hidden: int, most: int) -> int:
    return min(most, triton.next_power_of_2(hidden))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        streams = streams.contiguous()
        tokens, _, hidden = streams.shape
        width = STREAMS * hidden
        f32 = {"dtype": torch.float32, "device": streams.device}
        raw, squares = torch.empty(tokens, _PADDED, **f32), torch.empty(tokens, **f32)
        # Cut along K as well: few tokens alone would leave most of the device idle.
        raws = torch.empty(_PARTS, tokens, _PADDED, **f32)
        squared = torch.empty(_PARTS, tokens, **f32)
        _project[(triton.cdiv(tokens, 64), _PARTS)](
            streams, fn, raws, squared, tokens, width, _LOGITS, _PADDED, 64, 128, _PARTS,
            num_stages=4,
        )  # fmt: skip
        _add_parts[(triton.cdiv(tokens, 32),)](
            raws, squared, raw, squares, tokens, _PADDED, _PARTS, 32
        )
        pre, post = torch.empty(tokens, 4, **f32), torch.empty(tokens, 4, **f32)
        comb = torch.empty(tokens, 4, 4, **f32)
        totals = torch.empty(2 * iterations - 1, tokens, 4, **f32)
        _weights[(triton.cdiv(tokens, 32),)](
            raw, squares, base, scale, pre, post, comb, totals, tokens, eps, norm_eps, width,
            _PADDED, iterations, 32, num_warps=2,
        )  # fmt: skip
        out, block = streams.new_empty(tokens, hidden), _block(hidden, 2048)
        _collapse[(tokens, triton.cdiv(hidden, block))](streams, pre, out, hidden, block)
        ctx.save_for_backward(streams, fn, scale, raw, squares, pre, post, comb, totals)
        ctx.sizes = iterations, eps, norm_eps
        return out, post, comb, streams.view_as(streams)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        d_read, d_post, d_comb, d_kept = (g.contiguous() for g in grads)
        streams, fn, scale, raw, squares, pre, post, comb, totals = ctx.saved_tensors
        iterations, eps, norm_eps = ctx.sizes
        tokens, _, hidden = streams.shape
        width = STREAMS * hidden
        d_pre, slope, along = (
            torch.empty_like(pre),
            torch.empty_like(raw),
            torch.empty_like(squares),
        )
        _pre_slope[(tokens,)](streams, d_read, d_pre, hidden, _block(hidden, 1024))
        _weights_backward[(triton.cdiv(tokens, 32),)](
            raw, squares, scale, pre, post, comb, totals, d_pre, d_post, d_comb, slope, along,
            tokens, eps, norm_eps, width, _PADDED, iterations, 32, num_warps=2,
        )  # fmt: skip
        dx = torch.empty_like(streams)
        block = _block(hidden, 128)
        grid = (triton.cdiv(tokens, 64), STREAMS * triton.cdiv(hidden, block))
        _read_backward[grid](
            streams, fn, pre, slope, along, d_read, d_kept, dx, tokens, width, hidden, _LOGITS,
            _PADDED, 64, block, fn.dtype is torch.bfloat16, num_warps=8,
        )  # fmt: skip
        return dx, None, None, None, None, None, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        y = y.contiguous()
        tokens, _, hidden = streams.shape
        out, block = torch.empty_like(streams), _block(hidden, 1024)
        _write_forward[(tokens, triton.cdiv(hidden, block))](
            streams, y, post, comb, out, hidden, block
        )
        ctx.save_for_backward(streams, y, post, comb)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        streams, y, post, comb = ctx.saved_tensors
        tokens, _, hidden = streams.shape
        dx, dy = torch.empty_like(streams), torch.empty_like(y)
        d_post, d_comb = torch.empty_like(post), torch.empty_like(comb)
        _write_backward[(tokens,)](
            streams, y, post, comb, grads[0].contiguous(), dx, dy, d_post, d_comb, hidden,
            _block(hidden, 1024),
        )  # fmt: skip
        return dx, dy, d_post, d_comb


def read(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collapse the streams and make the weights for writing back; all weights are frozen.

    Args:
        streams: ``[n, 4, H]``, H a multiple of 256.
        fn: ``[24, 4 H]``.
        base: fp32 ``[24]``.
        scale: fp32 ``[3]``: of pre, post and comb.
        iterations: Sinkhorn iterations.
        eps: Of the gates and of Sinkhorn's divisions.
        norm_eps: Of the RMS.

    Returns:
        The block's input ``[n, H]``, post ``[n, 4]``, comb ``[n, 4 (from), 4 (to)]`` and the
        streams again: their gradient from ``write`` is added inside this backward pass.
    """
    return _Read.apply(  # pyright: ignore[reportReturnType]
        streams, fn, base, scale, iterations, eps, norm_eps
    )


def write(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``out_j = post_j y + sum_i comb_ij stream_i``: ``[n, 4, H]``."""
    return _Write.apply(streams, y, post, comb)  # pyright: ignore[reportReturnType]
