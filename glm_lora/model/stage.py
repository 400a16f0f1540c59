"""One pipeline stage of glm5_next: embedding, layers, final norm and head, as far as it has them.

Base weights are frozen and addressed by the canonical keys of ``glm_lora.arch.projections``;
adapters are attached to its ``LinearSite`` objects from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm_lora.arch.projections import EMBED_KEY, HEAD_KEY, NORM_KEY
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import CheckpointError, ModelError
from glm_lora.model.batch import ModelBatch
from glm_lora.model.collectives import enter_tp, leave_tp
from glm_lora.model.fast import DsaBackend
from glm_lora.model.head import token_logprobs
from glm_lora.model.layer import DecoderLayer, Recompute
from glm_lora.model.linear import LinearSite, ProjectionGroup
from glm_lora.model.norm import RMSNorm
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.plan import check_fit, layer_ranges


class Stage(nn.Module):
    """The layers of one pipeline rank; the first also embeds, the last also scores.

    Built by ``build_stage``. Weights are uninitialised until ``load_base`` has filled every key of
    ``base_parameters``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ctx: ParallelContext,
        dtype: torch.dtype,
        recompute: Recompute,
        dsa_backend: DsaBackend,
        layers: range,
    ) -> None:
        super().__init__()
        self.spec, self.ctx, self.dtype = spec, ctx, dtype
        self.is_first = layers.start == 0
        self.is_last = layers.stop == spec.num_hidden_layers
        local = (spec.vocab_size // ctx.tp_size, spec.hidden_size)
        self.first_token = ctx.tp_rank * local[0]
        if self.is_first:
            self.embedding = nn.Parameter(
                torch.empty(local, dtype=dtype, device=ctx.device), requires_grad=False
            )
        self.layers = nn.ModuleList(
            DecoderLayer(spec, i, ctx, dtype, recompute, dsa_backend) for i in layers
        )
        if self.is_last:
            self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, ctx, dtype)
            self.head = nn.Parameter(
                torch.empty(local, dtype=dtype, device=ctx.device), requires_grad=False
            )

    def forward(self, batch: ModelBatch, streams: Tensor | None = None) -> Tensor:
        """Run this stage.

        Args:
            batch: The micro-batch, whole on every rank.
            streams: ``[local tokens, m, H]`` from the stage before; None on the first.

        Returns:
            Streams for the next stage, or on the last stage the normalised hidden states
            ``[local tokens, H]`` for ``token_logprobs`` and ``logits``.
        """
        if streams is None:
            streams = self._embed(batch)
        for layer in self.layers:
            backward_next = self.is_last and layer is self.layers[-1]
            streams = cast(Tensor, layer(streams, batch, backward_next))
        if not self.is_last:
            return streams
        return self.norm(streams.mean(1))

    def _embed(self, batch: ModelBatch) -> Tensor:
        """Embeddings repeated over the streams, ``[local tokens, m, H]``."""
        ids = batch.tokens_B_L.flatten()
        if self.ctx.tp_group is None:
            x = F.embedding(ids, self.embedding)
        else:
            place = ids - self.first_token
            mine = (place >= 0) & (place < self.embedding.shape[0])
            rows = F.embedding(place.clamp(0, self.embedding.shape[0] - 1), self.embedding)
            x = leave_tp(rows * mine.unsqueeze(-1), self.ctx)
        return x.unsqueeze(1).expand(-1, self.spec.hc_mult, -1).contiguous()

    def logits(self, hidden: Tensor, batch: ModelBatch) -> Tensor:
        """This rank's part of the logits, ``[B, L, V / T]`` in the compute dtype."""
        full = enter_tp(hidden, self.ctx, batch.num_tokens)
        return F.linear(full, self.head).view(*batch.shape, -1)

    def token_logprobs(
        self,
        hidden: Tensor,
        batch: ModelBatch,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each next token given those before it.

        Args:
            hidden: What ``forward`` returned on the last stage.
            batch: The same micro-batch.
            temperature: Divides the logits.
            with_entropy: Also return the entropy of each next-token distribution, in nats.
            entropy_gradient: The entropy has a gradient.

        Returns:
            fp32 ``[B, L - 1]`` (column t is token t + 1) and the entropies or None; zero where the
            next token is padding or not wanted. One row per sequence for a packed batch too. Every
            tensor-parallel rank gets the same.
        """
        full = enter_tp(hidden, self.ctx, batch.num_tokens)
        rows, length = batch.shape
        if batch.next_rows is None:
            chosen = full.view(rows, length, -1)[:, :-1].flatten(0, 1)
            targets = batch.tokens_B_L[:, 1:].flatten()
        else:
            chosen = full[batch.next_rows]
            targets = batch.tokens_B_L.flatten()[batch.next_rows + 1]
        logprob, entropy = token_logprobs(
            chosen,
            self.head,
            targets,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            group=self.ctx.tp_group,
            first=self.first_token,
        )
        return self._placed(logprob, batch), (
            None if entropy is None else self._placed(entropy, batch)
        )

    @staticmethod
    def _placed(values: Tensor, batch: ModelBatch) -> Tensor:
        rows, length = batch.score_shape
        if batch.next_rows is None:
            return values.view(rows, length - 1)
        places = batch.next_rows if batch.packing is None else batch.packing.score_places
        out = values.new_zeros(rows * length).index_copy(0, places, values)
        return out.view(rows, length)[:, :-1]

    def streams_shape(self, batch: ModelBatch) -> tuple[int, int, int]:
        """Shape of the tensor that crosses to the next stage for ``batch``."""
        parts = self.ctx.tp_size if self.ctx.sequence_parallel else 1
        return -(-batch.num_tokens // parts), self.spec.hc_mult, self.spec.hidden_size

    def linear_sites(self) -> dict[str, LinearSite]:
        """Every projection of this stage (kv_b_proj included) by disk name."""
        return {site.disk_name: site for group in self._groups() for site in group.sites}

    def drop_fused(self) -> None:
        """Free the adapters' copies in the compute dtype; the next pass makes them again."""
        for group in self._groups():
            group.drop_fused()

    def _groups(self) -> Iterator[ProjectionGroup]:
        return (module for module in self.modules() if isinstance(module, ProjectionGroup))

    def base_parameters(self) -> dict[str, Tensor]:
        """This rank's shard of every base parameter, by canonical key.

        Views of the memory the model computes with: experts stacked per projection, the
        convolution as its q, k and v blocks, fused projections one by one.
        """
        table = dict(self._named_base())
        for name, site in self.linear_sites().items():
            table[f"{name}.weight"] = site.weight
        return table

    def _named_base(self) -> Iterator[tuple[str, Tensor]]:
        if self.is_first:
            yield EMBED_KEY, self.embedding
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield from layer.named_base()
        if self.is_last:
            yield NORM_KEY, self.norm.weight
            yield HEAD_KEY, self.head

    @torch.no_grad()
    def load_base(self, key: str, tensor: Tensor) -> None:
        """Fill one base parameter from this rank's shard.

        Raises:
            CheckpointError: The key is not of this stage, or the shard has another shape.
        """
        self.load_many({key: tensor})

    @torch.no_grad()
    def load_many(self, tensors: dict[str, Tensor]) -> None:
        """Fill several base parameters; as ``load_base``."""
        table = self.base_parameters()
        for key, tensor in tensors.items():
            if key not in table:
                raise CheckpointError(f"parameter {key!r} is not part of this pipeline stage")
            target = table[key]
            if target.shape != tensor.shape:
                raise CheckpointError(
                    f"parameter {key!r} has local shape {tuple(tensor.shape)}",
                    str(tuple(target.shape)),
                )
            target.copy_(tensor)

    def base_storages(self) -> list[torch.UntypedStorage]:
        """The distinct memory blocks behind the base: what offloading may free and refill."""
        frozen = (t for t in (*self.parameters(), *self.buffers()) if not t.requires_grad)
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in frozen}.values())


def build_stage(
    spec: ModelSpec,
    ctx: ParallelContext,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    dsa_backend: DsaBackend = "auto",
    layer_range: range | None = None,
) -> Stage:
    """Build this rank's stage with uninitialised weights.

    Args:
        spec: Model dimensions.
        ctx: Topology of this rank.
        dtype: Of weights and activations (parameters marked fp32 in the facts table stay so).
        recompute: What each layer runs again in the backward pass.
        dsa_backend: What computes DSA above ``index_topk`` tokens.
        layer_range: The layers to hold; default from ``ctx``.

    Raises:
        ConfigError: The topology does not fit the model.
        ModelError: The model has a feature that is not trained here.
    """
    if not spec.index_kpool_always_select_tail:
        raise ModelError("index_kpool_always_select_tail is false", "true, as in GLM-5.3-Flash")
    check_fit(spec, tp=ctx.tp_size, ep=ctx.ep_size, sequence_parallel=ctx.sequence_parallel)
    layers = (
        layer_range
        or layer_ranges(spec.num_hidden_layers, ctx.pp_size, ctx.pipeline_layers)[ctx.pp_rank]
    )
    return Stage(spec, ctx, dtype, recompute, dsa_backend, layers)
