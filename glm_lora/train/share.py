"""Who computes which sequences, and log-probabilities without a gradient.

Derived from the whole batch on every rank, without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from glm_lora.model.batch import ModelBatch, collate, pack
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import Stage
from glm_lora.train.batching import assign_ranks, micro_batches


@dataclass(frozen=True)
class Plan:
    """This rank's micro-batches: sample indices, possibly none for a rank that only keeps pace."""

    micro_batches: tuple[tuple[int, ...], ...]


def plan_for(lengths: Sequence[int], context: ParallelContext, max_tokens: int) -> Plan:
    """Share sequences over the data-parallel ranks; every rank gets as many micro-batches.

    Ranks with fewer run empty ones, because expert and pipeline collectives pair up by number.
    """
    shares = [
        micro_batches(indices, lengths, max_tokens, padded=not packs(context))
        for indices in assign_ranks(lengths, context.dp_size)
    ]
    count = max(len(share) for share in shares)
    mine = [tuple(indices) for indices in shares[context.dp_rank]]
    return Plan(tuple(mine + [()] * (count - len(mine))))


def packs(context: ParallelContext) -> bool:
    """Whether micro-batches are packed: the CUDA kernels take sequences behind each other."""
    return context.device.type == "cuda"


def model_batch(
    context: ParallelContext,
    sequences: Sequence[Sequence[int]],
    routed_experts: Sequence[np.ndarray | None] | None = None,
    wanted: Sequence[Sequence[bool]] | None = None,
) -> ModelBatch:
    """One micro-batch on the rank's device, packed or padded."""
    build = pack if packs(context) else collate
    return build(sequences, routed_experts=routed_experts, wanted=wanted, device=context.device)


def sequence_logprobs(
    stage: Stage,
    context: ParallelContext,
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    routed_experts: Sequence[np.ndarray | None] | None = None,
) -> list[np.ndarray]:
    """Log-probabilities of tokens 1.. of each sequence, on every rank; no gradient.

    Returns:
        One float32 array of ``len(sequence) - 1`` per sequence.
    """
    plan = plan_for([len(s) for s in sequences], context, max_tokens)
    batches = [
        model_batch(
            context,
            [sequences[i] for i in indices],
            routed_experts and [routed_experts[i] for i in indices],
        )
        for indices in plan.micro_batches
    ]
    outputs = run_microbatches(stage, batches, None, forward_only=True, temperature=temperature)
    found: dict[int, np.ndarray] = {}
    for indices, output in zip(plan.micro_batches, outputs, strict=False):
        rows = output.logprobs.float().cpu().numpy()
        for row, index in enumerate(indices):
            found[index] = rows[row, : len(sequences[index]) - 1]
    return gather_by_index(found, len(sequences), context)


def gather_by_index(
    found: Mapping[int, np.ndarray], count: int, context: ParallelContext
) -> list[np.ndarray]:
    """Results that ranks hold by sample index, complete and in order on every rank."""
    if context.world_size == 1:
        return [found[i] for i in range(count)]
    mine = dict(found) if context.is_last_stage and context.tp_rank == 0 else {}
    parts: list[Any] = [None] * context.world_size
    dist.all_gather_object(parts, mine)
    merged = {index: value for part in parts for index, value in part.items()}
    return [merged[i] for i in range(count)]
