"""KDA around the delta rule: short convolution with SiLU, unit norm, gated output norm.

Shapes: N tokens, W channels of each of q, k and v, K taps, R rows of head size D.
"""

# Triton is not installed where there is no GPU, and its decorator has no types.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_FORWARD, _BACKWARD = (16, 256, 8), (32, 512, 4)
"""Tokens, channels and warps of a tile."""


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
    x, weight, place, dy, dx, tokens, stride, part, W: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Gradient with respect to one of q, k and v, the SiLU's input computed again; four taps.

    Walks along the tokens: three earlier inputs and three unfinished gradients stay in registers.
    """
    first = tl.program_id(0) * BT
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    channel = c < W
    column = part * W + c
    w0 = tl.load(weight + column * 4 + 3, mask=channel, other=0.0)
    w1 = tl.load(weight + column * 4 + 2, mask=channel, other=0.0)
    w2 = tl.load(weight + column * 4 + 1, mask=channel, other=0.0)
    w3 = tl.load(weight + column * 4, mask=channel, other=0.0)
    start = x + first.to(tl.int64) * stride + column
    x1 = tl.load(start - stride, mask=channel & (first >= 1), other=0.0).to(tl.float32)
    x2 = tl.load(start - 2 * stride, mask=channel & (first >= 2), other=0.0).to(tl.float32)
    x3 = tl.load(start - 3 * stride, mask=channel & (first >= 3), other=0.0).to(tl.float32)
    e1 = tl.zeros([BC], tl.float32)
    e2 = tl.zeros([BC], tl.float32)
    e3 = tl.zeros([BC], tl.float32)
    for step in range(BT + 3):
        token = first + step
        row = token.to(tl.int64)
        real = token < tokens
        here = tl.load(place + token, mask=real, other=0)
        x0 = tl.load(x + row * stride + column, mask=channel & real, other=0.0).to(tl.float32)
        up = tl.load(dy + row * W + c, mask=channel & real, other=0.0).to(tl.float32)
        v1 = tl.where(here >= 1, w1, 0.0)
        v2 = tl.where(here >= 2, w2, 0.0)
        v3 = tl.where(here >= 3, w3, 0.0)
        y = w0 * x0 + v1 * x1 + v2 * x2 + v3 * x3
        gate = tl.sigmoid(y)
        slope = up * gate * (1.0 + y * (1.0 - gate))
        done = e3 + v3 * slope
        target = dx + (row - 3) * stride + column
        inside = channel & (step >= 3) & (token - 3 < tokens)
        tl.store(target, done.to(dx.dtype.element_ty), mask=inside)
        e3 = e2 + v2 * slope
        e2 = e1 + v1 * slope
        e1 = w0 * slope
        x3 = x2
        x2 = x1
        x1 = x0


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
        q, k, v = out.unbind()
        return q, k, v, mixed[:, channels:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        mixed, weight, place = ctx.saved_tensors
        tokens, stride = mixed.shape
        channels = weight.shape[0]
        width = channels // 3
        d_mixed = torch.empty_like(mixed)
        rows, columns, warps = _BACKWARD
        grid = (triton.cdiv(tokens, rows), triton.cdiv(width, columns))
        for part, dy in enumerate(grads[:3]):
            _conv_backward[grid](
                mixed, weight, place, dy.contiguous(), d_mixed, tokens, stride, part, width,
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
        weight: fp32 ``[3 W, 4]``, frozen.
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


@triton.jit
def _unit_forward(x, out, inverses, rows, eps, D: tl.constexpr, BR: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    at = r.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    inside = r[:, None] < rows
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) + eps)
    tl.store(out + at, (value * inverse[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(inverses + r, inverse, mask=r < rows)


@triton.jit
def _unit_backward(y, inverses, dy, dx, rows, D: tl.constexpr, BR: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    at = r.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    inside = r[:, None] < rows
    unit = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.load(inverses + r, mask=r < rows, other=0.0)[:, None]
    slope = (up - unit * tl.sum(unit * up, 1)[:, None]) * inverse
    tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=inside)


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        x, size = x.contiguous(), x.shape[-1]
        rows = x.numel() // size
        out = torch.empty_like(x)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = max(1, 4096 // size)
        _unit_forward[(triton.cdiv(rows, block),)](x, out, inverse, rows, eps, size, block)
        ctx.save_for_backward(out, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out, inverse = ctx.saved_tensors
        dy, size = grads[0].contiguous(), out.shape[-1]
        dx, block = torch.empty_like(out), max(1, 4096 // size)
        rows = inverse.shape[0]
        _unit_backward[(triton.cdiv(rows, block),)](out, inverse, dy, dx, rows, size, block)
        return dx, None


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, a power of two."""
    return _UnitNorm.apply(x, eps)  # pyright: ignore[reportReturnType]
