"""The adapters of one rank as a set: gradients, norms, drift, gathering and loading.

Keys are the serving keys of ``Selection.tensor_shapes()``. A rank holds only the keys of its
pipeline stage, and of each factor the part that tensor parallelism gives it. Everything that
communicates takes the ``ParallelContext`` and must be called on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from glm_lora.arch.projections import Kind
from glm_lora.errors import CheckpointError, TrainingError
from glm_lora.fingerprint import tensor_bytes
from glm_lora.lora import sharding
from glm_lora.lora.adapter import Switch
from glm_lora.model.collectives import all_gather, all_reduce
from glm_lora.model.parallel import Group, ParallelContext
from glm_lora.targets.selection import Selection


@dataclass(frozen=True, eq=False)
class Factor:
    """One factor of one adapter on this rank."""

    parameter: nn.Parameter
    """Local part, fp32."""
    shape: tuple[int, int]
    """Full shape."""
    kind: Kind
    """How the projection is cut."""
    letter: sharding.Letter
    part: tuple[slice, slice]
    """Where the local part lies in the full factor."""

    @property
    def axis(self) -> int | None:
        """The axis that tensor parallelism cuts, or None."""
        return sharding.tp_axis(self.kind, self.letter)


class AdapterSet:
    """All adapters of one rank.

    Args:
        selection: What is trained in the whole model.
        factors: This rank's factors by serving key, in the selection's order.
        switch: Shared by the adapters of the set.
    """

    def __init__(self, selection: Selection, factors: Mapping[str, Factor], switch: Switch) -> None:
        self.selection, self.factors = selection, dict(factors)
        self._switch = switch
        self._peaks: Tensor | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """The local fp32 masters by serving key."""
        return {key: f.parameter for key, f in self.factors.items()}

    def tp_axis(self, key: str) -> int | None:
        """The axis of ``key`` that tensor parallelism cuts, or None."""
        return self.factors[key].axis

    @contextmanager
    def enabled(self, flag: bool) -> Iterator[None]:
        """Switch all adapters on or off inside the block; off is the base, bit for bit."""
        before, self._switch.enabled = self._switch.enabled, flag
        try:
            yield
        finally:
            self._switch.enabled = before

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """No dropout inside the block."""
        before, self._switch.training = self._switch.training, False
        try:
            yield
        finally:
            self._switch.training = before

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for f in self.factors.values():
            f.parameter.grad = None

    def sync_gradients(self, ctx: ParallelContext) -> None:
        """Sum the gradients over the ranks that each hold a part of them.

        Partial ones (``sharding.is_partial``) over tensor-parallel ranks, then all over
        data-parallel ranks, which include the expert-parallel ones. Nothing is divided: the loss
        already is, by the global token count.
        """
        for f in self.factors.values():
            if f.parameter.grad is None:
                f.parameter.grad = torch.zeros_like(f.parameter)
        partial = [
            f.parameter
            for f in self.factors.values()
            if sharding.is_partial(f.kind, f.letter, sequence_parallel=ctx.sequence_parallel)
        ]
        _sum_gradients(partial, ctx.tp_group)
        _sum_gradients(self.parameters().values(), ctx.dp_group)

    def grad_norm(self, ctx: ParallelContext) -> float:
        """Global L2 norm of the synchronised gradients; a replicated factor counts once."""
        counted = [
            f.parameter.grad
            for f in self.factors.values()
            if f.parameter.grad is not None and (f.axis is not None or ctx.tp_rank == 0)
        ]
        total = torch.zeros((), dtype=torch.float64, device=ctx.device)
        if counted:
            total = _norms(counted).double().square().sum()
        for group in (ctx.tp_group, ctx.pp_group):
            if group is not None:
                total = all_reduce(total, group)
        return float(total.sqrt())

    @torch.no_grad()
    def record_gradients(self) -> None:
        """Remember which factors have had a gradient; call after each update with a signal."""
        grads = [
            torch.zeros_like(f.parameter) if f.parameter.grad is None else f.parameter.grad
            for f in self.factors.values()
        ]
        if grads:
            norms = _norms(grads)
            self._peaks = norms if self._peaks is None else torch.maximum(self._peaks, norms)

    def dead_sites(self, ctx: ParallelContext) -> list[str]:
        """Disk names of selected projections whose A or B never had a gradient other than zero.

        A's gradient is zero while B is, so an adapter is alive from its second update on.
        """
        keys = list(self.selection.tensor_shapes())
        place = {key: i for i, key in enumerate(keys)}
        peaks = torch.zeros(len(keys), device=ctx.device)
        if self._peaks is not None:
            peaks[[place[key] for key in self.factors]] = self._peaks
        for group in (ctx.tp_group, ctx.pp_group):
            if group is not None:
                peaks = all_reduce(peaks, group, dist.ReduceOp.MAX)
        dead = {key for key, peak in zip(keys, peaks.tolist(), strict=True) if not peak > 0}
        return [a.site.disk_name for a in self.selection.adapters if dead & {a.a_key, a.b_key}]

    def replica_hashes(self) -> dict[str, str]:
        """sha256 of the bytes of each local factor, by serving key."""
        return {
            key: hashlib.sha256(tensor_bytes(f.parameter)).hexdigest()
            for key, f in self.factors.items()
        }

    def check_drift(self, ctx: ParallelContext) -> None:
        """Compare replicated factors over tensor-parallel ranks and all over data-parallel ranks.

        Raises:
            TrainingError: Copies differ; names the projections. Every rank raises.
        """
        hashes = [int(h[:15], 16) for h in self.replica_hashes().values()]
        own = torch.tensor(hashes, dtype=torch.int64, device=ctx.device)
        differs = torch.zeros(len(hashes), dtype=torch.bool, device=ctx.device)
        replicated = [f.axis is None for f in self.factors.values()]
        for group, counts in ((ctx.tp_group, replicated), (ctx.dp_group, [True] * len(hashes))):
            if group is not None:
                copies = all_gather(own.unsqueeze(0), group)
                mask = torch.tensor(counts, dtype=torch.bool, device=ctx.device)
                differs |= (copies != own).any(0) & mask
        names = [key for key, bad in zip(self.factors, differs.tolist(), strict=True) if bad]
        drifted = torch.tensor(len(names), device=ctx.device)
        if ctx.world_size > 1:
            dist.all_reduce(drifted, op=dist.ReduceOp.MAX)
        if drifted.item():
            what = ", ".join(names[:4]) if names else "factors of another rank"
            raise TrainingError(
                f"replicated adapter factors differ between ranks: {what}",
                "equal copies on every rank",
                "Go back to the last checkpoint; the gradients of these factors are not summed "
                "over all ranks that hold them",
            )

    @torch.no_grad()
    def gather(
        self, ctx: ParallelContext, dtype: torch.dtype = torch.float32, *, gradients: bool = False
    ) -> dict[str, Tensor]:
        """Full tensors of the whole model on every rank, on the CPU, in the selection's order.

        A device is read once, not once for each of them; each has memory of its own, because a
        part of a buffer takes the whole of it along wherever it is pickled.

        Args:
            ctx: Topology of this rank.
            dtype: Of the result.
            gradients: Gather the gradients instead of the values.
        """
        own: dict[str, Tensor] = {}
        for key, f in self.factors.items():
            value = f.parameter.grad if gradients else f.parameter.detach()
            own[key] = torch.zeros_like(f.parameter) if value is None else value
        own = self._gather_tp(own, ctx)
        shapes = self.selection.tensor_shapes()
        if ctx.pp_group is not None:
            own = _share_stages(own, shapes, ctx)
        flat = torch.cat([own[key].flatten() for key in shapes]).to(dtype)
        if flat.is_cuda:
            flat = torch.empty(flat.shape, dtype=dtype, pin_memory=True).copy_(flat)
        parts = flat.split([own[key].numel() for key in shapes])
        return {k: p.view(s).clone() for (k, s), p in zip(shapes.items(), parts, strict=True)}

    def _gather_tp(self, own: dict[str, Tensor], ctx: ParallelContext) -> dict[str, Tensor]:
        cut = [key for key in own if self.factors[key].axis is not None]
        if ctx.tp_group is None or not cut:
            return own
        flat = torch.cat([own[key].flatten() for key in cut]).unsqueeze(0)
        copies = all_gather(flat, ctx.tp_group)
        out = dict(own)
        pieces = [copy.split([own[key].numel() for key in cut]) for copy in copies]
        for i, key in enumerate(cut):
            axis = self.factors[key].axis
            assert axis is not None
            out[key] = torch.cat([p[i].view(own[key].shape) for p in pieces], dim=axis)
        return out

    @torch.no_grad()
    def load_full(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the adapters from full tensors; every key of the selection and no other.

        Raises:
            CheckpointError: A key is missing or unknown, or a shape differs; nothing was changed.
        """
        shapes = self.selection.tensor_shapes()
        missing, unknown = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys()
        if missing or unknown:
            raise CheckpointError(
                f"adapter tensors: {len(missing)} missing {sorted(missing)[:2]}, "
                f"{len(unknown)} unknown {sorted(unknown)[:2]}",
                f"exactly the {len(shapes)} tensors of the selection",
            )
        for key, shape in shapes.items():
            if tuple(tensors[key].shape) != shape:
                raise CheckpointError(
                    f"adapter tensor {key!r} has shape {tuple(tensors[key].shape)}", str(shape)
                )
        for key, f in self.factors.items():
            f.parameter.copy_(tensors[key][f.part])


