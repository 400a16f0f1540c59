"""Differentiable collectives; with ``group`` None each is the identity.

Token tensors are flat, ``[tokens, ...]``, and are cut along axis 0. ``enter_tp`` and ``leave_tp``
are the two ends of a tensor-parallel region (Korthikanti et al. 2022, figure 5): with sequence
parallelism all-gather and reduce-scatter, otherwise copy and all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from glm_lora.model.parallel import Group, ParallelContext


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """A reduced copy of ``x`` on every rank; no gradient."""
    out = x.contiguous().clone()
    dist.all_reduce(out, op=op, group=group)
    return out


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The ranks' tensors behind each other along axis 0; no gradient."""
    x = x.contiguous()
    out = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's equal part, along axis 0, of the sum over ranks; no gradient."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, received: Sequence[int], sent: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return _exchange(x, group, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.group, ctx.sent, ctx.received), None, None, None


def _exchange(x: Tensor, group: Group, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(
        out,
        x.contiguous(),
        output_split_sizes=list(received),
        input_split_sizes=list(sent),
        group=group,
    )
    return out


def copy_to_tp(x: Tensor, group: Group | None) -> Tensor:
    """Identity forward; the gradient is summed over the group."""
    return x if group is None else _apply(_Copy, x, group)


def reduce_from_tp(x: Tensor, group: Group | None) -> Tensor:
    """Sum over the group forward; identity backward."""
    return x if group is None else _apply(_Reduce, x, group)


def gather_tokens(x: Tensor, group: Group | None) -> Tensor:
    """All-gather along the tokens; the gradient is reduce-scattered."""
    return x if group is None else _apply(_Gather, x, group)


def scatter_tokens(x: Tensor, group: Group | None) -> Tensor:
    """Reduce-scatter along the tokens; the gradient is all-gathered."""
    return x if group is None else _apply(_ReduceScatter, x, group)


def all_to_all(
    x: Tensor, group: Group | None, received: Sequence[int], sent: Sequence[int]
) -> Tensor:
    """Send ``sent[r]`` rows to rank r and receive ``received[r]`` from it (sizes may differ)."""
    return x if group is None else _apply(_AllToAll, x, group, received, sent)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return function.apply(*args)  # pyright: ignore[reportReturnType]


def enter_tp(x: Tensor, ctx: ParallelContext, num_tokens: int) -> Tensor:
    """Give a tensor-parallel region all ``num_tokens`` tokens: ``[local tokens, H] -> [N, H]``."""
    if ctx.sequence_parallel:
        return gather_tokens(x, ctx.tp_group)[:num_tokens]
    return copy_to_tp(x, ctx.tp_group)


def leave_tp(y: Tensor, ctx: ParallelContext) -> Tensor:
    """Sum the partial outputs of a tensor-parallel region: ``[N, H] -> [local tokens, H]``."""
    if ctx.sequence_parallel:
        return scatter_tokens(pad_tokens(y, ctx), ctx.tp_group)
    return reduce_from_tp(y, ctx.tp_group)


def pad_tokens(y: Tensor, ctx: ParallelContext) -> Tensor:
    """Append zero tokens until the tensor-parallel ranks can share them equally."""
    missing = -y.shape[0] % ctx.tp_size
    return F.pad(y, (0, 0) * (y.dim() - 1) + (0, missing)) if missing else y


def local_tokens(y: Tensor, ctx: ParallelContext) -> Tensor:
    """This rank's tokens of a tensor that every tensor-parallel rank holds whole; no gradient."""
    if not ctx.sequence_parallel:
        return y
    return pad_tokens(y, ctx).chunk(ctx.tp_size)[ctx.tp_rank]
