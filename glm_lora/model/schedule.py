"""Run micro-batches forward and backward through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_lora.model.batch import ModelBatch
from glm_lora.model.stage import Stage

LossFn = Callable[[int, Tensor, Tensor | None], Tensor]
"""(index of the micro-batch, log-probabilities [B, L-1], entropies or None) -> scalar loss."""


@dataclass(frozen=True)
class MicrobatchOutput:
    """What the last stage computed for one micro-batch, without gradient."""

    logprobs: Tensor
    """fp32 ``[B, L - 1]``."""
    entropy: Tensor | None
    """fp32 ``[B, L - 1]``, nats."""
    loss: float | None
    """None when only run forward."""


def run_microbatches(
    stage: Stage,
    batches: Sequence[ModelBatch],
    loss_fn: LossFn | None,
    forward_only: bool = False,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> list[MicrobatchOutput]:
    """Run every micro-batch and accumulate adapter gradients.

    All ranks of the pipeline pass the same batches; ranks that share experts or tensors pass the
    same number of them.

    Args:
        stage: This rank's stage.
        batches: Micro-batches in order.
        loss_fn: Called on the last stage. Losses are summed as they are: divide by the global
            token count inside. Not called when ``forward_only``.
        forward_only: No loss and no gradient.
        temperature: Divides the logits.
        with_entropy: Pass entropies to ``loss_fn``.

    Returns:
        One output per micro-batch on the last stage; an empty list elsewhere.
    """
    outputs: list[MicrobatchOutput] = []
    with torch.set_grad_enabled(not forward_only):
        for i, batch in enumerate(batches):
            hidden = stage(batch)
            logprobs, entropy = stage.token_logprobs(hidden, batch, temperature, with_entropy)
            loss = None
            if not forward_only:
                assert loss_fn is not None
                total = loss_fn(i, logprobs, entropy)
                if total.requires_grad:
                    total.backward()
                loss = float(total.detach())
            outputs.append(
                MicrobatchOutput(
                    logprobs.detach(), None if entropy is None else entropy.detach(), loss
                )
            )
    return outputs
