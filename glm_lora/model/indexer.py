"""The k-pool indexer of the sparse attention: which tokens each query may see. No gradient.

Sequences are right-padded, so a pool is complete and visible exactly when its last position is not
behind the query, and no mask is needed. Shapes: B sequences, L positions, P complete pools.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm_lora.arch.spec import ModelSpec
from glm_lora.model.batch import ModelBatch
from glm_lora.model.collectives import all_gather
from glm_lora.model.fast import takes
from glm_lora.model.kept import kept
from glm_lora.model.parallel import ParallelContext

ROWS_PER_BLOCK = 1024
"""Queries at a time: bounds the per-head scores and the masks."""


class Indexer(nn.Module):
    """Scores pools of ``index_kpool`` tokens and keeps the best ``index_topk`` tokens' worth.

    All its weights are replicated; under sequence parallelism the projections of the hidden states
    are computed on local tokens and gathered.
    """

    def __init__(self, spec: ModelSpec, ctx: ParallelContext, dtype: torch.dtype) -> None:
        super().__init__()
        self.ctx = ctx
        self.heads, self.head_dim = spec.index_n_heads, spec.index_head_dim
        self.pool, self.pools_kept = spec.index_kpool, spec.index_topk // spec.index_kpool

        def frozen(*shape: int) -> nn.Parameter:
            empty = torch.empty(*shape, dtype=dtype, device=ctx.device)
            return nn.Parameter(empty, requires_grad=False)

        d, hidden = self.head_dim, spec.hidden_size
        self.query = frozen(self.heads * d, spec.q_lora_rank)
        self.key = frozen(d, hidden)
        self.head_weights = frozen(self.heads, hidden)
        self.norm_weight, self.norm_bias = frozen(d), frozen(d)
        self.pool_bias = frozen(self.pool, d)
        self.pool_gate = frozen(d, hidden)

    def named_base(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters by disk path below the indexer."""
        yield "wq_b.weight", self.query
        yield "wk.weight", self.key
        yield "weights_proj.weight", self.head_weights
        yield "k_norm.weight", self.norm_weight
        yield "k_norm.bias", self.norm_bias
        yield "index_kpool_compress_ape", self.pool_bias
        yield "index_kpool_compress_gate", self.pool_gate

    @torch.no_grad()
    def project(self, x: Tensor, q_resid: Tensor, batch: ModelBatch) -> tuple[Tensor, Tensor]:
        """What the selection needs of each token.

        Args:
            x: Hidden states of the local tokens, ``[local tokens, H]``.
            q_resid: Normalised query latent of all tokens, ``[N, q_lora_rank]``.
            batch: Gives the number of tokens N.

        Returns:
            Queries ``[N, h d]``; key, pool gate and head weights in one, ``[N, 2 d + h]``.
        """
        d = self.head_dim
        key = F.layer_norm(F.linear(x, self.key), (d,), self.norm_weight, self.norm_bias, eps=1e-6)
        parts = torch.cat([key, F.linear(x, self.pool_gate), F.linear(x, self.head_weights)], -1)
        if self.ctx.sequence_parallel and self.ctx.tp_group is not None:
            parts = all_gather(parts, self.ctx.tp_group)[: batch.num_tokens]
        return F.linear(q_resid, self.query), parts

    def visible(self, query: Tensor, parts: Tensor, first: int) -> Iterator[Tensor]:
        """Which keys the queries from position ``first`` on may see, a block of queries at a time.

        Args:
            query: As for ``chosen``.
            parts: As for ``chosen``.
            first: As for ``chosen``.

        Yields:
            For each block of ``chosen`` bool ``[B, queries, keys]`` over the keys up to the last
            of them.
        """
        for best in self.chosen(query, parts, first):
            yield self._mask(best, slice(first, first + best.shape[1]))
            first += best.shape[1]

    @torch.no_grad()
    def chosen(self, query: Tensor, parts: Tensor, first: int) -> Iterator[Tensor]:
        """The best pools of the queries from position ``first`` on, a block of queries at a time.

        Args:
            query: ``[B, L, h d]`` of whole sequences.
            parts: ``[B, L, 2 d + h]``.
            first: First query asked for.

        Yields:
            For each ``ROWS_PER_BLOCK`` queries (or what is left) int32 ``[B, queries, best]``, in
            no order; -1 where fewer pools are complete at the query.
        """
        length, d = query.shape[1], self.head_dim
        key, gate, weights = parts.split([d, d, self.heads], dim=-1)
        pool_keys = self._pool(key, gate)
        query = query.unflatten(-1, (self.heads, d))
        weights = weights.float() * self.heads**-0.5
        for start in range(first, length, ROWS_PER_BLOCK):
            rows = slice(start, min(start + ROWS_PER_BLOCK, length))
            yield self._choose(query[:, rows], weights[:, rows], pool_keys, rows)

    def _pool(self, key: Tensor, gate: Tensor) -> Tensor:
        """Learned average of the keys of each complete pool, ``[B, P, d]``."""
        rows, length, d = key.shape
        whole = length // self.pool * self.pool
        shape = (rows, -1, self.pool, d)
        logits = gate[:, :whole].reshape(shape).float() + self.pool_bias.float()
        share = logits.softmax(dim=2).to(key.dtype)
        return (share * key[:, :whole].reshape(shape)).sum(dim=2)

    def _choose(self, query: Tensor, weights: Tensor, pool_keys: Tensor, block: slice) -> Tensor:
        """Best pools of one block of queries, int32 ``[B, rows, best]``."""
        pools = block.stop // self.pool
        position = torch.arange(block.start, block.stop, device=query.device)[:, None]

        def choose() -> Tensor:
            score = self._scores(query, weights, pool_keys[:, :pools], block.start)
            last = torch.arange(pools, device=query.device) * self.pool + self.pool - 1
            score = score.masked_fill(last > position, torch.finfo(score.dtype).min)
            best = score.topk(min(self.pools_kept, pools), dim=-1, sorted=False).indices
            complete = best * self.pool + self.pool - 1 <= position
            return best.masked_fill(~complete, -1).int()

        return kept(choose)

    def _mask(self, best: Tensor, block: slice) -> Tensor:
        """Visibility rows of one block of queries, bool ``[B, rows, block.stop]``."""
        device, length = best.device, block.stop
        pools = length // self.pool
        # One more column than pools takes the places that hold none.
        chosen = best.new_zeros(*best.shape[:2], pools + 1, dtype=torch.bool)
        chosen = chosen.scatter_(-1, best.long() % (pools + 1), True)[..., :pools]
        seen = F.pad(chosen.repeat_interleave(self.pool, dim=-1), (0, length - pools * self.pool))
        # The query's own incomplete pool is always visible.
        position = torch.arange(block.start, length, device=device)[:, None]
        token = torch.arange(length, device=device)
        tail_start = (position + 1) // self.pool * self.pool
        return seen | ((token >= tail_start) & (token <= position))

    def _scores(self, query: Tensor, weights: Tensor, pool_keys: Tensor, first: int) -> Tensor:
        """``sum_h w_h relu(q_h . key / sqrt(d))``, fp32 ``[B, rows, P]``."""
        if takes("fused", query) and self.head_dim.bit_count() == 1 and self.head_dim >= 16:
            from glm_lora.model.kernels.indexer import scores

            each = zip(
                query.contiguous(), weights.contiguous(), pool_keys.contiguous(), strict=True
            )
            return torch.stack([scores(q, w, keys, first, self.pool) for q, w, keys in each])
        score = torch.matmul(query.float(), pool_keys.float().transpose(-1, -2).unsqueeze(1))
        score = F.relu(score * self.head_dim**-0.5)
        return torch.matmul(weights.unsqueeze(-2), score).squeeze(-2)
