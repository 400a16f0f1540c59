"""KDA: linear attention with a delta rule (Kimi Linear), sharded by heads.

The two low-rank down projections (``f_a_proj``, ``g_a_proj``) are replicated and see only this
rank's tokens; everything behind them sees all tokens and this rank's heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm_lora.arch.projections import Kind
from glm_lora.arch.spec import ModelSpec
from glm_lora.model.batch import ModelBatch, by_sequence
from glm_lora.model.collectives import enter_tp, leave_tp
from glm_lora.model.delta_rule import causal_conv, delta_rule, fused_delta_rule
from glm_lora.model.fast import takes
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
        low = enter_tp(self.low(x), self.ctx, batch.num_tokens)
        mixed = self.qkvb(enter_tp(x, self.ctx, batch.num_tokens))
        decay = self.f_b(low[:, : self.head_dim])
        gate = self.g_b(low[:, self.head_dim :])
        heads = (batch.num_tokens, self.heads, self.head_dim)
        q, k, v, beta = self._convolved(mixed, batch)
        q, k, v, decay = (t.view(heads) for t in (q, k, v, decay))
        if self._has_kernel(q):
            gates = (self.log_rate, self.time_bias, self.lower_bound)
            o = fused_delta_rule(q, k, v, decay, beta, *gates, batch)
        else:
            rule = functools.partial(delta_rule, lower_bound=self.lower_bound)
            log_decay = self._log_decay(decay.flatten(1)).view(heads)
            o = by_sequence(batch, rule, q, k, v, log_decay, torch.sigmoid(beta))
        o = gated_rms_norm(o, gate.view(heads), self.out_norm, self.eps)
        return leave_tp(self.out(o.reshape(batch.num_tokens, self.width)), self.ctx)

    def _has_kernel(self, q: Tensor) -> bool:
        d, bound = self.head_dim, self.lower_bound
        return takes("delta_rule", q) and -5 <= bound < 0 and d.bit_count() == 1 and d <= 256

    def _convolved(self, mixed: Tensor, batch: ModelBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v ``[N, width]`` and beta before its sigmoid ``[N, heads]``."""
        if takes("fused", mixed) and self.conv.shape[1] == 4:
            from glm_lora.model.kernels.kda import conv_silu

            return conv_silu(mixed, self.conv, batch.place)

        def conv(x_BLC: Tensor) -> Tensor:
            return F.silu(causal_conv(x_BLC, self.conv)).to(x_BLC.dtype)

        qkv = by_sequence(batch, conv, mixed[:, : 3 * self.width])
        q, k, v = qkv.chunk(3, dim=-1)
        return q, k, v, mixed[:, 3 * self.width :]

    def _log_decay(self, f: Tensor) -> Tensor:
        """``lower_bound * sigmoid(exp(A_log) (f + dt_bias))`` in fp32, ``[N, width]``."""
        rate = self.log_rate.exp().repeat_interleave(self.head_dim)
        return self.lower_bound * torch.sigmoid((f.float() + self.time_bias) * rate)
