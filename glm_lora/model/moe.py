"""Mixture of experts: sigmoid router, expert-parallel dispatch, shared expert beside it.

Routing is per token, so under sequence parallelism each rank routes its own tokens; without it
tensor-parallel ranks would send the same tokens twice, hence the check in ``build_stage``.
Shapes: n local tokens, k experts per token, E experts in all, e of them here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from glm_lora.arch.spec import ModelSpec
from glm_lora.model.batch import ModelBatch
from glm_lora.model.collectives import all_to_all, local_tokens
from glm_lora.model.experts import grouped_linear
from glm_lora.model.fast import takes
from glm_lora.model.mlp import GatedMLP, clamped_swiglu
from glm_lora.model.parallel import ParallelContext


class Router(nn.Module):
    """Sigmoid scores in fp32; the correction bias decides the choice, never the weight."""

    def __init__(self, spec: ModelSpec, ctx: ParallelContext) -> None:
        super().__init__()
        self.top_k, self.groups, self.groups_kept = (
            spec.num_experts_per_tok,
            spec.n_group,
            spec.topk_group,
        )
        self.normalise, self.factor = spec.norm_topk_prob, spec.routed_scaling_factor
        experts = spec.n_routed_experts
        fp32 = {"dtype": torch.float32, "device": ctx.device}
        self.weight = nn.Parameter(
            torch.empty(experts, spec.hidden_size, **fp32), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(experts, **fp32), requires_grad=False)

    def forward(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights fp32 ``[n, k]`` and experts int64 ``[n, k]`` of each token.

        Args:
            x: ``[n, H]``.
            given: Experts to use instead of the own choice where they are not negative.
        """
        scores = torch.sigmoid(F.linear(x.float(), self.weight))
        with torch.no_grad():
            chosen = self._choose(scores)
            if given is not None:
                chosen = torch.where(given >= 0, given, chosen)
        weights = scores.gather(1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, chosen

    def _choose(self, scores: Tensor) -> Tensor:
        choice = scores + self.bias
        if self.groups > 1:
            grouped = choice.unflatten(-1, (self.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.groups_kept, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return choice.topk(self.top_k, dim=-1, sorted=False).indices


class MoE(nn.Module):
    """Routed experts plus shared expert: ``[local tokens, H] -> [local tokens, H]``.

    Args:
        spec: Model dimensions.
        prefix: Disk prefix, ``...layers.N.mlp.``.
        index: Which MoE layer of the whole model this is (selects replayed experts).
        ctx: Topology of this rank.
        dtype: Of weights and activations; the router stays fp32.
    """

    def __init__(
        self, spec: ModelSpec, prefix: str, index: int, ctx: ParallelContext, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.ctx, self.index, self.limit = ctx, index, spec.swiglu_limit
        self.experts, self.top_k = spec.n_routed_experts, spec.num_experts_per_tok
        self.router = Router(spec, ctx)
        shared = spec.moe_intermediate_size * spec.n_shared_experts
        self.shared = GatedMLP(spec, f"{prefix}shared_experts.", shared, ctx, dtype)
        local, inner = spec.n_routed_experts // ctx.ep_size, spec.moe_intermediate_size
        where = {"dtype": dtype, "device": ctx.device}
        self.gate_up = nn.Parameter(
            torch.empty(local, 2 * inner, spec.hidden_size, **where), requires_grad=False
        )
        self.down = nn.Parameter(
            torch.empty(local, spec.hidden_size, inner, **where), requires_grad=False
        )

    def named_base(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters other than the shared expert's, by disk path below the block."""
        inner = self.gate_up.shape[1] // 2
        yield "experts.gate_proj.weight", self.gate_up[:, :inner]
        yield "experts.up_proj.weight", self.gate_up[:, inner:]
        yield "experts.down_proj.weight", self.down
        yield "gate.weight", self.router.weight
        yield "gate.e_score_correction_bias", self.router.bias

    def forward(self, x: Tensor, batch: ModelBatch) -> Tensor:
        """Route, compute and combine; padding goes to no routed expert."""
        given = None
        if batch.routed_experts is not None:
            given = local_tokens(batch.routed_experts[:, :, self.index].flatten(0, 1), self.ctx)
        weights, chosen = self.router(x, given)
        if self.ctx.ep_group is None and takes("grouped_mm", x) and takes("fused", x):
            # Padding is computed too: leaving it out would have to wait for its number.
            return self._on_device(x, weights, chosen) + self.shared(x, batch)
        if batch.padded or (self.ctx.sequence_parallel and batch.num_tokens % self.ctx.tp_size):
            real = local_tokens(batch.mask_B_L.flatten(), self.ctx)
            chosen = chosen.masked_fill(~real.unsqueeze(-1), self.experts)
        return self._routed(x, weights, chosen) + self.shared(x, batch)

    def _on_device(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """``_routed`` for one rank's experts without asking the device for any number."""
        from glm_lora.model.kernels.moe import from_experts, swiglu, to_experts

        expert, order = chosen.flatten().to(torch.int16).sort(stable=True)
        experts = torch.arange(self.experts, dtype=torch.int16, device=x.device)
        ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=x.device)
        place = place.view(chosen.shape)
        token = order // self.top_k
        gate_up = grouped_linear(to_experts(x, token, place), self.gate_up, ends)
        # The weight of a row commutes with the last product and is cheaper before it.
        inner = swiglu(gate_up, self.limit, weights.flatten().gather(0, order))
        return from_experts(grouped_linear(inner, self.down, ends), token, place)

    def _routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """``sum_k weight_k expert_k(x)``; ``chosen == E`` means none."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts + 1)[: self.experts]
        if self.ctx.ep_group is None:
            sizes = counts.tolist()
            order = order[: sum(sizes)]
            token = order // self.top_k
            y = self._compute(x[token], sizes)
        else:
            y, order, token = self._dispatched(x, order, counts)
        y = y * weights.flatten()[order].unsqueeze(-1).to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y)

    def _dispatched(
        self, x: Tensor, order: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send rows to the ranks of their experts and bring the results back, in ``order``."""
        group, ranks = self.ctx.ep_group, self.ctx.ep_size
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        per_peer = theirs.view(ranks, -1)  # rows from each peer for each local expert
        sent = counts.view(ranks, -1).sum(1).tolist()
        sizes = per_peer.tolist()
        received = [sum(row) for row in sizes]
        order = order[: sum(sent)]
        token = order // self.top_k
        rows = all_to_all(x[token], group, received, sent)
        # Peer-major to expert-major, stable, so that each expert's rows are contiguous.
        local = per_peer.shape[1]
        expert = torch.arange(local, device=x.device).repeat(ranks)
        by_expert = expert.repeat_interleave(per_peer.flatten()).argsort(stable=True)
        back = torch.empty_like(by_expert).scatter_(
            0, by_expert, torch.arange(by_expert.numel(), device=x.device)
        )
        y = self._compute(rows[by_expert], [sum(column) for column in zip(*sizes, strict=True)])
        return all_to_all(y[back], group, sent, received), order, token

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        groups: list[int] | Tensor = counts
        if rows.shape[0] and takes("grouped_mm", rows):
            ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            groups = ends.to(rows.device, non_blocking=True)
        inner = clamped_swiglu(grouped_linear(rows, self.gate_up, groups), self.limit)
        return grouped_linear(inner, self.down, groups)
