"""Dynamic sampling: what is replaced, what is counted, and that it ends."""

from __future__ import annotations

import pytest

from glm_lora.protocols import AdapterRef, Finish, Sample
from glm_lora.rl.dynamic import gather
from glm_lora.rl.rewards import Score

SAMPLE = Sample((1,), (2,), (-0.1,), Finish.STOP, AdapterRef("policy", 0))


def drawing(groups, calls):
    """Deals the reward groups in order and notes how it was asked."""
    source = iter(groups)

    def draw(count, first):
        calls.append((count, first))
        dealt = [next(source) for _ in range(count)]
        scores = [Score(r) for group in dealt for r in group]
        return [SAMPLE] * len(scores), scores

    return draw


def test_equal_groups_are_replaced():
    calls = []
    groups = [(1, 1), (0, 1), (0, 0), (1, 0), (None, 1), (1, 0)]
    got = gather(drawing(groups, calls), wanted=3, group_size=2, limit=5)
    assert calls == [(3, 0), (2, 3), (1, 5)]
    assert [s.value for s in got.scores] == [0, 1, 1, 0, 1, 0]
    assert len(got.samples) == 6 and len(got.all_samples) == len(got.all_scores) == 12
    assert got.metrics() == {
        "rollout/dynamic_extra_rounds": 2,
        "rollout/dynamic_dropped_groups": 3,
        "rollout/dynamic_missing_groups": 0,
    }


def test_it_ends_at_the_limit():
    calls = []
    got = gather(drawing([(1, 1)] * 100, calls), wanted=4, group_size=2, limit=3)
    assert calls == [(4, 0), (4, 4), (4, 8), (4, 12)]
    assert (got.samples, got.dropped_groups, got.missing_groups) == ([], 16, 4)


def test_no_limit_keeps_every_group():
    calls = []
    got = gather(drawing([(1, 1), (0, 1)], calls), wanted=2, group_size=2, limit=0)
    assert calls == [(2, 0)] and len(got.samples) == 4
    assert (got.dropped_groups, got.missing_groups, got.extra_rounds) == (0, 0, 0)


@pytest.mark.parametrize("rewards", [(None, None), (float("nan"), 1), (3,)])
def test_groups_without_two_known_rewards_teach_nothing(rewards):
    got = gather(drawing([rewards] * 9, []), wanted=1, group_size=len(rewards), limit=2)
    assert got.missing_groups == 1 and got.dropped_groups == 3
