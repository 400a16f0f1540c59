"""Recomputation of a part of a layer without hooks on every tensor that it saves.

The first pass runs without a graph, and the part is run again when its gradient is asked for.
``torch.utils.checkpoint`` builds the graph both times and catches each saved tensor in Python,
which a short step feels: its forward pass is bound by what the host does. Everything that gets a
gradient is an input here, the adapters' factors too, so that ``torch.autograd.grad`` works as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from glm_lora.model.batch import ModelBatch
from glm_lora.model.linear import ProjectionGroup, factors_of

Part = Callable[[Tensor, ModelBatch], Tensor]


def run_again(
    part: Part, streams: Tensor, batch: ModelBatch, groups: Iterable[ProjectionGroup]
) -> Tensor:
    """``part(streams, batch)``, whose backward pass runs it again instead of keeping its values.

    Args:
        part: Uses no trainable tensors but the adapters of ``groups``, and no randomness but
            torch's generator on the CPU.
        streams: With or without gradient.
        batch: Passed on.
        groups: Projections of ``part``.
    """
    live = [pair for group in groups for pair in group.live()]
    # A dropout's seed is drawn from the generator.
    random = torch.get_rng_state() if any(adapter.dropout for _, adapter in live) else None
    out = _Rerun.apply(part, batch, random, streams, *factors_of(live))
    assert isinstance(out, Tensor)
    return out


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Part, batch: ModelBatch, random: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        streams, *factors = inputs
        ctx.part, ctx.batch, ctx.random, ctx.factors = part, batch, random, factors
        ctx.save_for_backward(streams)
        return part(streams, batch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (streams,) = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        streams = streams.detach().requires_grad_(needed[0])
        inputs = [x for x, wanted in zip((streams, *ctx.factors), needed, strict=True) if wanted]
        with torch.enable_grad(), _replayed(ctx.random):
            out = ctx.part(streams, ctx.batch)
        found = iter(torch.autograd.grad(out, inputs, grads[0], allow_unused=True))
        return None, None, None, *(next(found) if wanted else None for wanted in needed)


@contextlib.contextmanager
def _replayed(random: Tensor | None) -> Iterator[None]:
    """The generator as it was; afterwards as it is now."""
    if random is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random)
        yield