def _norms(tensors: list[Tensor]) -> Tensor:
    """L2 norm of each tensor in few kernels, ``[len(tensors)]``."""
    return torch.stack(torch._foreach_norm(tensors))  # pyright: ignore[reportPrivateImportUsage]


def _sum_gradients(parameters: Iterable[nn.Parameter], group: Group | None) -> None:
    grads = [p.grad for p in parameters if p.grad is not None]
    if group is None or not grads:
        return
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def _share_stages(
    own: dict[str, Tensor], shapes: Mapping[str, tuple[int, int]], ctx: ParallelContext
) -> dict[str, Tensor]:
    """Every pipeline stage broadcasts its tensors to the others."""
    assert ctx.pp_group is not None
    keys: list[list[str]] = [[] for _ in range(ctx.pp_size)]
    dist.all_gather_object(keys, list(own), group=ctx.pp_group)
    out: dict[str, Tensor] = {}
    for stage, names in enumerate(keys):
        sizes = [shapes[name][0] * shapes[name][1] for name in names]
        if stage == ctx.pp_rank:
            flat = torch.cat([own[name].flatten() for name in names] or [_nothing(ctx)])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.float32, device=ctx.device)
        source = dist.get_global_rank(ctx.pp_group, stage)
        dist.broadcast(flat, src=source, group=ctx.pp_group)
        for name, piece in zip(names, flat.split(sizes), strict=True):
            out[name] = piece.view(shapes[name])
    return out


def _nothing(ctx: ParallelContext) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=ctx.device)
