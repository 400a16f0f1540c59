"""KDA: linear attention with a delta rule (Kimi Linear), sharded by heads.

The two low-rank down projections (``f_a_proj``, ``g_a_proj``) are replicated and see only this
rank's tokens; everything behind them sees all tokens and this rank's heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm_lora.arch.projections import Kind
from glm_lora.arch.spec import ModelSpec
from glm_lora.model.batch import ModelBatch
from glm_lora.model.collectives import enter_tp, leave_tp
from glm_lora.model.delta_rule import causal_conv, delta_rule
from glm_lora.model.linear import ProjectionGroup
from glm_lora.model.norm import gated_rms_norm
from glm_lora.model.parallel import ParallelContext


class LinearAttention(nn.Module):
    """One KDA block: ``[local tokens, H] -> [local tokens, H]``.

    Args:
        spec: Model dimensions.
        prefix: Disk prefix of the block, ``...layers.N.self_attn.``.
        ctx: Topology of this rank.
        dtype: Of weights and activations; the convolution and the decay stay fp32.
    """

    def __init__(
        self, spec: ModelSpec, prefix: str, ctx: ParallelContext, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.ctx, self.eps = ctx, spec.rms_norm_eps
        self.lower_bound = spec.linear_lower_bound
        self.head_dim = spec.linear_head_dim
        self.heads = spec.linear_num_heads // ctx.tp_size
        self.width = self.heads * self.head_dim
        hidden, full, d = spec.hidden_size, spec.kda_width, spec.linear_head_dim

        def group(leaves: str, shapes: list[tuple[int, int]], kind: Kind) -> ProjectionGroup:
            names = [f"{prefix}{leaf}_proj" for leaf in leaves.split()]
            return ProjectionGroup(names, shapes, kind, ctx, dtype)

        self.qkvb = group(
            "q k v b", [(full, hidden)] * 3 + [(spec.linear_num_heads, hidden)], Kind.COLUMN
        )
        self.low = group("f_a g_a", [(d, hidden)] * 2, Kind.REPLICATED)
        self.f_b = group("f_b", [(full, d)], Kind.COLUMN)
        self.g_b = group("g_b", [(full, d)], Kind.COLUMN)
        self.out = group("o", [(hidden, full)], Kind.ROW)

        def frozen(*shape: int, of: torch.dtype = torch.float32) -> nn.Parameter:
            empty = torch.empty(*shape, dtype=of, device=ctx.device)
            return nn.Parameter(empty, requires_grad=False)

        self.conv = frozen(3 * self.width, spec.linear_conv_kernel_dim)
        self.log_rate = frozen(self.heads)
        self.time_bias = frozen(self.width)
        self.out_norm = frozen(self.head_dim, of=dtype)

    def named_base(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters other than projections, by disk path below the block."""
        for i, part in enumerate("qkv"):
            rows = self.conv[i * self.width : (i + 1) * self.width]
            yield f"{part}_conv1d.weight", rows.unsqueeze(1)
        yield "A_log", self.log_rate
        yield "dt_bias", self.time_bias
        yield "o_norm.weight", self.out_norm

    def forward(self, x: Tensor, batch: ModelBatch) -> Tensor:
        """Attend within each sequence of ``batch``."""
        rows, length = batch.shape
        heads = (rows, length, self.heads, self.head_dim)
        low = enter_tp(self.low(x), self.ctx, batch.num_tokens)
        mixed = self.qkvb(enter_tp(x, self.ctx, batch.num_tokens))
        qkv = mixed[:, : 3 * self.width].view(rows, length, 3 * self.width)
        qkv = F.silu(causal_conv(qkv, self.conv)).to(x.dtype)
        q, k, v = (part.view(heads) for part in qkv.chunk(3, dim=-1))
        beta = torch.sigmoid(mixed[:, 3 * self.width :]).view(heads[:3])
        log_decay = self._log_decay(self.f_b(low[:, : self.head_dim]))
        o = delta_rule(q, k, v, log_decay.view(heads), beta, lower_bound=self.lower_bound)
        gate = self.g_b(low[:, self.head_dim :]).view(heads)
        o = gated_rms_norm(o, gate, self.out_norm, self.eps)
        return leave_tp(self.out(o.reshape(batch.num_tokens, self.width)), self.ctx)

    def _log_decay(self, f: Tensor) -> Tensor:
        """``lower_bound * sigmoid(exp(A_log) (f + dt_bias))`` in fp32, ``[N, width]``."""
        rate = self.log_rate.exp().repeat_interleave(self.head_dim)
        return self.lower_bound * torch.sigmoid((f.float() + self.time_bias) * rate)
