"""The training step against a plain computation of the same update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from glm_lora.errors import TrainingError
from glm_lora.protocols import AdapterRef, TrainBatch, TrainSample
from glm_lora.train import step as step_module
from tests.support import close
from tests.train.updates import gradients, randomise_b

ADAPTER = AdapterRef("policy", 0)


def samples(count: int = 12, seed: int = 0) -> tuple[TrainSample, ...]:
    """Random samples of several lengths, some of them equal in tokens but not in advantage."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        kind = rng.integers(0, 4)
        prompt = (2 + int(kind), 15, 17, *range(3, 3 + int(kind)))
        response = (5, 1) if i % 3 else (7, 6, 5, 1)
        made.append(
            TrainSample(
                prompt_ids=prompt,
                response_ids=response,
                rollout_logprobs=tuple(rng.uniform(-2, -0.1, len(response))),
                advantage=float(rng.normal()),
                loss_mask=(1,) * len(response),
                adapter=ADAPTER,
            )
        )
    return tuple(made)


def test_equal_samples_run_once_give_the_same_gradients(make_worker, monkeypatch):
    worker = make_worker()
    randomise_b(worker)
    batch = TrainBatch(samples(), 0)
    merged = gradients(worker, batch, monkeypatch)
    groups = worker._updater._equal_samples(batch.samples)
    assert len(groups) < len(batch.samples), "the batch must repeat for this test to say anything"
    one_by_one = lambda self, items: [[i] for i in range(len(items))]  # noqa: E731
    monkeypatch.setattr(step_module.Updater, "_equal_samples", one_by_one)
    separate = gradients(worker, batch, monkeypatch)
    for key, expected in separate.items():
        close(merged[key], expected, "fp32 sums in another order", atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_micro_batches_do_not_change_the_gradients(make_worker, monkeypatch, aggregation):
    batch = TrainBatch(samples(), 0)
    found = []
    for budget in (8192, 16):
        worker = make_worker(
            parallel={"max_tokens_per_gpu": budget}, algorithm={"loss_aggregation": aggregation}
        )
        randomise_b(worker)
        found.append(gradients(worker, batch, monkeypatch))
    for key, expected in found[0].items():
        close(found[1][key], expected, "fp32 sums in another order", atol=1e-6, rtol=1e-4)


def test_the_loss_is_the_policy_gradient(make_worker, monkeypatch):
    """On fresh samples the ratio is one: the gradient is that of -mean(advantage * logprob)."""
    worker = make_worker()
    randomise_b(worker)
    batch = TrainBatch(samples(), 0)
    actual = gradients(worker, batch, monkeypatch)
    tokens = sum(len(s.response_ids) for s in batch.samples)
    total = 0.0
    for sample in batch.samples:
        made = step_module.model_batch(worker.context, [(*sample.prompt_ids, *sample.response_ids)])
        logprobs, _ = worker.stage.token_logprobs(worker.stage(made), made)
        span = step_module.response_span(sample)
        total = total - sample.advantage * logprobs[0, span].sum() / tokens
    total.backward()
    for key, parameter in worker.adapters.parameters().items():
        close(actual[key], parameter.grad, "fp32 sums in another order", atol=1e-6, rtol=1e-4)


def test_nothing_moves_without_a_learning_signal(make_worker):
    worker = make_worker()
    before = worker.adapter().digest
    batch = TrainBatch(tuple(replace(s, advantage=0.0) for s in samples()), 0)
    stats = worker.step(batch)
    assert not stats.applied and len(stats.logprobs) == len(batch.samples)
    assert worker.adapter().digest == before
    assert worker.optimizer.applied_steps == 0
    assert worker.version == 1
    assert not worker.step(TrainBatch((), 1)).applied


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_not_applied(make_worker, bad):
    worker = make_worker()
    before = worker.adapter().digest
    first, *rest = samples()
    with pytest.raises(TrainingError, match="not applied"):
        worker.step(TrainBatch((replace(first, advantage=bad), *rest), 0))
    assert worker.adapter().digest == before
    assert worker.optimizer.applied_steps == 0


def test_stale_samples_take_the_ratio_to_the_engines_probabilities(make_worker, monkeypatch):
    worker = make_worker()
    fresh = TrainBatch(samples(), 0)
    stale = TrainBatch(fresh.samples, 1)
    assert stale.stale and not fresh.stale
    a, b = (gradients(worker, batch, monkeypatch) for batch in (fresh, stale))
    assert any(not torch.equal(a[key], b[key]) for key in a)


def test_a_changed_base_is_found(make_worker):
    worker = make_worker()
    assert worker.verify_base() == worker.verify_base()
    table = worker.stage.base_parameters()
    with torch.no_grad():
        next(iter(table.values())).view(-1)[3] += 1e-3
    with pytest.raises(TrainingError, match="base changed"):
        worker.verify_base()


def test_offload_and_onload_bring_everything_back_bit_for_bit(make_worker):
    worker = make_worker()
    randomise_b(worker)
    worker.step(TrainBatch(samples(), 0))
    base, adapter = worker.verify_base(), worker.adapter().digest
    moments = {k: v.clone() for k, v in worker.optimizer.moments().items()}
    for _ in range(2):
        out = worker.offload()
        assert out["offload/bytes_freed"] > 0
        assert all(s.nbytes() == 0 for s in worker.stage.base_storages())
        worker.onload()
    assert worker.verify_base() == base and worker.adapter().digest == adapter
    assert all(torch.equal(v, moments[k]) for k, v in worker.optimizer.moments().items())
    assert worker.step(TrainBatch(samples(seed=1), 1)).applied


def test_the_base_is_copied_to_the_host_once(make_worker):
    worker = make_worker()
    first = worker.offload()["offload/bytes_to_host"]
    worker.onload()
    second = worker.offload()["offload/bytes_to_host"]
    worker.onload()
    base = sum(s.nbytes() for s in worker.stage.base_storages())
    assert first - second >= base > 0
