"""One decoder layer: attention and MLP, each inside a hyper-connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glm_lora.arch.projections import LAYERS_PREFIX
from glm_lora.arch.spec import ModelSpec
from glm_lora.model.batch import ModelBatch
from glm_lora.model.dsa import SparseAttention
from glm_lora.model.fast import DsaBackend
from glm_lora.model.hyper import HyperConnection
from glm_lora.model.kda import LinearAttention
from glm_lora.model.kept import first_pass_and_repeat
from glm_lora.model.linear import ProjectionGroup
from glm_lora.model.mlp import GatedMLP
from glm_lora.model.moe import MoE
from glm_lora.model.norm import RMSNorm
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.rerun import Part, run_again

Recompute = Literal["full", "mlp", "attention", "none"]


class Half(nn.Module):
    """Hyper-connection, norm and one block: streams ``[n, m, H]`` to streams."""

    def __init__(self, hyper: HyperConnection, norm: RMSNorm, block: nn.Module) -> None:
        super().__init__()
        self.hyper, self.norm, self.block = hyper, norm, block
        self.groups = tuple(m for m in block.modules() if isinstance(m, ProjectionGroup))

    def forward(self, streams: Tensor, batch: ModelBatch) -> Tensor:
        """Read, run the block, write back."""
        x, *mixing = self.hyper.read(streams)
        return self.hyper.write(self.block(self.norm(x), batch), *mixing)


class DecoderLayer(nn.Module):
    """Layer ``index`` of the model (global index).

    Args:
        spec: Model dimensions.
        index: Which layer.
        ctx: Topology of this rank.
        dtype: Of weights and activations.
        recompute: Which halves are run again in the backward pass instead of kept.
        dsa_backend: What computes DSA above ``index_topk`` tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        ctx: ParallelContext,
        dtype: torch.dtype,
        recompute: Recompute,
        dsa_backend: DsaBackend,
    ) -> None:
        super().__init__()
        self.index, self.recompute = index, recompute
        self.prefix = f"{LAYERS_PREFIX}{index}."

        def half(block: nn.Module) -> Half:
            norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, ctx, dtype)
            return Half(HyperConnection(spec, ctx, dtype), norm, block)

        prefix = f"{self.prefix}self_attn."
        if spec.is_kda(index):
            self.attention = half(LinearAttention(spec, prefix, ctx, dtype))
        else:
            self.attention = half(SparseAttention(spec, prefix, ctx, dtype, dsa_backend))
        prefix = f"{self.prefix}mlp."
        if spec.is_moe(index):
            before = sum(spec.is_moe(i) for i in range(index))
            mlp: nn.Module = MoE(spec, prefix, before, ctx, dtype)
        else:
            mlp = GatedMLP(spec, prefix, spec.intermediate_size, ctx, dtype)
        self.mlp = half(mlp)

    def forward(self, streams: Tensor, batch: ModelBatch, backward_next: bool = False) -> Tensor:
        """Streams ``[local tokens, m, H]`` in and out.

        Args:
            streams: Of the layer before.
            batch: The micro-batch.
            backward_next: The backward pass begins with this layer. What it needs would be made
                again at once, when as much memory is in use: nothing is run again.
        """
        recompute = "none" if backward_next or not torch.is_grad_enabled() else self.recompute
        if recompute == "full":
            groups = (*self.attention.groups, *self.mlp.groups)
            return self._again(self._both, streams, batch, groups)
        for name, half in (("attention", self.attention), ("mlp", self.mlp)):
            if recompute == name:
                streams = self._again(half, streams, batch, half.groups)
            else:
                streams = half(streams, batch)
        return streams

    def _both(self, streams: Tensor, batch: ModelBatch) -> Tensor:
        return self.mlp(self.attention(streams, batch), batch)

    def _again(
        self, part: Part, streams: Tensor, batch: ModelBatch, groups: Sequence[ProjectionGroup]
    ) -> Tensor:
        attention = self.attention.block
        keeps = isinstance(attention, SparseAttention) and attention.keeps_result(batch)
        if part is self.mlp or not keeps:
            return run_again(part, streams, batch, groups)
        # Only with a graph does torch make all of an attention's result.
        out = checkpoint(  # pyright: ignore
            part, streams, batch, use_reentrant=False, context_fn=first_pass_and_repeat
        )
        assert isinstance(out, Tensor)
        return out

    def named_base(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters other than projections, by canonical key."""
        for half, block, norm, hyper in (
            (self.attention, "self_attn", "input_layernorm", "attn"),
            (self.mlp, "mlp", "post_attention_layernorm", "ffn"),
        ):
            yield f"{self.prefix}{norm}.weight", half.norm.weight
            for part, tensor in half.hyper.named_base():
                yield f"{self.prefix}hc_{hyper}_{part}", tensor
            if isinstance(half.block, LinearAttention | SparseAttention | MoE):
                for path, tensor in half.block.named_base():
                    yield f"{self.prefix}{block}.{path}", tensor
