"""Advantages against the papers' formulas written out with plain Python."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_lora.errors import ConfigError
from glm_lora.rl.advantages import ADVANTAGES, group_advantages, has_spread
from tests.support import close

WHY = "fp64 arithmetic in another order"
rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def reference(values: list[float], kind: str) -> list[float]:
    mean = statistics.fmean(values)
    if kind == "grpo":
        return [(v - mean) / statistics.stdev(values) for v in values]
    if kind == "rloo":
        total = math.fsum(values)
        return [v - (total - v) / (len(values) - 1) for v in values]
    return [v - mean for v in values]


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@pytest.mark.parametrize(
    "values", [[0, 1], [1, 0, 0, 0, 0, 0, 0, 0], [0.5, -2, 3, 3], [1e-3, 0, 0], [1e6, -1e6, 5]]
)
def test_formula(kind, values):
    got = group_advantages(np.array(values, dtype=float), kind)
    close(got, reference([float(v) for v in values], kind), WHY, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@given(values=rewards)
def test_always_finite_and_without_bias(kind, values):
    got = group_advantages(np.array(values), kind)
    assert np.isfinite(got).all()
    close(
        got.sum(), 0.0, "the baseline cancels in the sum", atol=1e-9 * (1 + max(map(abs, values)))
    )
    assert has_spread(np.array(values)) == (len(set(values)) > 1) == bool((got != 0).any())


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 7, [math.nan], [math.nan, 2.0], [0.0, -0.0]])
def test_no_spread_gives_exact_zeros(kind, values):
    got = group_advantages(np.array(values), kind)
    assert got.tolist() == [0.0] * len(values)
    assert not has_spread(np.array(values))


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_a_missing_reward_leaves_the_others_alone(kind):
    known = np.array([1.0, 0.0, 0.5])
    got = group_advantages(np.array([1.0, math.nan, 0.0, 0.5]), kind)
    assert got[1] == 0
    assert got[[0, 2, 3]].tolist() == group_advantages(known, kind).tolist()


def test_grpo_is_invariant_to_scale_and_shift():
    values = np.array([0.0, 1.0, 1.0, 0.3])
    close(
        group_advantages(5 * values - 7, "grpo"), group_advantages(values, "grpo"), WHY, atol=1e-12
    )


def test_unknown_kind():
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        group_advantages(np.array([0.0, 1.0]), "gpro")
