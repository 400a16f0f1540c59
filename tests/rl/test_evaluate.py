"""Evaluation: the estimator against enumeration, and base and adapter on the real engine."""

from __future__ import annotations

import itertools

import pytest
import torch

from glm_lora.protocols import BASE, SamplingParams
from glm_lora.rl.data import Prompt
from glm_lora.rl.evaluate import compare, evaluate, pass_at_k
from glm_lora.rl.rewards import ExactReward, Score
from glm_lora.rollout.embedded import EmbeddedEngine
from tests.tiny_checkpoint import random_state, tiny_selection, write_checkpoint


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        outcomes = [True] * passed + [False] * (n - passed)
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def decode(ids):
    return " ".join(map(str, ids))


class LastTokenIsEven:
    """A real reward object whose answers can be counted by hand; one prompt is not scored."""

    def check_label(self, label):
        return None

    def score(self, answers):
        return [
            Score(None, reason="asked for") if a.label == "none" else Score(even(a.response))
            for a in answers
        ]

    def close(self):
        pass


def even(text: str) -> float:
    return float(int(text.split()[-1]) % 2 == 0) if text else 0.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("eval") / "tiny")
    engine = EmbeddedEngine(folder, tiny_selection(), dtype=torch.float32)
    engine.push(random_state(tiny_selection(), version=1))
    return engine


SAMPLING = SamplingParams(max_new_tokens=3, stop_token_ids=(1,))
PROMPTS = [Prompt((5, 6), "a", "1"), Prompt((7,), "b", "none"), Prompt((8, 9, 3), "c", "1")]


def test_numbers_are_those_counted_by_hand(engine):
    ref = random_state(tiny_selection(), version=1).ref()
    got = evaluate(
        engine, ref, PROMPTS, LastTokenIsEven(), decode, sampling=SAMPLING, samples_per_prompt=6
    )
    again = evaluate(
        engine, ref, PROMPTS, LastTokenIsEven(), decode, sampling=SAMPLING, samples_per_prompt=6
    )
    assert got == again
    assert got["eval/unscored"] == 6 and got["eval/prompts"] == 3
    assert {k for k in got if "pass@" in k} == {f"eval/pass@{k}" for k in (1, 2, 4, 6)}
    assert got["eval/raw_reward"] == pytest.approx(got["eval/pass@1"])
    passes = [got[f"eval/pass@{k}"] for k in (1, 2, 4, 6)]
    assert passes == sorted(passes) and 0 < passes[0] < passes[-1] <= 1
    assert 1 <= got["eval/response_length"] <= 3


def test_base_and_adapter_get_the_same_requests(engine):
    ref = random_state(tiny_selection(), version=1).ref()
    options = {"sampling": SAMPLING, "samples_per_prompt": 4, "seed": 3}
    both = compare(engine, ref, PROMPTS, ExactReward(), decode, **options)
    base = evaluate(engine, BASE, PROMPTS, ExactReward(), decode, **options)
    assert both["base"] == base and set(both) == {"base", "adapter"}
    zero = random_state(tiny_selection(), version=2, zero_b=True)
    engine.push(zero)
    same = compare(engine, zero.ref(), PROMPTS, ExactReward(), decode, **options)
    assert same["adapter"] == same["base"] == base
