"""Running a layer again: what the first pass keeps, and that every gradient arrives."""

from __future__ import annotations

import pytest
import torch

from glm_lora.arch.spec import TINY
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.batch import collate
from glm_lora.model.layer import DecoderLayer
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.stage import build_stage
from tests.model.weights import everything, load, random_base, random_factors, random_sequences


@pytest.fixture
def batch():
    return collate(random_sequences([6, 9, 3], TINY.vocab_size))


def stage_of(recompute, dropout=0.0):
    stage = build_stage(TINY, ParallelContext(), dtype=torch.float32, recompute=recompute)
    load(stage, random_base(TINY))
    adapters = attach_adapters(stage, everything(TINY, dropout=dropout), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    return stage, adapters


def loss(stage, batch):
    return stage(batch).sin().sum()


@pytest.fixture
def passes(monkeypatch):
    """For every pass over a layer, whether it built a graph."""
    seen = []
    both = DecoderLayer._both

    def counted(self, streams, batch):
        seen.append(torch.is_grad_enabled())
        return both(self, streams, batch)

    monkeypatch.setattr(DecoderLayer, "_both", counted)
    return seen


@pytest.mark.parametrize("kind", sorted(set(TINY.layer_types)))
def test_the_first_pass_builds_no_graph(batch, passes, kind):
    """Softmax attention that keeps its result needs one (tests/model/test_stage.py)."""
    stage, _ = stage_of("full")
    layer = stage.layers[TINY.layer_types.index(kind)]
    assert batch.shape[1] <= TINY.index_topk
    streams = torch.randn(batch.num_tokens, TINY.hc_mult, TINY.hidden_size)
    out = layer(streams, batch)
    assert passes == [False] and out.requires_grad, "the adapters alone ask for a gradient"
    out.sum().backward()
    assert passes == [False, True]
    assert streams.grad is None


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_can_be_asked_for_by_name_and_more_than_once(batch, dropout):
    """``backward`` and ``torch.autograd.grad`` give what a pass that keeps everything gives."""
    found = []
    for recompute in ("none", "full"):
        stage, adapters = stage_of(recompute, dropout)
        parameters = list(adapters.parameters().values())
        torch.manual_seed(3)
        value = loss(stage, batch)
        after = torch.get_rng_state()
        found.append(torch.autograd.grad(value, parameters, retain_graph=True))
        value.backward(retain_graph=True)
        value.backward()
        for parameter, grad in zip(parameters, found[-1], strict=True):
            assert torch.equal(parameter.grad, 2 * grad)
        assert torch.equal(torch.get_rng_state(), after), "the repetition draws nothing of its own"
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_without_anything_to_train_nothing_is_run_again(batch, passes):
    stage, adapters = stage_of("full")
    with adapters.enabled(False):
        assert not loss(stage, batch).requires_grad
    assert len(passes) == len(stage.layers) - 1, "the last layer is never run again"
