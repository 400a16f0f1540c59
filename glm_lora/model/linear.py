"""Frozen projections with room for adapters.

``ProjectionGroup`` holds one or more projections of the same input as one fused weight, so that
they cost one matrix product; each is a ``LinearSite`` that can be loaded, read back and adapted on
its own. The group computes local products only: whoever calls it enters and leaves the
tensor-parallel region.

Shapes: N tokens, I local inputs, O local outputs of the whole group, R the sum of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm_lora.arch.projections import Kind
from glm_lora.model.parallel import ParallelContext


class SiteAdapter(Protocol):
    """What a projection needs to know of its adapter: ``y += scaling * B A dropout(x)``."""

    a: nn.Parameter
    """Local A ``[r, I]``, fp32."""
    b: nn.Parameter
    """Local B ``[o, r]``, fp32."""
    scaling: float

    @property
    def active(self) -> bool:
        """False while adapters are switched off."""
        ...

    @property
    def dropout(self) -> float:
        """Drop probability now: 0 in evaluation."""
        ...


@dataclass(eq=False)
class LinearSite:
    """One projection of a group."""

    disk_name: str
    kind: Kind
    shape: tuple[int, int]
    """Full ``(out, in)``."""
    rows: slice
    """Its rows of the group's weight and columns of the group's output."""
    group: ProjectionGroup = field(repr=False)
    adapter: SiteAdapter | None = None

    @property
    def weight(self) -> Tensor:
        """Local base weight, a view."""
        return self.group.weight[self.rows]


class ProjectionGroup(nn.Module):
    """Projections of one input, fused: ``[N, I] -> [N, O]``.

    Args:
        names: Disk names, in the order of their outputs.
        shapes: Full ``(out, in)`` of each.
        kind: How all of them are cut over tensor-parallel ranks.
        ctx: Topology of this rank.
        dtype: Of the weight.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        kind: Kind,
        ctx: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        cut_out = ctx.tp_size if kind is Kind.COLUMN else 1
        cut_in = ctx.tp_size if kind is Kind.ROW else 1
        self.ctx, self.kind = ctx, kind
        self.sites: list[LinearSite] = []
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            rows = slice(start, start + shape[0] // cut_out)
            self.sites.append(LinearSite(name, kind, shape, rows, self))
            start = rows.stop
        empty = torch.empty(start, shapes[0][1] // cut_in, dtype=dtype, device=ctx.device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Base outputs plus the deltas of the active adapters."""
        live = [(s, s.adapter) for s in self.sites if s.adapter is not None and s.adapter.active]
        if not live:
            return F.linear(x, self.weight)
        if any(adapter.dropout for _, adapter in live):
            return self._with_dropout(x, live)
        factors = [f for _, adapter in live for f in (adapter.a, adapter.b)]
        spans = [s.rows for s, _ in live]
        return _LoraProduct.apply(  # pyright: ignore[reportReturnType]
            x, self.weight, spans, [a.scaling for _, a in live], *factors
        )

    def _with_dropout(self, x: Tensor, live: list[tuple[LinearSite, SiteAdapter]]) -> Tensor:
        y = F.linear(x, self.weight)
        delta = torch.zeros_like(y)
        for site, adapter in live:
            dropped = x * self._keep(x, adapter.dropout)
            z = F.linear(dropped, adapter.a.to(x.dtype)) * adapter.scaling
            delta[:, site.rows] = F.linear(z, adapter.b.to(x.dtype))
        return y + delta

    def _keep(self, x: Tensor, probability: float) -> Tensor:
        """Dropout factors that do not depend on how the ranks share ``x``.

        The seed comes from torch's CPU generator, which recomputation replays; tensor-parallel
        ranks must have seeded it equally.
        """
        rows, columns = x.shape
        local = self.kind is Kind.REPLICATED and self.ctx.sequence_parallel
        row_parts = self.ctx.tp_size if local else 1
        column_parts = self.ctx.tp_size if self.kind is Kind.ROW else 1
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        drawn = torch.rand(rows * row_parts, columns * column_parts, generator=generator)
        if local:
            drawn = drawn.chunk(row_parts)[self.ctx.tp_rank]
        elif column_parts > 1:
            drawn = drawn.chunk(column_parts, dim=1)[self.ctx.tp_rank]
        keep = (drawn >= probability).to(x.dtype) / (1 - probability)
        return keep.to(x.device)


class _LoraProduct(torch.autograd.Function):
    """``x W^T`` with ``s_i (x A_i^T) B_i^T`` added on the columns of each adapted site.

    The base is frozen, so its gradient is never formed. The scaling is applied to the A factors,
    the smallest tensors at hand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        spans: list[slice],
        scalings: list[float],
        *factors: Tensor,
    ) -> Tensor:
        a = _stacked(factors[0::2], scalings).to(x.dtype)
        z = x @ a.t()
        y = _with_deltas(x, weight, spans, z, factors[1::2])
        ctx.save_for_backward(x, weight, a, z, *factors[1::2])
        ctx.spans, ctx.scalings = spans, scalings
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dy = grads[0]
        x, weight, a, z, *bs = ctx.saved_tensors
        dz = torch.empty_like(z)
        out: list[Tensor] = []
        start = 0
        for span, b in zip(ctx.spans, bs, strict=True):
            stop = start + b.shape[1]
            torch.mm(dy[:, span], b.to(x.dtype), out=dz[:, start:stop])
            out.append((dy[:, span].t() @ z[:, start:stop]).to(b.dtype))
            start = stop
        da = (dz.t() @ x).to(torch.float32)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _sum_of_products(dz, a, dy, weight)
        pairs: list[Tensor] = []
        start = 0
        for db, scaling in zip(out, ctx.scalings, strict=True):
            stop = start + db.shape[1]
            pairs += [da[start:stop].mul_(scaling), db]
            start = stop
        return dx, None, None, None, *pairs


def _with_deltas(
    x: Tensor, weight: Tensor, spans: Sequence[slice], z: Tensor, bs: Sequence[Tensor]
) -> Tensor:
    """``x W^T`` plus ``z_i B_i^T`` on the columns ``spans[i]``, which ascend.

    On a GPU the deltas come first: the large product then adds them in its last pass, where a small
    product on top would read and write the whole result once more.
    """
    if x.device.type != "cuda":
        y, start = x @ weight.t(), 0
        for span, b in zip(spans, bs, strict=True):
            stop = start + b.shape[1]
            y[:, span].addmm_(z[:, start:stop], b.to(x.dtype).t())
            start = stop
        return y
    y = x.new_empty(x.shape[0], weight.shape[0])
    start = done = 0
    for span, b in zip(spans, bs, strict=True):
        y[:, done : span.start].zero_()
        stop = start + b.shape[1]
        torch.mm(z[:, start:stop], b.to(x.dtype).t(), out=y[:, span])
        start, done = stop, span.stop
    y[:, done:].zero_()
    return y.addmm_(x, weight.t())


def _sum_of_products(dz: Tensor, a: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """``dz A + dy W``, in the order of ``_with_deltas``."""
    if dy.device.type != "cuda":
        return (dy @ weight).addmm_(dz, a)
    return (dz @ a).addmm_(dy, weight)


def _stacked(factors: Sequence[Tensor], scalings: Sequence[float]) -> Tensor:
    if len(set(scalings)) == 1:
        return torch.cat(list(factors)) * scalings[0]
    return torch.cat([f * s for f, s in zip(factors, scalings, strict=True)])
