"""Vocabulary-parallel log-probabilities of given tokens, with a small memory.

The head is frozen, so the gradient of a log-probability with respect to the hidden state,
``(W_y - E_p[W]) / temperature``, is known in the forward pass. It is kept instead of the logits:
``[rows, H]`` in place of ``[rows, vocabulary]``, and the backward pass is one product per row.
The same holds for the entropy, whose gradient is ``-E_p[(log p + entropy) W] / temperature``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm_lora.model.collectives import all_reduce
from glm_lora.model.fast import takes
from glm_lora.model.parallel import Group
from glm_lora.model.plan import LOGITS_PER_BLOCK


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        entropy_gradient: bool,
        group: Group | None,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        ctx.needed, ctx.entropy_gradient = ctx.needs_input_grad[0], entropy_gradient
        logprob = hidden.new_empty(rows, dtype=torch.float32)
        entropy = hidden.new_empty(rows if with_entropy else 0, dtype=torch.float32)
        slopes = [torch.empty_like(hidden)] if ctx.needed else []
        if ctx.needed and entropy_gradient:
            slopes.append(torch.empty_like(hidden))
        fused = takes("fused", hidden)
        score = _fused_block if fused else _block
        # In place and in bfloat16, six times as many logits fit into the plain path's memory.
        step = max(1, (3 if fused else 1) * LOGITS_PER_BLOCK // vocabulary)
        step -= step % 256 if step > 256 else 0
        for start in range(0, rows, step):
            block = slice(start, start + step)
            logits = hidden[block] @ weight.t()
            wanted = _Wanted(with_entropy, ctx.needed, ctx.needed and entropy_gradient)
            lp, ent, outer = score(logits, targets[block], temperature, wanted, group, first)
            logprob[block] = lp
            if ent is not None:
                entropy[block] = ent
            for slope, factor in zip(slopes, outer, strict=True):
                torch.mm(factor.to(weight.dtype), weight, out=slope[block])
        if temperature != 1.0:
            for slope in slopes:
                slope.div_(temperature)
        ctx.save_for_backward(*slopes)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        slopes = ctx.saved_tensors
        d_hidden = grads[0].unsqueeze(-1).to(slopes[0].dtype) * slopes[0]
        if ctx.entropy_gradient:
            d_hidden = d_hidden + grads[1].unsqueeze(-1).to(slopes[1].dtype) * slopes[1]
        return d_hidden, None, None, None, None, None, None, None


@dataclass(frozen=True)
class _Wanted:
    entropy: bool
    gradient: bool
    entropy_gradient: bool


def _fused_block(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    wanted: _Wanted,
    group: Group | None,
    first: int,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """As ``_block``, overwriting the logits; two passes over them in all."""
    from glm_lora.model.kernels.head import factors_, statistics

    top, total, product, own = statistics(logits, targets, first, temperature)
    if group is not None:
        best = all_reduce(top, group, dist.ReduceOp.MAX)
        shrink = (top - best).exp_()
        total, product, own = all_reduce(
            torch.stack([total * shrink, product * shrink, own]), group
        ).unbind()
        top = best
    log_sum = total.log().add_(top)
    entropy = log_sum - product / total if wanted.entropy else None
    if not wanted.gradient:
        return own - log_sum, entropy, []
    needed = entropy if wanted.entropy_gradient else None
    factors = factors_(logits, targets, first, log_sum, needed, temperature)
    return own - log_sum, entropy, factors


def _block(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    wanted: _Wanted,
    group: Group | None,
    first: int,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Log-probability, entropy and the factors that multiply the head in their gradients."""
    with_entropy = wanted.entropy
    logits = logits.float().div_(temperature)
    top = logits.amax(-1)
    if group is not None:
        top = all_reduce(top, group, dist.ReduceOp.MAX)
    logits = logits.sub_(top.unsqueeze(-1))
    powers = logits.exp()
    place = targets - first
    mine = (place >= 0) & (place < logits.shape[-1])
    place = place.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    own = logits.gather(-1, place).squeeze(-1) * mine
    sums = [powers.sum(-1), own]
    if with_entropy:
        sums.append((powers * logits).sum(-1))
    totals = torch.stack(sums)
    if group is not None:
        totals = all_reduce(totals, group)
    log_sum = totals[0].log()
    logprob = totals[1] - log_sum
    entropy = log_sum - totals[2] / totals[0] if with_entropy else None
    if not wanted.gradient:
        return logprob, entropy, []
    share = powers.div_(totals[0].unsqueeze(-1))
    factors = []
    if entropy is not None and wanted.entropy_gradient:
        log_share = logits.sub_(log_sum.unsqueeze(-1))
        factors = [log_share.add_(entropy.unsqueeze(-1)).mul_(share).neg_()]
    outer = share.neg_()
    outer.scatter_add_(-1, place, mine.unsqueeze(-1).to(outer.dtype))
    return logprob, entropy, [outer, *factors]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
    group: Group | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(hidden W^T / temperature)[target]`` per row, fp32.

    Args:
        hidden: ``[rows, H]``.
        weight: This rank's rows of the head, ``[V / T, H]``, frozen.
        targets: int64 ``[rows]``, global token ids.
        temperature: Divides the logits.
        with_entropy: Also return the entropy of each distribution, in nats.
        entropy_gradient: The entropy has a gradient; without one the backward pass is cheaper.
        group: Tensor-parallel group.
        first: Global id of ``weight[0]``.

    Returns:
        Log-probabilities ``[rows]`` and entropies ``[rows]`` or None. The gradient that reaches
        ``hidden`` is this rank's part; it has to be summed over ``group``.
    """
    logprob, entropy = _TokenLogprobs.apply(  # pyright: ignore
        hidden,
        weight,
        targets,
        temperature,
        with_entropy,
        with_entropy and entropy_gradient,
        group,
        first,
    )
    if entropy is not None and not entropy_gradient:
        entropy = entropy.detach()
    return logprob, entropy if with_entropy else None
