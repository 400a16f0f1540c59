"""The embedded engine against transformers + PEFT used the plain way: full forward passes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Glm5NextForConditionalGeneration

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.errors import CheckpointError, RolloutError, SyncError, TargetError
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.protocols import BASE, AdapterRef, Finish, Request, RolloutEngine, SamplingParams
from glm_lora.rollout import embedded
from glm_lora.rollout.embedded import EmbeddedEngine
from glm_lora.rollout.peft_policy import cache_argument
from glm_lora.targets.selection import make_selection
from tests.support import close
from tests.tiny_checkpoint import random_state, tiny_selection

CACHED = "cached, padded and chunked passes reorder fp32 sums over 4 layers of width 64"
SELECTION = tiny_selection()


@pytest.fixture(scope="module")
def engine(base):
    engine = EmbeddedEngine(base, SELECTION, dtype=torch.float32, return_routed_experts=True)
    yield engine
    engine.close()


@pytest.fixture
def state(engine):
    state = random_state(SELECTION, version=3)
    engine.push(state)
    return state


def reference_model(checkpoint, state) -> PeftModel:
    """Stock PEFT: its own target matching, the adapter written key by key."""
    base = Glm5NextForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    names = [a.site.name for a in state.selection.adapters]
    rank, alpha = state.selection.rank, int(state.selection.alpha)
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=names))
    parameters = dict(model.named_parameters())
    loaded = 0
    with torch.no_grad():
        for adapter in state.selection.adapters:
            prefix = f"base_model.model.{adapter.site.name}"
            parameters[f"{prefix}.lora_A.default.weight"].copy_(state.tensors[adapter.a_key])
            parameters[f"{prefix}.lora_B.default.weight"].copy_(state.tensors[adapter.b_key])
            loaded += 2
    assert loaded == len(state.tensors) == sum("lora_" in name for name in parameters)
    return model.eval()


def reference_logprobs(model, ids, temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def prompts(lengths, seed: int = 0):
    generator = np.random.default_rng(seed)
    return [tuple(generator.integers(2, TINY.vocab_size, n).tolist()) for n in lengths]


def request(ids, n=2, tokens=6, temperature=1.0, stops=(1,), seed=0) -> Request:
    return Request(ids, SamplingParams(tokens, temperature, stops, seed), n)


MIXED = [
    request(ids, n=n, tokens=tokens, temperature=temperature, stops=stops, seed=i)
    for i, (ids, n, tokens, temperature, stops) in enumerate(
        zip(
            prompts((1, 5, 9, 17)),
            (3, 1, 4, 2),
            (1, 12, 7, 20),
            (1.0, 0.7, 1.3, 1.0),
            ((1,), (1, 5, 9), (), tuple(range(0, 32, 2))),
            strict=True,
        )
    )
]


def test_it_is_a_rollout_engine(engine):
    assert isinstance(engine, RolloutEngine)
    what = engine.capabilities()
    assert (what.engine, what.dtype, what.max_rank) == ("embedded", "float32", SELECTION.rank)
    assert what.target_leaves == {a.site.leaf for a in SELECTION.adapters}
    assert what.routed_experts


def test_logprobs_of_samples_equal_full_forward_passes(engine, state, base):
    model = reference_model(base, state)
    samples = engine.generate(MIXED, state.ref())
    origin = [r for r in MIXED for _ in range(r.n)]
    for sample, asked in zip(samples, origin, strict=True):
        assert sample.prompt_ids == asked.prompt_ids
        full = reference_logprobs(
            model, sample.prompt_ids + sample.response_ids, asked.sampling.temperature
        )
        close(sample.logprobs, full[len(sample.prompt_ids) - 1 :], CACHED, atol=2e-5)


def test_stops_limits_and_versions(engine, state):
    samples = engine.generate(MIXED, state.ref())
    origin = [r for r in MIXED for _ in range(r.n)]
    finishes = set()
    for sample, asked in zip(samples, origin, strict=True):
        stops = asked.sampling.stop_token_ids
        finishes.add(sample.finish)
        assert sample.adapter == AdapterRef("policy", 3)
        assert len(sample.logprobs) == len(sample.response_ids)
        assert not any(token in stops for token in sample.response_ids[:-1])
        if sample.finish is Finish.STOP:
            assert sample.response_ids[-1] in stops
        else:
            assert len(sample.response_ids) == asked.sampling.max_new_tokens
            assert sample.response_ids[-1] not in stops
    assert finishes == {Finish.STOP, Finish.LENGTH}


def test_score_equals_full_forward_passes(engine, state, base):
    sequences = [*prompts((1, 2, 30, 7, 64), seed=5)]
    model = reference_model(base, state)
    for scored, ids in zip(engine.score(sequences, state.ref()), sequences, strict=True):
        close(scored, reference_logprobs(model, ids), CACHED, atol=2e-5)
    with model.disable_adapter():
        for scored, ids in zip(engine.score(sequences, BASE), sequences, strict=True):
            close(scored, reference_logprobs(model, ids), CACHED, atol=2e-5)


def test_samples_follow_the_distribution(engine, state):
    ids = prompts((4,))[0]
    count = 4096
    samples = engine.generate([request(ids, n=count, tokens=1, seed=11)], state.ref())
    seen = np.bincount([s.response_ids[0] for s in samples], minlength=TINY.vocab_size)
    sequences = [(*ids, token) for token in range(TINY.vocab_size)]
    p = np.exp([scored[-1] for scored in engine.score(sequences, state.ref())])
    close(p.sum(), 1.0, "a distribution over the whole vocabulary", atol=1e-5)
    sigma = np.sqrt(count * p * (1 - p))
    assert (np.abs(seen - count * p) < 5 * sigma + 1).all(), (seen, count * p)


def test_a_request_does_not_depend_on_its_batch_or_its_place(engine, state, monkeypatch):
    together = engine.generate(MIXED, state.ref())
    backwards = engine.generate(MIXED[::-1], state.ref())
    monkeypatch.setattr(embedded, "MAX_ROWS", 4)
    split = engine.generate(MIXED, state.ref())
    alone = [s for r in MIXED for s in engine.generate([r], state.ref())]
    starts = np.cumsum([0, *(r.n for r in MIXED[::-1])])
    blocks = [backwards[a:b] for a, b in itertools.pairwise(starts)]
    reordered = [s for block in blocks[::-1] for s in block]
    for other in (split, alone, reordered):
        assert [s.response_ids for s in other] == [s.response_ids for s in together]
        for a, b in zip(other, together, strict=True):
            close(a.logprobs, b.logprobs, CACHED, atol=2e-5)
    reseeded = [replace(r, sampling=replace(r.sampling, seed=99)) for r in MIXED]
    again = engine.generate(reseeded, state.ref())
    assert [s.response_ids for s in again] != [s.response_ids for s in together]


def test_more_samples_keep_the_first_ones(engine, state):
    ids = prompts((6,))[0]
    few = engine.generate([request(ids, n=3, seed=4)], state.ref())
    many = engine.generate([request(ids, n=9, seed=4)], state.ref())
    assert [s.response_ids for s in many[:3]] == [s.response_ids for s in few]
    assert len({s.response_ids for s in many}) > 1


def test_base_is_the_model_without_adapter(engine, state):
    sequence = prompts((12,))
    base = engine.score(sequence, BASE)[0]
    assert np.abs(engine.score(sequence, state.ref())[0] - base).max() > 0.01
    zero = random_state(SELECTION, version=4, zero_b=True)
    engine.push(zero)
    close(engine.score(sequence, zero.ref())[0], base, "B = 0 adds exact zeros")
    assert all(s.adapter == BASE for s in engine.generate([request(sequence[0])], BASE))


def test_every_site_acts(engine, state):
    """Each A, B pair changes the scores: no name is translated to nowhere."""
    sequence = prompts((12,))
    full = engine.score(sequence, state.ref())[0]
    for adapter in SELECTION.adapters:
        tensors = dict(state.tensors)
        tensors[adapter.b_key] = torch.zeros_like(tensors[adapter.b_key])
        engine.push(replace(state, tensors=tensors))
        assert np.abs(engine.score(sequence, state.ref())[0] - full).max() > 1e-5, adapter.site.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_receipt_is_the_receivers_own(engine, dtype):
    state = random_state(SELECTION, version=8, seed=2, dtype=dtype)
    receipt = engine.push(state, "other")
    assert receipt.ref == AdapterRef("other", 8)
    assert receipt.digest == state.digest == fingerprint_tensors(state.tensors)
    assert receipt.num_tensors == 2 * SELECTION.num_sites
    assert receipt.bytes == sum(t.numel() * t.element_size() for t in state.tensors.values())
    # What lies in the engine is a copy: a later change of the sender's tensors does not reach it.
    first = next(iter(state.tensors.values()))
    before = engine._policy.adapter_tensors()
    first.add_(1)
    assert fingerprint_tensors(before) == receipt.digest


def test_a_bad_push_is_refused_and_the_old_adapter_stays(engine, state):
    sequence = prompts((12,))
    before = engine.score(sequence, state.ref())[0]
    dropped = dict(list(state.tensors.items())[:-1])
    key = next(iter(state.tensors))
    turned = {**state.tensors, key: state.tensors[key].T.contiguous()}
    renamed = {k.replace("lora_B", "lora_C"): v for k, v in state.tensors.items()}
    for tensors in (dropped, turned, renamed, {}):
        with pytest.raises(SyncError, match="expected"):
            engine.push(replace(state, tensors=tensors, version=9))
    other = tiny_selection(rank=2)
    with pytest.raises(SyncError, match="at rank 2"):
        engine.push(random_state(other, version=9))
    close(engine.score(sequence, state.ref())[0], before, "nothing moved")
    with pytest.raises(RolloutError, match="version 9 was asked for but the engine holds"):
        engine.score(sequence, AdapterRef("policy", 9))


def test_only_the_loaded_version_is_served(base):
    engine = EmbeddedEngine(base, SELECTION, dtype=torch.float32)
    asked = [request(prompts((3,))[0])]
    with pytest.raises(RolloutError, match="holds no adapter"):
        engine.generate(asked, AdapterRef("policy", 0))
    assert len(engine.generate(asked, BASE)) == 2
    engine.push(random_state(SELECTION, version=1))
    engine.push(random_state(SELECTION, version=2))
    for wrong in (AdapterRef("policy", 1), AdapterRef("policy", 3), AdapterRef("other", 2)):
        with pytest.raises(RolloutError, match="was asked for but the engine holds"):
            engine.generate(asked, wrong)
    assert len(engine.generate(asked, AdapterRef("policy", 2))) == 2
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate(asked, BASE)


def test_a_released_engine_serves_nothing_until_it_is_resumed(engine, state):
    asked = [request(prompts((3,))[0])]
    before = engine.generate(asked, state.ref())
    engine.release()
    with pytest.raises(RolloutError, match="released"):
        engine.generate(asked, state.ref())
    with pytest.raises(RolloutError, match="released"):
        engine.score([(2, 3)], BASE)
    engine.push(state)
    engine.resume()
    again = engine.generate(asked, state.ref())
    assert [(s.response_ids, s.logprobs) for s in again] == [
        (s.response_ids, s.logprobs) for s in before
    ]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request(()), "empty"),
        (request((2, 32)), "outside"),
        (request((2, -1)), "outside"),
        (request((2,), n=0), "n is 0"),
        (request((2,), tokens=0), "max_new_tokens 0"),
        (request((2,), temperature=0.0), "temperature"),
        (request((2,), temperature=float("nan")), "temperature"),
    ],
)
def test_bad_requests(engine, bad, why):
    with pytest.raises(RolloutError, match=why):
        engine.generate([bad], BASE)
    with pytest.raises(RolloutError, match="empty sequence"):
        engine.score([[]], BASE)


def test_a_broken_adapter_is_noticed(engine, state):
    key = next(k for k in state.tensors if "lora_B" in k)
    tensors = {**state.tensors, key: torch.full_like(state.tensors[key], float("nan"))}
    engine.push(replace(state, tensors=tensors))
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate([request((2, 3))], state.ref())


def test_routed_experts_are_those_of_a_full_forward_pass(engine, state, base):
    model = reference_model(base, state)
    for sample in engine.generate(MIXED, state.ref()):
        ids = (sample.prompt_ids + sample.response_ids)[:-1]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
        # The correction bias of a fresh checkpoint is zero, so the largest logits are the choice.
        expected = torch.stack([x.view(len(ids), -1).topk(2).indices for x in logits], dim=1)
        routed = sample.routed_experts
        assert routed is not None and routed.dtype == np.int16
        assert routed.shape == (len(ids), 1, TINY.num_experts_per_tok)
        assert np.array_equal(np.sort(routed), np.sort(expected.numpy()))


def test_routing_is_recorded_only_when_asked(base):
    engine = EmbeddedEngine(base, SELECTION, dtype=torch.float32)
    assert engine.generate([request((2, 3))], BASE)[0].routed_experts is None


def test_bf16_keeps_what_must_stay_fp32(base):
    engine = EmbeddedEngine(base, SELECTION, dtype=torch.bfloat16)
    kept = {
        name.rsplit(".", 1)[-1]
        for name, tensor in engine._policy._peft.get_base_model().named_parameters()
        if tensor.dtype == torch.float32 and "lora_" not in name
    }
    assert {"A_log", "dt_bias", "base", "scale"} <= kept
    state = random_state(SELECTION, version=1)
    assert engine.push(state).digest == state.digest
    assert engine.capabilities().dtype == "bfloat16"
    sample = engine.generate([request(prompts((5,))[0], tokens=8, stops=())], state.ref())[0]
    scored = engine.score([sample.prompt_ids + sample.response_ids], state.ref())[0]
    close(sample.logprobs, scored[4:], "bf16 activations through 4 layers", atol=0.1)


def test_sites_may_have_ranks_of_their_own(base):
    sites = trainable_sites(TINY)
    ranks = {s.disk_name: 2 for s in sites if s.leaf in ("q_proj", "f_a_proj")}
    selection = make_selection("tiny", TINY, sites, rank=4, alpha=8, ranks=ranks)
    uniform = tiny_selection(rank=4)
    state = random_state(selection, version=1)
    padded = {}
    for key, shape in uniform.tensor_shapes().items():
        padded[key] = torch.zeros(shape)
        own = state.tensors[key]
        padded[key][: own.shape[0], : own.shape[1]] = own
    sequence = prompts((12,))
    one = EmbeddedEngine(base, selection, dtype=torch.float32)
    two = EmbeddedEngine(base, uniform, dtype=torch.float32)
    one.push(state)
    two.push(replace(state, selection=uniform, tensors=padded))
    close(
        one.score(sequence, state.ref())[0],
        two.score(sequence, state.ref())[0],
        "rank 2 at alpha/rank 2 is rank 4 padded with zeros at the same alpha/rank",
        atol=1e-5,
    )


def test_construction_errors(base, tmp_path):
    other = replace(TINY, hidden_size=128)
    with pytest.raises(TargetError, match="the selection was made for"):
        EmbeddedEngine(base, tiny_selection(other), dtype=torch.float32)
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        EmbeddedEngine(tmp_path, SELECTION, dtype=torch.float32)
    data = (base / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        EmbeddedEngine(tmp_path, SELECTION, dtype=torch.float32)


def test_a_checkpoint_without_a_weight_is_refused(base, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    del tensors["model.language_model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no usable weight"):
        EmbeddedEngine(tmp_path, SELECTION, dtype=torch.float32)


def test_the_cache_goes_by_the_name_that_this_transformers_knows():
    """transformers renamed it; under a name it does not know, every token forgets those before."""

    class Older(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None, **kwargs):
            return input_ids

    class Newer(torch.nn.Module):
        def forward(self, input_ids, cache=None, **kwargs):
            return input_ids

    class Other(torch.nn.Module):
        def forward(self, input_ids, **kwargs):
            return input_ids

    assert cache_argument(Older()) == "past_key_values"
    assert cache_argument(Newer()) == "cache"
    with pytest.raises(RolloutError, match="takes no cache"):
        cache_argument(Other())
