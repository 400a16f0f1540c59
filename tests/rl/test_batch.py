"""From samples and rewards to a batch: what stays, what goes, and that both are counted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from glm_lora.config import AlgorithmConfig
from glm_lora.protocols import AdapterRef, Finish, Sample
from glm_lora.rl.batch import has_signal, make_batch

GRPO = AlgorithmConfig()
REF = AdapterRef("policy", 4)


def sample(length: int = 3, finish: Finish = Finish.STOP, routed=None) -> Sample:
    return Sample((7, 8), tuple(range(length)), (-0.5,) * length, finish, REF, routed)


def build(samples, rewards, group, **options):
    algorithm = AlgorithmConfig(**options)
    return make_batch(samples, rewards, group, algorithm=algorithm, step=4, temperature=0.9)


def test_a_plain_rollout():
    routed = np.zeros((4, 1, 2), dtype=np.int16)
    samples = [sample(routed=routed), *(sample() for _ in range(3))]
    batch, report = build(samples, [1, 0, 1, 1], 2)
    assert (batch.step, batch.temperature) == (4, 0.9)
    assert report.kept == (0, 1, 2, 3)
    root = math.sqrt(0.5)
    assert [round(s.advantage, 12) for s in batch.samples] == [
        round(root, 12),
        -round(root, 12),
        0,
        0,
    ]
    assert all(s.loss_mask == (1, 1, 1) for s in batch.samples)
    assert all(s.rollout_logprobs == (-0.5,) * 3 and s.adapter == REF for s in batch.samples)
    assert batch.samples[0].routed_experts is routed
    assert (report.groups, report.zero_std_groups) == (2, 1)
    assert (
        report.unscored == report.aborted == report.empty == report.truncated == report.masked == 0
    )
    assert has_signal(batch)


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_missing_rewards_leave_the_group_and_are_counted(missing):
    batch, report = build([sample() for _ in range(4)], [1, missing, 0, missing], 4)
    assert report.kept == (0, 2) and report.unscored == 2
    root = math.sqrt(0.5)
    assert report.advantages.tolist() == pytest.approx([root, 0, -root, 0])
    assert all(math.isfinite(s.advantage) for s in batch.samples)


def test_aborted_samples_do_not_count_as_unscored():
    samples = [sample(), sample(finish=Finish.ABORT), sample()]
    _, report = build(samples, [1, 1, 0], 3)
    assert (report.kept, report.aborted, report.unscored) == ((0, 2), 1, 0)
    _, report = build(samples, [1, None, 0], 3)
    assert (report.aborted, report.unscored) == (1, 0)


def test_an_empty_response_counts_in_the_baseline_but_is_not_trained_on():
    samples = [sample(), sample(length=0), sample(), sample()]
    _, report = build(samples, [1, 0, 0, 0], 4)
    assert report.kept == (0, 2, 3) and report.empty == 1
    assert report.advantages[0] == pytest.approx((1 - 0.25) / np.std([1, 0, 0, 0], ddof=1))


def test_truncated_responses_are_kept_or_masked_by_option():
    samples = [sample(), sample(finish=Finish.LENGTH), sample(finish=Finish.LENGTH), sample()]
    kept, report = build(samples, [1, 0, 0, 1], 4)
    assert (report.truncated, report.masked) == (2, 0)
    assert all(all(s.loss_mask) for s in kept.samples)
    masked, report = build(samples, [1, 0, 0, 1], 4, truncated="mask")
    assert (report.truncated, report.masked) == (2, 2)
    assert [any(s.loss_mask) for s in masked.samples] == [True, False, False, True]
    assert [s.advantage for s in masked.samples] == [s.advantage for s in kept.samples]


@pytest.mark.parametrize(
    ("samples", "rewards", "group", "options"),
    [
        ([sample()] * 4, [1, 1, 1, 1], 4, {}),
        ([sample()] * 4, [None] * 4, 4, {}),
        ([sample()] * 4, [0, 1, 2, 3], 1, {}),
        ([sample(0)] * 4, [0, 1, 2, 3], 4, {}),
        ([sample(finish=Finish.LENGTH)] * 4, [0, 1, 2, 3], 4, {"truncated": "mask"}),
        ([sample(finish=Finish.ABORT)] * 4, [0, 1, 2, 3], 4, {}),
        ([], [], 4, {}),
    ],
    ids=["equal", "missing", "group of one", "empty", "all truncated", "aborted", "nothing"],
)
def test_batches_without_signal(samples, rewards, group, options):
    batch, report = build(samples, rewards, group, **options)
    assert not has_signal(batch)
    assert np.isfinite(report.advantages).all()
    assert not has_signal(build(samples, rewards, group, kl_coef=1.0, **options)[0])


def test_whole_groups_only():
    with pytest.raises(AssertionError, match="whole groups"):
        build([sample()] * 3, [0, 1, 0], 2)
    with pytest.raises(AssertionError, match="one reward per sample"):
        build([sample()] * 2, [0], 2)
