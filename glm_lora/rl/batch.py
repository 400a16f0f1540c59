"""From samples and their rewards to the batch of one update, degenerate cases included.

Nothing is patched up in silence: a sample without a reward, an aborted one or an empty response
leaves the batch and is counted; a group without spread keeps its place with advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm_lora.config import AlgorithmConfig
from glm_lora.protocols import Finish, Sample, TrainBatch, TrainSample
from glm_lora.rl.advantages import group_advantages, has_spread


@dataclass(frozen=True)
class BatchReport:
    """What became of the samples of one rollout; all counts are of samples unless named."""

    kept: tuple[int, ...]
    """Index (in rollout order) of each sample of the batch."""
    advantages: np.ndarray
    """Advantage of every sample in rollout order; 0 where it has none."""
    groups: int
    zero_std_groups: int
    """Groups with equal (or fewer than two known) rewards."""
    unscored: int
    """No reward, or one that is not finite."""
    aborted: int
    empty: int
    """Responses without a token."""
    truncated: int
    masked: int
    """Truncated samples taken out of the loss (``truncated = "mask"``)."""


def make_batch(
    samples: Sequence[Sample],
    rewards: Sequence[float | None],
    group_size: int,
    *,
    algorithm: AlgorithmConfig,
    step: int,
    temperature: float = 1.0,
) -> tuple[TrainBatch, BatchReport]:
    """Build the update's batch from ``group_size`` consecutive samples per prompt.

    Args:
        samples: All samples of the rollout, group after group.
        rewards: One per sample; None (or a value that is not finite) means it has none.
        group_size: Samples per prompt.
        algorithm: Advantage estimator and treatment of truncated responses.
        step: Rollout number.
        temperature: Sampling temperature of the rollout.

    Returns:
        The batch (possibly without samples) and what was left out of it.
    """
    assert len(samples) == len(rewards), "one reward per sample"
    assert group_size >= 1 and len(samples) % group_size == 0, "whole groups"
    values = np.array([known_reward(s, r) for s, r in zip(samples, rewards, strict=True)])
    grouped = values.reshape(-1, group_size)
    parts = [group_advantages(group, algorithm.advantage) for group in grouped]
    advantages = np.concatenate(parts) if parts else np.zeros(0)
    kept: list[int] = []
    batch: list[TrainSample] = []
    masked = 0
    for index, sample in enumerate(samples):
        if np.isnan(values[index]) or not sample.response_ids:
            continue
        mask_out = algorithm.truncated == "mask" and sample.finish is Finish.LENGTH
        masked += mask_out
        kept.append(index)
        batch.append(_train_sample(sample, float(advantages[index]), mask_out))
    finishes = [s.finish for s in samples]
    aborted = finishes.count(Finish.ABORT)
    report = BatchReport(
        kept=tuple(kept),
        advantages=advantages,
        groups=len(grouped),
        zero_std_groups=sum(not has_spread(group) for group in grouped),
        unscored=int(np.isnan(values).sum()) - aborted,
        aborted=aborted,
        empty=sum(not s.response_ids and s.finish is not Finish.ABORT for s in samples),
        truncated=finishes.count(Finish.LENGTH),
        masked=masked,
    )
    return TrainBatch(tuple(batch), step, temperature), report


def has_signal(batch: TrainBatch) -> bool:
    """Whether an update on the batch can learn anything: some counted token has an advantage.

    Without one the update is skipped whole. A KL or entropy term alone is no reason to move.
    """
    return any(s.advantage != 0 and any(s.loss_mask) for s in batch.samples)


def known_reward(sample: Sample, reward: float | None) -> float:
    """The reward that counts; NaN for an aborted sample, and where none or no finite one is."""
    if reward is None or sample.finish is Finish.ABORT or not math.isfinite(reward):
        return math.nan
    return float(reward)


def _train_sample(sample: Sample, advantage: float, mask_out: bool) -> TrainSample:
    return TrainSample(
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        rollout_logprobs=sample.logprobs,
        advantage=advantage,
        # The sampled stop token is a decision of the policy like any other: it counts.
        loss_mask=(0 if mask_out else 1,) * len(sample.response_ids),
        adapter=sample.adapter,
        routed_experts=sample.routed_experts,
    )
