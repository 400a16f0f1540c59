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
        self._latest: Fused | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Base outputs plus the deltas of the active adapters."""
        live = self.live()
        if not live:
            return F.linear(x, self.weight)
        if any(adapter.dropout for _, adapter in live):
            return self._with_dropout(x, live)
        return _LoraProduct.apply(  # pyright: ignore[reportReturnType]
            x, self.weight, self._fused(live, x.dtype), *factors_of(live)
        )

    def live(self) -> list[tuple[LinearSite, SiteAdapter]]:
        """The sites whose adapters act now."""
        return [(s, s.adapter) for s in self.sites if s.adapter is not None and s.adapter.active]

    def _fused(self, live: Sequence[tuple[LinearSite, SiteAdapter]], dtype: torch.dtype) -> Fused:
        """The adapters as two matrices; the same ones until a factor has changed."""
        stamp = (dtype, *((_stamp(a.a), _stamp(a.b), a.scaling) for _, a in live))
        if self._latest is None or self._latest.stamp != stamp:
            self._latest = fuse(live, self.weight.shape[0], dtype, stamp)
        return self._latest

    def drop_fused(self) -> None:
        """Free the adapters' copies; the next use makes them again."""
        self._latest = None

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


@dataclass(frozen=True)
class Fused:
    """A group's adapters in the compute dtype: ``y += (x A^T) B^T`` in two products."""

    stamp: tuple[Any, ...]
    """What it was made from."""
    a: Tensor
    """``[R, I]``, each site's rows multiplied with its scaling."""
    b: Tensor
    """``[O, R]``: each site's B at its rows and ranks, zero elsewhere."""
    parts: tuple[tuple[slice, slice, float], ...]
    """Rows, ranks and scaling of each site."""


def factors_of(live: Sequence[tuple[LinearSite, SiteAdapter]]) -> list[nn.Parameter]:
    """A and B of each, in order."""
    return [factor for _, adapter in live for factor in (adapter.a, adapter.b)]


def fuse(
    live: Sequence[tuple[LinearSite, SiteAdapter]],
    outputs: int,
    dtype: torch.dtype,
    stamp: tuple[Any, ...] = (),
) -> Fused:
    """Lay the factors of a group's adapters into two matrices.

    The zeros are multiplied too: of a group's sites the first product sees all ranks anyway, and in
    the second they cost less than a launch for each site.

    Args:
        live: Sites and their adapters.
        outputs: Columns of the group's output.
        dtype: Of the matrices.
        stamp: What tells this state of the factors from others.
    """
    parts: list[tuple[slice, slice, float]] = []
    start = 0
    for site, adapter in live:
        stop = start + adapter.a.shape[0]
        parts.append((site.rows, slice(start, stop), adapter.scaling))
        start = stop
    with torch.no_grad():
        a = torch.cat([adapter.a for _, adapter in live])
        if len({scaling for *_, scaling in parts}) == 1:
            a.mul_(parts[0][2])
        else:
            for _, ranks, scaling in parts:
                a[ranks].mul_(scaling)
        a = a.to(dtype)
        b = a.new_zeros(outputs, start)
        for (rows, ranks, _), (_, adapter) in zip(parts, live, strict=True):
            b[rows, ranks].copy_(adapter.b)
    return Fused(stamp, a, b, tuple(parts))


def _stamp(factor: Tensor) -> tuple[int, int]:
    """Changes with every write to ``factor`` and when its memory is another."""
    return factor.data_ptr(), factor._version


class _LoraProduct(torch.autograd.Function):
    """``x W^T + (x A^T) B^T`` for the fused factors of a group.

    The base is frozen, so its gradient is never formed. The small products come first: the large
    one then adds them in its last pass, where a small product on top would read and write the whole
    result once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: Fused, *factors: Tensor) -> Tensor:
        z = x @ fused.a.t()
        ctx.save_for_backward(x, weight, fused.a, fused.b, z)
        ctx.parts, ctx.dtype = fused.parts, factors[0].dtype
        return (z @ fused.b.t()).addmm_(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dy = grads[0]
        x, weight, a, b, z = ctx.saved_tensors
        dz = dy @ b
        da, db = (dz.t() @ x).to(ctx.dtype), dy.t() @ z
        pairs: list[Tensor] = []
        for rows, ranks, scaling in ctx.parts:
            pairs += [da[ranks].mul_(scaling), db[rows, ranks].to(ctx.dtype)]
        dx = (dz @ a).addmm_(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, None, None, *pairs
