"""Push and verify with the real embedded engine; faults are put between it and the check.

The trainer's side of each probe is plain transformers with W + alpha/r B A written out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from glm_lora.errors import RolloutError, SyncError
from glm_lora.protocols import BASE, AdapterRef, Receipt
from glm_lora.rollout.embedded import EmbeddedEngine
from glm_lora.sync.push import check_base, probe_tokens, push_and_verify, record_probe
from tests.merged_model import MergedModel
from tests.tiny_checkpoint import mixed_ranks, random_state, tiny_selection

TOKENS = (3, 5, 7, 11, 2, 9, 30, 4, 13)


class Trainer:
    """The reference, as a trainer answers: one function of tokens per adapter."""

    def __init__(self, base):
        self.model = MergedModel(base)

    def under(self, state):
        return lambda tokens: self.model.logprobs(tokens, state)


class Spoiled:
    """The real engine with one method replaced; remembers what was taken back."""

    def __init__(self, engine, **replaced):
        self._engine, self._replaced, self.discarded = engine, replaced, []

    def __getattr__(self, name):
        return self._replaced.get(name) or getattr(self._engine, name)

    def discard(self, ref):
        self.discarded.append(ref)


@pytest.fixture(scope="module")
def trainer(base):
    return Trainer(base)


@pytest.fixture(scope="module")
def engine(base):
    return EmbeddedEngine(base, tiny_selection(), dtype=torch.float32)


@pytest.fixture(scope="module")
def probe(engine):
    return record_probe(engine, TOKENS)


@pytest.fixture
def state():
    return random_state(tiny_selection(), version=3)


def test_a_good_push_reports_what_arrived(engine, probe, trainer, state):
    report = push_and_verify(state, engine, probe, trainer.under(state))
    assert report.receipt.ref == AdapterRef("policy", 3)
    assert report.receipt.digest == state.digest
    assert report.receipt.num_tensors == 86
    assert report.receipt.bytes == 4 * state.selection.trainable_parameters
    assert report.max_difference <= 1e-4, "two fp32 implementations of one model"
    assert report.metrics()["sync/bytes"] == report.receipt.bytes
    (served,) = engine.score([TOKENS], state.ref())
    assert np.abs(served - probe.base_logprobs).max() > 0.1


def test_zero_b_serves_the_base_and_passes(engine, probe, trainer):
    state = random_state(tiny_selection(), zero_b=True)
    report = push_and_verify(state, engine, probe, trainer.under(state))
    assert report.max_difference <= 1e-4
    check_base(engine, probe)


def test_versions_follow_each_other_and_the_base_stays(engine, probe, trainer):
    for version in (4, 5):
        state = random_state(tiny_selection(), version=version, seed=version)
        push_and_verify(state, engine, probe, trainer.under(state), name="other")
        with pytest.raises(RolloutError):
            engine.score([TOKENS], AdapterRef("other", version - 1))
    check_base(engine, probe)


def receipt(state, **changes):
    good = Receipt(state.ref(), state.digest, len(state.tensors), 1000, 0.1)
    return lambda s, name="policy": replace(good, **changes)


RECEIPTS = {
    "version": ({"ref": AdapterRef("policy", 2)}, "name and version"),
    "name": ({"ref": AdapterRef("p", 3)}, "name and version"),
    "digest": ({"digest": "0" * 64}, "digest"),
    "none accepted": ({"num_tensors": 0}, "number of tensors 0"),
    "one dropped": ({"num_tensors": 85}, "number of tensors 85"),
    "nothing sent": ({"bytes": 0}, "0 bytes"),
}


@pytest.mark.parametrize("case", RECEIPTS)
def test_a_receipt_for_something_else_is_refused_and_taken_back(engine, probe, state, case):
    changes, message = RECEIPTS[case]
    spoiled = Spoiled(engine, push=receipt(state, **changes))
    with pytest.raises(SyncError, match=message):
        push_and_verify(state, spoiled, probe, lambda tokens: probe.base_logprobs)
    assert spoiled.discarded == [state.ref()]


def test_an_engine_that_serves_the_base_is_found_out(engine, probe, trainer, state):
    def base_score(sequences, adapter):
        return engine.score(sequences, BASE)

    spoiled = Spoiled(engine, score=base_score)
    with pytest.raises(SyncError, match="exactly as its base"):
        push_and_verify(state, spoiled, probe, trainer.under(state))
    # Even where the effect is within the limit, bit-equality with the base gives it away.
    with pytest.raises(SyncError, match="exactly as its base model does"):
        push_and_verify(state, spoiled, probe, trainer.under(state), limit=100.0)


def test_an_engine_that_keeps_the_old_version_is_found_out(engine, probe, trainer, state):
    old = random_state(tiny_selection(), version=2, seed=20)
    engine.push(old)
    spoiled = Spoiled(engine, push=receipt(state), score=lambda s, ref: engine.score(s, old.ref()))
    with pytest.raises(SyncError, match="trainer and engine differ"):
        push_and_verify(state, spoiled, probe, trainer.under(state))


def test_swapped_factors_and_wrong_scale_are_found_out(engine, probe, trainer, state):
    half = {k: v * 0.5 if "lora_B" in k else v for k, v in state.tensors.items()}
    engine.push(replace(state, tensors=half))
    spoiled = Spoiled(engine, push=receipt(state))
    with pytest.raises(SyncError, match="trainer and engine differ"):
        push_and_verify(state, spoiled, probe, trainer.under(state))


def test_a_part_of_the_adapter_that_does_not_act_is_found_out(engine, probe, trainer, state):
    lost = {
        k: torch.zeros_like(v) if "f_a_proj.lora_B" in k else v for k, v in state.tensors.items()
    }
    engine.push(replace(state, tensors=lost))
    spoiled = Spoiled(engine, push=receipt(state))
    with pytest.raises(SyncError, match="trainer and engine differ"):
        push_and_verify(state, spoiled, probe, trainer.under(state))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full(len(TOKENS) - 1, np.nan, np.float32), "8 of 8 .* not finite"),
        (np.zeros(3, np.float32), r"\(3,\) log-probabilities"),
    ],
)
def test_answers_that_are_no_numbers_stop(engine, probe, trainer, state, values, message):
    spoiled = Spoiled(engine, score=lambda sequences, adapter: [values])
    with pytest.raises(SyncError, match=message):
        push_and_verify(state, spoiled, probe, trainer.under(state))


def test_engine_errors_become_sync_errors_and_a_failing_discard_is_only_noted(engine, probe, state):
    def dead(*args):
        raise RolloutError("connection reset")

    class Undiscardable(Spoiled):
        def discard(self, ref):
            raise RolloutError("still dead")

    spoiled = Undiscardable(engine, score=dead)
    with pytest.raises(SyncError, match="version 3 did not arrive: connection reset") as info:
        push_and_verify(state, spoiled, probe, lambda t: probe.base_logprobs)
    assert info.value.__notes__ == ["taking the adapter back failed too: still dead."]


def test_a_base_that_changed_is_found_out(engine, probe):
    moved = probe.base_logprobs.copy()
    moved[2] = np.nextafter(moved[2], 0)
    with pytest.raises(SyncError, match="no longer answers"):
        check_base(engine, replace(probe, base_logprobs=moved))
    check_base(engine, probe)


def test_nothing_is_sent_when_the_state_is_wrong(engine, probe, state):
    sent = []
    spoiled = Spoiled(engine, push=lambda *a: sent.append(a))
    tensors = dict(state.tensors)
    tensors[next(iter(tensors))] = torch.zeros(1)
    with pytest.raises(SyncError, match="misshapen"):
        push_and_verify(replace(state, tensors=tensors), spoiled, probe, lambda t: None)
    narrow = replace(engine.capabilities(), max_rank=2)
    with pytest.raises(SyncError, match="at most 2"):
        push_and_verify(state, spoiled, probe, lambda t: None, capabilities=narrow)
    assert sent == []


def test_probe_tokens_join_prompts_until_they_are_long_enough():
    prompts = [[4, 5], [1, 2, 3]]
    assert probe_tokens(prompts, length=2) == (1, 2)
    assert probe_tokens(prompts, [9], length=12) == (1, 2, 3, 9, 4, 5, 9, 1, 2, 3, 9, 4)
    assert probe_tokens([[4]]) == (4,) * 64


def test_probe_needs_two_tokens_and_finite_answers(engine):
    with pytest.raises(SyncError, match="at least 2"):
        record_probe(engine, (3,))
    nan = np.full(len(TOKENS) - 1, np.nan)
    with pytest.raises(SyncError, match="0 of them finite"):
        record_probe(Spoiled(engine, score=lambda s, a: [nan]), TOKENS)


def test_ranks_per_group_reach_the_engine(base, trainer):
    selection = mixed_ranks("kda")
    engine = EmbeddedEngine(base, selection, dtype=torch.float32)
    state = random_state(selection)
    report = push_and_verify(state, engine, record_probe(engine, TOKENS), trainer.under(state))
    assert report.max_difference <= 1e-4
