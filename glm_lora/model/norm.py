"""Normalisations of glm5_next, computed in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm_lora.model.fast import takes
from glm_lora.model.parallel import ParallelContext


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last axis, replicated over ranks."""

    def __init__(self, size: int, eps: float, ctx: ParallelContext, dtype: torch.dtype) -> None:
        super().__init__()
        empty = torch.empty(size, dtype=dtype, device=ctx.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [..., size]``; same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x`` over the last axis times ``sigmoid(gate)``, all in fp32; dtype of ``x``."""
    if takes("fused", x) and x.shape[-1].bit_count() == 1:
        from glm_lora.model.kernels.kda import gated_norm

        return gated_norm(x, gate, weight, eps)
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * torch.sigmoid(gate.float())).to(x.dtype)


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        inverse = x.square().sum(-1, keepdim=True).add_(eps).rsqrt_()
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        y, inverse = ctx.saved_tensors
        along = (grads[0] * y).sum(-1, keepdim=True)
        return torch.addcmul(grads[0], y, along, value=-1).mul_(inverse), None


def unit_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis."""
    return _UnitNorm.apply(x, eps)  # pyright: ignore[reportReturnType]
