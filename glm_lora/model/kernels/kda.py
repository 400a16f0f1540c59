"""KDA around the delta rule: short convolution with SiLU, and the gated output norm.

Shapes: N tokens, W channels of each of q, k and v, K taps, R rows of head size D.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens, channels and warps of a tile: the backward pass keeps seven rows of each in registers.
_FORWARD, _BACKWARD = (16, 256, 8), (8, 128, 4)


@triton.jit
def _conv_forward(
    x, weight, place, out, tokens, stride, W: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``silu(conv)`` of one of q, k and v (axis 2 of the grid) into ``out [3, N, W]``."""
    part = tl.program_id(2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (n[:, None] < tokens) & (c[None, :] < W)
    here = tl.load(place + n, mask=n < tokens, other=0)
    row = n.to(tl.int64)[:, None]
    column = part * W + c
    y = tl.zeros([BN, BC], tl.float32)
    for back in tl.static_range(K):
        tap = tl.load(weight + column * K + (K - 1 - back), mask=c < W, other=0.0)
        value = tl.load(
            x + (row - back) * stride + column[None, :],
            mask=inside & (here[:, None] >= back),
            other=0.0,
        )
        y += value.to(tl.float32) * tap[None, :]
    y = y * tl.sigmoid(y)
    target = out + part.to(tl.int64) * tokens * W + row * W + c[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _conv_backward(
    x, weight, place, dy, dx, tokens, stride, part, W: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradient with respect to one of q, k and v, the SiLU's input computed again."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    channels = c[None, :] < W
    column = part * W + c
    total = tl.zeros([BN, BC], tl.float32)
    for ahead in tl.static_range(K):
        later = n + ahead
        there = tl.load(place + later, mask=later < tokens, other=-1)
        reached = (there >= ahead)[:, None] & channels
        row = later.to(tl.int64)[:, None]
        y = tl.zeros([BN, BC], tl.float32)
        for back in tl.static_range(K):
            tap = tl.load(weight + column * K + (K - 1 - back), mask=c < W, other=0.0)
            value = tl.load(
                x + (row - back) * stride + column[None, :],
                mask=reached & (there[:, None] >= back),
                other=0.0,
            )
            y += value.to(tl.float32) * tap[None, :]
        gate = tl.sigmoid(y)
        up = tl.load(dy + row * W + c[None, :], mask=reached, other=0.0).to(tl.float32)
        tap = tl.load(weight + column * K + (K - 1 - ahead), mask=c < W, other=0.0)
        total += up * gate * (1.0 + y * (1.0 - gate)) * tap[None, :]
    target = dx + n.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(target, total.to(dx.dtype.element_ty), mask=(n[:, None] < tokens) & channels)


class _ConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, weight: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, stride = mixed.shape
        channels, taps = weight.shape
        width = channels // 3
        out = mixed.new_empty(3, tokens, width)
        rows, columns, warps = _FORWARD
        grid = (triton.cdiv(tokens, rows), triton.cdiv(width, columns), 3)
        _conv_forward[grid](
            mixed, weight, place, out, tokens, stride, width, taps, rows, columns, num_warps=warps
        )
        ctx.save_for_backward(mixed, weight, place)
        return *out.unbind(), mixed[:, channels:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        mixed, weight, place = ctx.saved_tensors
        tokens, stride = mixed.shape
        channels, taps = weight.shape
        width = channels // 3
        d_mixed = torch.empty_like(mixed)
        rows, columns, warps = _BACKWARD
        grid = (triton.cdiv(tokens, rows), triton.cdiv(width, columns))
        for part, dy in enumerate(grads[:3]):
            _conv_backward[grid](
                mixed, weight, place, dy.contiguous(), d_mixed, tokens, stride, part, width, taps,
                rows, columns, num_warps=warps,
            )  # fmt: skip
        d_mixed[:, channels:] = grads[3]
        return d_mixed, None, None


def conv_silu(
    mixed: Tensor, weight: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut ``mixed`` into q, k, v and the rest, the first three through ``silu(conv)``.

    Args:
        mixed: ``[N, 3 W + rest]``, contiguous.
        weight: fp32 ``[3 W, K]``, frozen.
        place: int32 ``[N]``, position of each token in its own sequence.

    Returns:
        q, k, v ``[N, W]`` and the last columns ``[N, rest]``.
    """
    return _ConvSilu.apply(mixed, weight, place)  # pyright: ignore[reportReturnType]


@triton.jit
def _norm_forward(
    x, gate, weight, out, rows, eps, D: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.arange(0, D)
    inside = r[:, None] < rows
    at = r.to(tl.int64)[:, None] * D + d[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    w = tl.load(weight + d).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    y = value * inverse[:, None] * w[None, :] * open_
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(x, gate, weight, dy, dx, d_gate, rows, eps, D: tl.constexpr, BR: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.arange(0, D)
    inside = r[:, None] < rows
    at = r.to(tl.int64)[:, None] * D + d[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    up = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + d).to(tl.float32)[None, :]
    inverse = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    normed = value * inverse
    inner = up * w * open_
    along = tl.sum(inner * normed, 1)[:, None] / D
    tl.store(dx + at, ((inner - normed * along) * inverse).to(dx.dtype.element_ty), mask=inside)
    slope = up * w * normed * open_ * (1.0 - open_)
    tl.store(d_gate + at, slope.to(d_gate.dtype.element_ty), mask=inside)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // size
        block = max(1, 4096 // size)
        _norm_forward[(triton.cdiv(rows, block),)](x, gate, weight, out, rows, eps, size, block)
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, gate, weight = ctx.saved_tensors
        dy, size = grads[0].contiguous(), x.shape[-1]
        dx, d_gate = torch.empty_like(x), torch.empty_like(gate)
        rows = x.numel() // size
        block = max(1, 4096 // size)
        _norm_backward[(triton.cdiv(rows, block),)](
            x, gate, weight, dy, dx, d_gate, rows, ctx.eps, size, block
        )
        return dx, d_gate, None, None


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x`` over the last axis (a power of two) times ``sigmoid(gate)``."""
    return _GatedNorm.apply(x, gate, weight, eps)  # pyright: ignore[reportReturnType]
