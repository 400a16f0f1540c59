"""Dynamic sampling: replace groups that teach nothing, up to a limit.

Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2: groups with equal rewards have no advantage,
so other prompts are sampled in their place. The number of extra rounds is bounded; what could not
be replaced is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from glm_lora.protocols import Sample
from glm_lora.rl.advantages import has_spread
from glm_lora.rl.batch import known_reward
from glm_lora.rl.rewards import Score

Draw = Callable[[int, int], tuple[Sequence[Sample], Sequence[Score]]]
"""``draw(prompts, first)``: sample and score so many further prompts, ``first`` being the number
drawn in this rollout before (for the requests' seeds); whole groups, in order."""


@dataclass
class Gathered:
    """The samples of one rollout."""

    samples: list[Sample] = field(default_factory=list)
    """Whole groups to train on."""
    scores: list[Score] = field(default_factory=list)
    all_samples: list[Sample] = field(default_factory=list)
    """Everything sampled: rewards are reported over these, or the metric would flatter."""
    all_scores: list[Score] = field(default_factory=list)
    extra_rounds: int = 0
    dropped_groups: int = 0
    missing_groups: int = 0
    """Groups short of the wanted number when the limit was reached."""

    def metrics(self) -> dict[str, float]:
        """The counts as ``rollout/dynamic_...`` scalars."""
        return {
            "rollout/dynamic_extra_rounds": float(self.extra_rounds),
            "rollout/dynamic_dropped_groups": float(self.dropped_groups),
            "rollout/dynamic_missing_groups": float(self.missing_groups),
        }


def gather(draw: Draw, wanted: int, group_size: int, limit: int) -> Gathered:
    """Sample ``wanted`` groups, replacing those without spread in at most ``limit`` extra rounds.

    Args:
        draw: Samples and scores further prompts.
        wanted: Groups of the batch.
        group_size: Samples per group.
        limit: Extra rounds; 0 keeps every group of the first round, equal rewards or not.
    """
    result = Gathered()
    missing, drawn = wanted, 0
    for round_ in range(limit + 1):
        samples, scores = draw(missing, drawn)
        assert len(samples) == len(scores) == missing * group_size, "whole groups"
        result.all_samples += samples
        result.all_scores += scores
        result.extra_rounds = round_
        drawn += missing
        for first in range(0, len(samples), group_size):
            group = slice(first, first + group_size)
            if limit and not _teaches(samples[group], scores[group]):
                result.dropped_groups += 1
                continue
            result.samples += samples[group]
            result.scores += scores[group]
            missing -= 1
        if missing == 0:
            break
    result.missing_groups = missing
    return result


def _teaches(samples: Sequence[Sample], scores: Sequence[Score]) -> bool:
    rewards = [known_reward(s, score.value) for s, score in zip(samples, scores, strict=True)]
    return has_spread(np.array(rewards))
