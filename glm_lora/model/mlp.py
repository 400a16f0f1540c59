"""The gated MLP: dense layers and shared experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from glm_lora.arch.projections import Kind
from glm_lora.arch.spec import ModelSpec
from glm_lora.model.batch import ModelBatch
from glm_lora.model.collectives import enter_tp, leave_tp
from glm_lora.model.fast import takes
from glm_lora.model.linear import ProjectionGroup
from glm_lora.model.parallel import ParallelContext


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,), limit, dy = ctx.saved_tensors, ctx.limit, grads[0]
        gate, up = gate_up.chunk(2, dim=-1)
        low, mid = gate.clamp(max=limit), up.clamp(-limit, limit)
        # One fused pass; written out it takes four.
        d_gate = torch.ops.aten.silu_backward(dy * mid, low).mul_(low == gate)
        d_up = nn.functional.silu(low).mul_(dy).mul_(mid == up)
        return torch.cat([d_gate, d_up], dim=-1), None


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``: ``[..., 2 F] -> [..., F]``."""
    if takes("fused", gate_up):
        from glm_lora.model.kernels.moe import swiglu

        return swiglu(gate_up, limit)
    return _ClampedSwiGLU.apply(gate_up, limit)  # pyright: ignore[reportReturnType]


class GatedMLP(nn.Module):
    """``down(swiglu(gate(x), up(x)))``, the width cut over tensor-parallel ranks.

    Args:
        spec: Model dimensions.
        prefix: Disk prefix, ``...layers.N.mlp.`` or ``...layers.N.mlp.shared_experts.``.
        width: Full intermediate width.
        ctx: Topology of this rank.
        dtype: Of weights and activations.
    """

    def __init__(
        self, spec: ModelSpec, prefix: str, width: int, ctx: ParallelContext, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.ctx, self.limit = ctx, spec.swiglu_limit
        hidden = spec.hidden_size
        names = [f"{prefix}gate_proj", f"{prefix}up_proj"]
        self.gate_up = ProjectionGroup(names, [(width, hidden)] * 2, Kind.COLUMN, ctx, dtype)
        self.down = ProjectionGroup([f"{prefix}down_proj"], [(hidden, width)], Kind.ROW, ctx, dtype)

    def forward(self, x: Tensor, batch: ModelBatch) -> Tensor:
        """``[local tokens, H] -> [local tokens, H]``."""
        full = enter_tp(x, self.ctx, batch.num_tokens)
        return leave_tp(self.down(clamped_swiglu(self.gate_up(full), self.limit)), self.ctx)
