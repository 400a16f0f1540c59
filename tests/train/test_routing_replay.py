"""Routing replay: with other experts than the engine's, the difference falls to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm_lora.protocols import Request, SamplingParams, TrainBatch, TrainSample
from glm_lora.rollout.embedded import EmbeddedEngine
from tests.support import close
from tests.train.updates import gradients, randomise_b


@pytest.fixture
def disagreeing(make_worker, tiny):
    """A worker whose router prefers other experts, and samples with the engine's choices."""

    def build(recompute: str):
        worker = make_worker(parallel={"recompute": recompute}, rollout={"enable_r3": True})
        randomise_b(worker)
        state = worker.adapter()
        engine = EmbeddedEngine(
            tiny.hf_checkpoint, worker.selection, dtype=torch.float32, return_routed_experts=True
        )
        engine.push(state)
        requests = [
            Request((2 + d, 15, 17), SamplingParams(3, stop_token_ids=(1,), seed=d), 4)
            for d in range(10)
        ]
        made = engine.generate(requests, state.ref())
        # The bias only decides which experts run, not how they are weighted: the same as ties that
        # fall the other way.
        key = "model.language_model.layers.3.mlp.gate.e_score_correction_bias"
        bias = worker.stage.base_parameters()[key]
        bias.data.add_(torch.linspace(0, 1, bias.numel()))
        return worker, made

    return build


def batch_of(made, *, replay: bool) -> TrainBatch:
    return TrainBatch(
        tuple(
            TrainSample(
                s.prompt_ids,
                s.response_ids,
                s.logprobs,
                1.0 if i % 2 else -1.0,
                (1,) * len(s.response_ids),
                s.adapter,
                s.routed_experts if replay else None,
            )
            for i, s in enumerate(made)
        ),
        step=0,
    )


def difference(stats, batch: TrainBatch) -> float:
    pairs = zip(stats.logprobs, batch.samples, strict=True)
    return float(
        np.mean(np.concatenate([np.abs(a - np.array(s.rollout_logprobs)) for a, s in pairs]))
    )


@pytest.mark.parametrize("recompute", ["none", "full", "mlp"])
def test_replay_brings_the_difference_down_to_rounding(disagreeing, recompute):
    worker, made = disagreeing(recompute)
    own = batch_of(made, replay=False)
    assert difference(worker.step(own), own) > 1e-3, "the routers must disagree"
    worker, made = disagreeing(recompute)
    replayed = batch_of(made, replay=True)
    # Forward, recompute and backward all use the engine's experts: fp32 rounding is left.
    stats = worker.step(replayed)
    assert stats.applied and difference(stats, replayed) < 1e-5


def test_replayed_gradients_are_those_of_a_router_that_agrees(
    disagreeing, make_worker, monkeypatch
):
    worker, made = disagreeing("full")
    replayed = gradients(worker, batch_of(made, replay=True), monkeypatch)
    agreeing = make_worker(parallel={"recompute": "full"})
    randomise_b(agreeing)
    expected = gradients(agreeing, batch_of(made, replay=False), monkeypatch)
    for key, value in expected.items():
        close(replayed[key], value, "fp32 sums in another order", atol=1e-6, rtol=1e-4)
