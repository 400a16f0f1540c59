"""Around the experts' products: SwiGLU with row weights, and moving rows to and from experts.

Shapes: N tokens, k experts per token, R = N k rows sorted by expert, F inner width, H hidden.
"""

# Triton is not installed where there is no GPU, and its decorator has no types.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu_forward(
    gate_up, scale, out, limit, F: tl.constexpr, SCALED: tl.constexpr, BF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    gate = tl.load(gate_up + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    # As torch's clamp: by default a minimum with NaN would be the limit, and hide a fault.
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    y = gate * tl.sigmoid(gate) * up
    if SCALED:
        y *= tl.load(scale + row)
    tl.store(out + row * F + f, y.to(out.dtype.element_ty), mask=f < F)


@triton.jit
def _swiglu_backward(
    gate_up, scale, dy, d_gate_up, d_scale, limit, F: tl.constexpr, SCALED: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = 1.0
    if SCALED:
        factor = tl.load(scale + row)
    along = tl.zeros([BF], tl.float32)
    for start in range(0, F, BF):
        f = start + tl.arange(0, BF)
        raw_gate = tl.load(gate_up + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
        raw_up = tl.load(gate_up + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
        up = tl.load(dy + row * F + f, mask=f < F, other=0.0).to(tl.float32)
        gate = tl.minimum(raw_gate, limit, propagate_nan=tl.PropagateNan.ALL)
        value = tl.clamp(raw_up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        share = tl.sigmoid(gate)
        silu = gate * share
        if SCALED:
            along += up * silu * value
        up *= factor
        d_gate = up * value * share * (1.0 + gate * (1.0 - share))
        d_gate = tl.where(raw_gate > limit, 0.0, d_gate)
        d_up = tl.where((raw_up > limit) | (raw_up < -limit), 0.0, up * silu)
        kind = d_gate_up.dtype.element_ty
        tl.store(d_gate_up + row * 2 * F + f, d_gate.to(kind), mask=f < F)
        tl.store(d_gate_up + row * 2 * F + F + f, d_up.to(kind), mask=f < F)
    if SCALED:
        tl.store(d_scale + row, tl.sum(along, 0))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, scale: Tensor | None, limit: float) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        block = min(2048, triton.next_power_of_2(width))
        if rows:
            _swiglu_forward[(rows, triton.cdiv(width, block))](
                gate_up, scale, out, limit, width, scale is not None, block
            )
        ctx.save_for_backward(gate_up, scale)
        ctx.limit = limit
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up, scale = ctx.saved_tensors
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        d_gate_up = torch.empty_like(gate_up)
        d_scale = None if scale is None else torch.empty_like(scale)
        block = min(1024, triton.next_power_of_2(width))
        if rows:
            _swiglu_backward[(rows,)](
                gate_up, scale, grads[0].contiguous(), d_gate_up, d_scale, ctx.limit, width,
                scale is not None, block,
            )  # fmt: skip
        return d_gate_up, d_scale, None


def swiglu(gate_up: Tensor, limit: float, scale: Tensor | None = None) -> Tensor:
    """``scale * silu(min(gate, limit)) * clamp(up, -limit, limit)``: ``[R, 2 F] -> [R, F]``.

    Args:
        gate_up: Gate columns, then up columns.
        limit: Of the clamps.
        scale: fp32 ``[R]``: a factor per row, with gradient.
    """
    return _SwiGLU.apply(gate_up, scale, limit)  # pyright: ignore[reportReturnType]


@triton.jit
def _sum_rows(y, place, out, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr):
    """``out[n] = sum_k y[place[n, k]]`` in fp32."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros([BH], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place + token * K + k)
        total += tl.load(y + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + h, total.to(out.dtype.element_ty), mask=h < H)


def sum_rows(y: Tensor, place: Tensor) -> Tensor:
    """Add up the rows of each token.

    Args:
        y: ``[R, H]``.
        place: int64 ``[N, k]``, the rows of each token.

    Returns:
        ``[N, H]``, summed in fp32.
    """
    y, hidden = y.contiguous(), y.shape[1]
    out = y.new_empty(place.shape[0], hidden)
    block = min(2048, triton.next_power_of_2(hidden))
    if place.shape[0]:
        _sum_rows[(place.shape[0], triton.cdiv(hidden, block))](
            y, place, out, hidden, place.shape[1], block
        )
    return out


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return sum_rows(grads[0], place), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return sum_rows(y, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return grads[0].index_select(0, token), None, None


def to_experts(x: Tensor, token: Tensor, place: Tensor) -> Tensor:
    """Rows sorted by expert, ``x[token]``: ``[N, H] -> [R, H]``; ``place`` is the way back."""
    return _ToExperts.apply(x, token, place)  # pyright: ignore[reportReturnType]


def from_experts(y: Tensor, token: Tensor, place: Tensor) -> Tensor:
    """Sum of each token's rows: ``[R, H] -> [N, H]``."""
    return _FromExperts.apply(y, token, place)  # pyright: ignore[reportReturnType]
