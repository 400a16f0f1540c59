"""The policy loss against the papers' formulas in plain Python, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from glm_lora.config import AlgorithmConfig
from glm_lora.errors import ConfigError
from glm_lora.protocols import AdapterRef, TrainSample
from glm_lora.rl.loss import kl_k3, loss_denominator, policy_loss, token_weights
from tests.support import close

WHY = "fp32 sums of about 20 terms"
LENGTHS = (5, 1, 7, 3)
LIMIT = 9


def make(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def logp():
        return -3 * torch.rand(len(LENGTHS), max(LENGTHS), generator=generator)

    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = True
    advantage = torch.tensor([1.5, -0.7, -2.0, 0.0])
    return {
        "logprobs_BT": logp(),
        "old_logprobs_BT": logp(),
        "rollout_logprobs_BT": logp(),
        "reference_logprobs_BT": logp(),
        "entropy_BT": -logp(),
        "advantage_B": advantage,
        "mask_BT": mask,
    }


def token_loss(x, row, t, cfg) -> float:
    """Objective of one token, straight from the formulas, with the sign turned."""
    new, old = float(x["logprobs_BT"][row, t]), float(x["old_logprobs_BT"][row, t])
    a = float(x["advantage_B"][row])
    ratio = math.exp(new - old)
    objective = min(ratio * a, min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high) * a)
    if cfg.dual_clip and a < 0:
        objective = max(objective, cfg.dual_clip * a)
    if cfg.importance_cap:
        engine = float(x["rollout_logprobs_BT"][row, t])
        objective *= min(math.exp(old - engine), cfg.importance_cap)
    delta = float(x["reference_logprobs_BT"][row, t]) - new
    kl = math.exp(delta) - delta - 1
    return -objective + cfg.kl_coef * kl - cfg.entropy_coef * float(x["entropy_BT"][row, t])


CASES = {
    "clip-higher": {},
    "symmetric clip": {"clip_low": 0.1, "clip_high": 0.1},
    "dual clip": {"dual_clip": 1.5},
    "kl": {"kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.1},
    "importance": {"importance_cap": 1.2},
    "all": {"dual_clip": 3.0, "kl_coef": 0.05, "entropy_coef": 0.01, "importance_cap": 2.0},
}


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
@pytest.mark.parametrize("case", CASES)
def test_sum_equals_the_formula(case, aggregation):
    cfg = AlgorithmConfig(loss_aggregation=aggregation, **CASES[case])
    x = make()
    got = policy_loss(algorithm=cfg, length_limit=LIMIT, **x)
    expected = 0.0
    for row, length in enumerate(LENGTHS):
        weight = {"token-mean": 1, "sequence-mean": 1 / length, "constant": 1 / LIMIT}[aggregation]
        expected += weight * sum(token_loss(x, row, t, cfg) for t in range(length))
    close(got.loss, expected, WHY, rtol=1e-5)
    assert int(got.tokens) == sum(LENGTHS)


def test_gradient_of_one_update_is_the_policy_gradient():
    """At ratio 1 the gradient of the sum is minus the advantage of each counted token."""
    x = make()
    logprobs = x["logprobs_BT"].requires_grad_()
    got = policy_loss(logprobs, x["advantage_B"], x["mask_BT"], AlgorithmConfig())
    got.loss.backward()
    close(logprobs.grad, -x["advantage_B"][:, None] * x["mask_BT"], "exact products")


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_the_split_into_micro_batches_does_not_matter(aggregation):
    cfg = AlgorithmConfig(loss_aggregation=aggregation, kl_coef=0.1)
    x = make(1)
    whole = policy_loss(algorithm=cfg, length_limit=LIMIT, **x)
    parts = [
        policy_loss(algorithm=cfg, length_limit=LIMIT, **{k: v[rows] for k, v in x.items()})
        for rows in (slice(0, 1), slice(1, 4))
    ]
    close(sum(p.loss for p in parts), whole.loss, WHY, rtol=1e-6)
    for name, value in whole.sums.items():
        close(sum(p.sums[name] for p in parts), value, name, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e9])
def test_padding_reaches_neither_value_nor_gradient(bad):
    cfg = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.1, importance_cap=2.0)
    clean, dirty = make(), make()
    for name, value in dirty.items():
        if name.endswith("_BT") and name != "mask_BT":
            value[~dirty["mask_BT"]] = bad
    a, b = clean["logprobs_BT"].requires_grad_(), dirty["logprobs_BT"].requires_grad_()
    one, two = policy_loss(algorithm=cfg, **clean), policy_loss(algorithm=cfg, **dirty)
    assert torch.equal(one.loss, two.loss)
    assert {k: float(v) for k, v in one.sums.items()} == {k: float(v) for k, v in two.sums.items()}
    one.loss.backward()
    two.loss.backward()
    assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_an_absurd_token_stays_finite():
    x = make()
    x["logprobs_BT"][0, 0] = 0.0
    x["old_logprobs_BT"][0, 0] = x["rollout_logprobs_BT"][0, 0] = -1e4
    x["reference_logprobs_BT"][1, 0] = -1e4
    cfg = AlgorithmConfig(kl_coef=0.1, importance_cap=5.0)
    logprobs = x["logprobs_BT"].requires_grad_()
    got = policy_loss(algorithm=cfg, **x)
    got.loss.backward()
    assert math.isfinite(got.loss.item()) and torch.isfinite(logprobs.grad).all()


def test_everything_masked_gives_zero():
    x = make()
    x["mask_BT"] = torch.zeros_like(x["mask_BT"])
    for aggregation in ("token-mean", "sequence-mean", "constant"):
        cfg = AlgorithmConfig(loss_aggregation=aggregation)
        got = policy_loss(algorithm=cfg, length_limit=LIMIT, **x)
        assert got.loss == 0 and got.tokens == 0


def test_metric_sums():
    x = make(2)
    mask = x["mask_BT"]
    got = policy_loss(algorithm=AlgorithmConfig(importance_cap=1.1), **x).sums
    delta = (x["logprobs_BT"] - x["old_logprobs_BT"])[mask].double()
    close(got["ppo_kl"], -delta.sum(), WHY, rtol=1e-5, atol=1e-5)
    a = x["advantage_B"][:, None].expand_as(mask)[mask]
    ratio = delta.exp()
    outside = ((a > 0) & (ratio > 1.28)) | ((a < 0) & (ratio < 0.8))
    assert 0 < int(outside.sum()) == int(got["clip_fraction"])
    weight = (x["old_logprobs_BT"] - x["rollout_logprobs_BT"])[mask].double().exp()
    close(got["importance_weight"], weight.clamp(max=1.1).sum(), WHY, rtol=1e-5)
    assert int(got["importance_capped"]) == int((weight > 1.1).sum())
    close(got["entropy"], x["entropy_BT"][mask].sum(), WHY, rtol=1e-5)


def test_k3_is_an_unbiased_estimate_that_is_never_negative():
    generator = torch.Generator().manual_seed(0)
    p = torch.log_softmax(torch.randn(30, generator=generator).double(), -1)
    q = torch.log_softmax(torch.randn(30, generator=generator).double(), -1)
    k3 = kl_k3(p, q)
    assert (k3 >= 0).all()
    close((p.exp() * k3).sum(), (p.exp() * (p - q)).sum(), "expectation over p", rtol=1e-9)


def sample(length: int, masked: bool = False) -> TrainSample:
    mask = (0 if masked else 1,) * length
    return TrainSample((1,), (2,) * length, (-1.0,) * length, 1.0, mask, AdapterRef("a", 0))


def test_the_denominator_counts_what_the_mask_keeps():
    samples = [sample(4), sample(6, masked=True), sample(2)]
    assert loss_denominator(samples, "token-mean") == 6
    assert loss_denominator(samples, "sequence-mean") == 2
    assert loss_denominator(samples, "constant") == 2
    assert loss_denominator([sample(3, masked=True)], "token-mean") == 0


def test_missing_inputs_and_names_are_refused():
    x = make()
    for name in ("kl_coef", "entropy_coef", "importance_cap"):
        with pytest.raises(ConfigError, match=name):
            policy_loss(
                x["logprobs_BT"],
                x["advantage_B"],
                x["mask_BT"],
                AlgorithmConfig(**{name: 0.5}),
            )
    with pytest.raises(ConfigError, match="length limit None"):
        token_weights(x["mask_BT"], "constant")
    with pytest.raises(ConfigError, match="unknown loss aggregation"):
        token_weights(x["mask_BT"], "mean")
