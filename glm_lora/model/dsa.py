"""Sparse attention without positions (NoPE MLA with an indexer), sharded by heads.

The two down projections are replicated and see only this rank's tokens. The indexer decides which
tokens a query sees; up to ``index_topk`` tokens that is all earlier ones, and it is not run. The
queries after those read all keys through a mask, or the chosen alone, where a kernel for that can
run and is faster (``fast.sparse_from``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from glm_lora.arch.projections import Kind
from glm_lora.arch.spec import ModelSpec
from glm_lora.model.batch import ModelBatch, by_sequence
from glm_lora.model.collectives import enter_tp, leave_tp
from glm_lora.model.fast import DsaBackend, is_plain, sparse_from
from glm_lora.model.indexer import ROWS_PER_BLOCK, Indexer
from glm_lora.model.kept import keeping
from glm_lora.model.linear import ProjectionGroup
from glm_lora.model.norm import RMSNorm
from glm_lora.model.parallel import ParallelContext

_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, steady: bool = True
) -> Tensor:
    """Softmax attention.

    Args:
        q: ``[B, h, queries, d]``.
        k: ``[B, h, keys, d]``.
        v: ``[B, h, keys, v_dim]``.
        seen: bool ``[B, queries, keys]``; None is causal, with as many queries as keys.
        scale: Of the products.
        steady: The same sizes will come again. cuDNN, the fastest on Hopper, plans every new size.
    """
    if seen is None and not steady and q.device.type == "cuda":
        with sdpa_kernel(_ANY_LENGTH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if seen is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    with keeping():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1), scale=scale)


class SparseAttention(nn.Module):
    """One DSA block: ``[local tokens, H] -> [local tokens, H]``.

    Args:
        spec: Model dimensions.
        prefix: Disk prefix of the block, ``...layers.N.self_attn.``.
        ctx: Topology of this rank.
        dtype: Of weights and activations.
        backend: What computes sequences of more than ``index_topk`` tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        prefix: str,
        ctx: ParallelContext,
        dtype: torch.dtype,
        backend: DsaBackend = "auto",
    ) -> None:
        super().__init__()
        self.ctx, self.limit = ctx, spec.index_topk
        self.heads = spec.num_attention_heads // ctx.tp_size
        self.sparse_from = sparse_from(backend, ctx.device, dtype, spec.kv_lora_rank, self.heads)
        self.qk_dim, self.v_dim = spec.qk_head_dim, spec.v_head_dim
        self.latents = (spec.q_lora_rank, spec.kv_lora_rank)
        hidden, heads = spec.hidden_size, spec.num_attention_heads

        def group(leaves: str, shapes: list[tuple[int, int]], kind: Kind) -> ProjectionGroup:
            names = [prefix + leaf for leaf in leaves.split()]
            return ProjectionGroup(names, shapes, kind, ctx, dtype)

        self.low = group(
            "q_a_proj kv_a_proj_with_mqa",
            [(latent, hidden) for latent in self.latents],
            Kind.REPLICATED,
        )
        self.q_b = group("q_b_proj", [(heads * self.qk_dim, spec.q_lora_rank)], Kind.COLUMN)
        self.kv_b = group(
            "kv_b_proj", [(heads * (self.qk_dim + self.v_dim), spec.kv_lora_rank)], Kind.COLUMN
        )
        self.out = group("o_proj", [(hidden, heads * self.v_dim)], Kind.ROW)
        self.q_norm = RMSNorm(spec.q_lora_rank, spec.rms_norm_eps, ctx, dtype)
        self.kv_norm = RMSNorm(spec.kv_lora_rank, spec.rms_norm_eps, ctx, dtype)
        self.indexer = Indexer(spec, ctx, dtype)

    def named_base(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters other than projections, by disk path below the block."""
        yield "q_a_layernorm.weight", self.q_norm.weight
        yield "kv_a_layernorm.weight", self.kv_norm.weight
        for path, tensor in self.indexer.named_base():
            yield f"indexer.{path}", tensor

    def forward(self, x: Tensor, batch: ModelBatch) -> Tensor:
        """Attend within each sequence of ``batch``."""
        q_low, kv_low = self.low(x).split(self.latents, dim=-1)
        low = torch.cat([self.q_norm(q_low), self.kv_norm(kv_low)], dim=-1)
        q_low, kv_low = enter_tp(low, self.ctx, batch.num_tokens).split(self.latents, dim=-1)
        q = self.q_b(q_low).unflatten(-1, (self.heads, self.qk_dim))
        index: tuple[Tensor, ...] = ()
        if self.keeps_result(batch):
            index = self.indexer.project(x, q_low, batch)
        steady = len(batch.runs) == 1
        if index and self.sparse_from is not None and not is_plain():
            attend = functools.partial(self._from_latents, steady=steady)
            o = by_sequence(batch, attend, q, kv_low, *index)
        else:
            attend = functools.partial(self._attend, steady=steady)
            o = by_sequence(batch, attend, q, self._keys_and_values(kv_low), *index)
        return leave_tp(self.out(o.flatten(1)), self.ctx)

    def keeps_result(self, batch: ModelBatch) -> bool:
        """Whether a sequence is long enough for the indexer: recomputation spares what follows."""
        return any(length > self.limit for _, _, length in batch.runs)

    def _keys_and_values(self, latents: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., h, qk_dim + v_dim]``."""
        return self.kv_b(latents.flatten(0, -2)).view(*latents.shape[:-1], self.heads, -1)

    def _from_latents(self, q: Tensor, latents: Tensor, *index: Tensor, steady: bool) -> Tensor:
        """``_attend`` that makes keys and values only where all of them are read.

        Sequences of fewer than ``sparse_from`` tokens go through masks.

        Args:
            q: ``[B, L, h, qk_dim]``.
            latents: ``[B, L, D]``.
            index: What the indexer needs of each token.
            steady: As for ``attention``.
        """
        length, first = latents.shape[1], latents[:, : self.limit]
        if length <= self.limit:
            return self._attend(q, self._keys_and_values(first), steady=steady)
        assert self.sparse_from is not None
        if length < self.sparse_from:
            return self._attend(q, self._keys_and_values(latents), *index, steady=steady)
        from glm_lora.model.kernels.sparse import sparse_attention

        # The absorbed form reads the weight itself: it would pass over an adapter.
        assert all(site.adapter is None for site in self.kv_b.sites)
        weight = self.kv_b.weight.view(self.heads, self.qk_dim + self.v_dim, -1)
        early, late = q.split([self.limit, q.shape[1] - self.limit], dim=1)
        seen_by_all = self._attend(early, self._keys_and_values(first), steady=True)
        index_query, index_parts = index
        best = torch.cat(list(self.indexer.chosen(index_query, index_parts, self.limit)), dim=1)
        pool, scale = self.indexer.pool, self.qk_dim**-0.5
        rows = [
            sparse_attention(one_q, one, weight, chosen, pool, scale)
            for one_q, one, chosen in zip(late, latents, best, strict=True)
        ]
        return torch.cat([seen_by_all, torch.stack(rows)], dim=1)

    def _attend(self, q: Tensor, kv: Tensor, *index: Tensor, steady: bool) -> Tensor:
        """Whole sequences: q and kv ``[B, L, h, ...]`` to ``[B, L, h, v_dim]``."""
        length, scale = q.shape[1], self.qk_dim**-0.5
        if length <= self.limit:
            k, v = kv.transpose(1, 2).split([self.qk_dim, self.v_dim], dim=-1)
            return attention(q.transpose(1, 2), k, v, None, scale, steady).transpose(1, 2)
        attend = self._in_equal_blocks if q.device.type == "cuda" else self._masked
        return attend(q, kv, *index)

    def _in_equal_blocks(self, q: Tensor, kv: Tensor, *index: Tensor) -> Tensor:
        """``_masked`` on sizes that come again: cuDNN plans each new one for half a second.

        One sequence at a time, filled up with zeros, which no token before them sees.
        """
        length = q.shape[1]
        more = -(length - self.limit) % ROWS_PER_BLOCK
        rows = []
        for row in range(q.shape[0]):
            inputs = (x[row : row + 1] for x in (q, kv, *index))
            if more:
                inputs = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, more)) for x in inputs)
            q_row, kv_row, *index_row = inputs
            rows.append(self._masked(q_row, kv_row, *index_row)[:, :length])
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _masked(self, q: Tensor, kv: Tensor, *index: Tensor) -> Tensor:
        """``_attend`` for more than ``limit`` tokens, a block of queries at a time."""
        length, scale = q.shape[1], self.qk_dim**-0.5
        # The first ``limit`` queries see everything before them.
        starts = range(self.limit, length, ROWS_PER_BLOCK)
        stops = [*starts, length]
        queries = q.transpose(1, 2).split([b - a for a, b in pairwise([0, *stops])], dim=2)
        index_query, index_parts = index
        masks = chain([None], self.indexer.visible(index_query, index_parts, self.limit))
        keys: Any = _Prefixes.apply(kv, self.qk_dim, stops)
        outs = [
            attention(part, k, v, seen, scale)
            for part, k, v, seen in zip(queries, keys[0::2], keys[1::2], masks, strict=True)
        ]
        return torch.cat(outs, dim=2).transpose(1, 2)


class _Prefixes(torch.autograd.Function):
    """Keys and values up to several positions, their gradients added up in one buffer each."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, width: int, stops: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.stops = stops
        k, v = kv[..., :width].transpose(1, 2), kv[..., width:].transpose(1, 2)
        return tuple(x[:, :, :stop] for stop in stops for x in (k, v))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        totals = []
        for which in range(2):
            # The last prefix is everything.
            *earlier, total = (g.transpose(1, 2) for g in grads[which::2])
            total = total.contiguous()
            for stop, grad in zip(ctx.stops, earlier, strict=False):
                total[:, :stop].add_(grad)
            totals.append(total)
        return torch.cat(totals, dim=-1), None, None
