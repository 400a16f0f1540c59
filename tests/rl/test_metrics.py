"""Metrics of a rollout and the gates on them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from glm_lora.config import AlgorithmConfig
from glm_lora.errors import TrainingError
from glm_lora.protocols import BASE, AdapterRef, Finish, Sample, TrainSample
from glm_lora.rl.batch import make_batch
from glm_lora.rl.metrics import (
    LOGPROB_DIFF,
    LOGPROB_NONFINITE,
    check_logprob_difference,
    health_lines,
    logprob_difference,
    rollout_metrics,
    staleness,
)
from glm_lora.rl.rewards import Score


def train_sample(logprobs) -> TrainSample:
    ids = (1,) * len(logprobs)
    return TrainSample((2,), ids, tuple(logprobs), 1.0, ids, AdapterRef("policy", 0))


def test_difference_is_a_token_mean():
    samples = [train_sample([-1.0]), train_sample([-1.0, -2.0, -3.0])]
    got = logprob_difference([np.array([-1.4]), np.array([-1.0, -2.1, -2.7])], samples)
    assert got[LOGPROB_DIFF] == pytest.approx((0.4 + 0.1 + 0.3) / 4)
    assert got[f"{LOGPROB_DIFF}_max"] == pytest.approx(0.4)
    assert got[LOGPROB_NONFINITE] == 0
    check_logprob_difference(got, 0.21, "float32")
    with pytest.raises(TrainingError, match=r"differ by 0\.2 nats.*at most 0\.19 in float32"):
        check_logprob_difference(got, 0.19, "float32")


def test_nan_is_counted_not_averaged_and_stops_the_run():
    samples = [train_sample([-1.0, math.nan, -2.0])]
    got = logprob_difference([np.array([-1.5, -1.0, -math.inf])], samples)
    assert got[LOGPROB_DIFF] == pytest.approx(0.5)
    assert got[LOGPROB_NONFINITE] == 2
    with pytest.raises(TrainingError, match="2 token log-probabilities"):
        check_logprob_difference(got, 1.0, "float32")
    nothing = logprob_difference([np.array([math.nan])], [train_sample([-1.0])])
    assert math.isnan(nothing[LOGPROB_DIFF])
    assert math.isnan(logprob_difference([], [])[LOGPROB_DIFF])


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_default_limits(dtype, limit):
    metrics = {LOGPROB_DIFF: limit * 0.99, LOGPROB_NONFINITE: 0.0}
    check_logprob_difference(metrics, None, dtype)
    with pytest.raises(TrainingError, match="MoE layers"):
        check_logprob_difference({**metrics, LOGPROB_DIFF: limit * 1.01}, None, dtype)


def sample(length: int, finish: Finish, version: int = 3) -> Sample:
    ids = (1,) * length
    return Sample((2,), ids, (-0.5,) * length, finish, AdapterRef("policy", version))


def test_rollout_metrics():
    samples = [
        sample(2, Finish.STOP),
        sample(4, Finish.LENGTH),
        sample(6, Finish.LENGTH, version=2),
        sample(0, Finish.ABORT),
    ]
    scores = [
        Score(1.0, {"accuracy": 1.0, "format": 1.0}),
        Score(0.0, {"accuracy": 0.0, "format": 1.0}),
        Score(None, reason="timed out"),
        Score(math.nan),
    ]
    _, report = make_batch(
        samples, [s.value for s in scores], 2, algorithm=AlgorithmConfig(), step=3
    )
    got = rollout_metrics(samples, scores, report, 3)
    expected = {
        "rollout/raw_reward": 0.5,
        "rollout/reward_std": 0.5,
        "rollout/reward_accuracy": 0.5,
        "rollout/reward_format": 1.0,
        "rollout/unscored": 1,
        "rollout/aborted": 1,
        "rollout/empty_responses": 0,
        "rollout/response_length": 3,
        "rollout/response_length_max": 6,
        "rollout/response_tokens": 12,
        "rollout/truncated_ratio": 0.5,
        "rollout/stop_ratio": 0.25,
        "rollout/groups": 2,
        "rollout/zero_std_groups": 1,
        "rollout/advantage_mean": 0,
        "rollout/advantage_nonzero": 2,
        "rollout/staleness_max": 1,
        "rollout/logprob_nonfinite": 0,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)
    assert all(isinstance(value, float) for value in got.values())


def test_nothing_scored_is_nan_not_zero():
    samples = [sample(1, Finish.STOP)] * 2
    scores = [Score(None), Score(None)]
    _, report = make_batch(samples, [None, None], 2, algorithm=AlgorithmConfig(), step=0)
    got = rollout_metrics(samples, scores, report, 0)
    assert math.isnan(got["rollout/raw_reward"]) and math.isnan(got["rollout/advantage_mean"])
    assert got["rollout/unscored"] == 2


def test_staleness_passes_over_the_base():
    base = Sample((2,), (1,), (-0.5,), Finish.STOP, BASE)
    assert staleness([base, sample(1, Finish.STOP, 5)], 7)["rollout/staleness"] == 2
    assert math.isnan(staleness([base], 7)["rollout/staleness"])


def test_health_lines_name_number_band_and_next_step():
    healthy = {LOGPROB_DIFF: 0.009, "train/ppo_kl": 2.6e-4, "train/grad_norm": 0.4}
    assert health_lines(healthy) == []
    lines = health_lines({LOGPROB_DIFF: 0.2, "train/grad_norm": math.nan, "rollout/unscored": 3.0})
    assert len(lines) == 3
    assert lines[0].startswith(f"{LOGPROB_DIFF} is 0.2; healthy is 0 to 0.03. Read ")
    assert "nan" in lines[1]
