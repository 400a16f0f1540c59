"""Our model against transformers in fp32: logits, log-probabilities, adapter gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.glm5_next import modeling_glm5_next

from glm_lora.lora.attach import attach_adapters
from glm_lora.model.batch import collate
from glm_lora.model.schedule import run_microbatches
from tests.model.reference import pair
from tests.model.specs import ALL
from tests.model.weights import everything, random_factors, random_sequences
from tests.support import close

LENGTHS = {
    "one": [1],
    "pair": [2, 2],
    "five": [5] * 3,
    "ragged": [1, 7, 4, 12, 9],
    "chunks": [33, 32, 40],
    "long": [70, 3, 64],
}
FP32 = "fp32 sums in another order; logits are of order 1"


@pytest.fixture(autouse=True)
def short_reference_chunks(monkeypatch):
    """Let transformers' own chunked delta rule run in chunks of 16.

    It subtracts cumulated log-decays, whose rounding grows with the chunk: in chunks of 64 its
    logits are 2e-5 away from the fp64 recurrence on these weights, ours 6e-6.
    """
    original = modeling_glm5_next.chunk_kimi_delta_attention
    monkeypatch.setattr(
        modeling_glm5_next,
        "chunk_kimi_delta_attention",
        functools.partial(original, chunk_size=16),
    )


def reference_inputs(batch):
    return {"input_ids": batch.tokens_B_L, "attention_mask": batch.mask_B_L.long()}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ALL)
def test_logits_equal_transformers(name, lengths):
    spec = ALL[name]
    model, stage = pair(spec)
    batch = collate(random_sequences(LENGTHS[lengths], spec.vocab_size))
    with torch.no_grad():
        want = model(**reference_inputs(batch)).logits
        got = stage.logits(stage(batch), batch)
    real = batch.mask_B_L
    assert want[real].abs().max() > 0.5
    close(got[real], want[real], FP32, atol=1e-5)


def test_the_indexer_leaves_tokens_out_in_these_configs():
    """Guards the parity tests above: without a selection they would prove nothing about it."""
    spec = ALL["short_index"]
    _, stage = pair(spec)
    batch = collate(random_sequences([70], spec.vocab_size))
    x, q = torch.randn(70, spec.hidden_size), torch.randn(70, spec.q_lora_rank)
    indexer = stage.layers[0].attention.block.indexer
    index = [part.unsqueeze(0) for part in indexer.project(x, q, batch)]
    seen = next(indexer.visible(*index, 0))[0]
    assert seen[-1].sum() == spec.index_topk + 70 % spec.index_kpool
    assert seen[:8].sum() == 36  # the first index_topk queries see every earlier token
    assert not seen.triu(1).any()


@pytest.mark.parametrize("lengths", ["five", "ragged", "long"])
@pytest.mark.parametrize("name", ALL)
def test_adapter_gradients_equal_peft(name, lengths):
    spec = ALL[name]
    reference, stage = pair(spec)
    selection = everything(spec)
    factors = random_factors(selection)
    batch = collate(random_sequences(LENGTHS[lengths], spec.vocab_size))
    generator = torch.Generator().manual_seed(11)
    weights = torch.randn(batch.shape[0], batch.shape[1] - 1, generator=generator)
    weights = weights * batch.mask_B_L[:, 1:]

    targets = "|".join(a.site.name.replace(".", r"\.") for a in selection.adapters)
    model = get_peft_model(
        copy.deepcopy(reference),
        LoraConfig(r=selection.rank, lora_alpha=selection.alpha, target_modules=f"({targets})"),
    )
    modules = dict(model.base_model.model.named_modules())
    with torch.no_grad():
        for a in selection.adapters:
            modules[a.site.name].lora_A["default"].weight.copy_(factors[a.a_key])
            modules[a.site.name].lora_B["default"].weight.copy_(factors[a.b_key])
    logits = model(**reference_inputs(batch)).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, batch.tokens_B_L[:, 1:, None]).squeeze(-1)
    (logprobs * weights).sum().backward()

    adapters = attach_adapters(stage, selection, seed=0)
    adapters.load_full(factors)
    outputs = run_microbatches(stage, [batch], lambda i, lp, entropy: (lp * weights).sum())
    real = batch.mask_B_L[:, 1:]
    close(outputs[0].logprobs[real], logprobs[real], FP32, atol=2e-5)
    for a in selection.adapters:
        for key, letter in ((a.a_key, "lora_A"), (a.b_key, "lora_B")):
            want = getattr(modules[a.site.name], letter)["default"].weight.grad
            got = adapters.parameters()[key].grad
            assert want.norm() > 0, key
            scale = want.abs().max().item()
            close(got, want, f"{key}: relative to its largest entry", atol=1e-4 * scale)
    for site in stage.linear_sites().values():
        site.adapter = None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_log_softmax(temperature):
    spec = ALL["four"]
    _, stage = pair(spec)
    batch = collate(random_sequences([6, 9, 2], spec.vocab_size))
    hidden = stage(batch).detach().requires_grad_()
    logits = stage.logits(hidden, batch)[:, :-1].float() / temperature
    want = logits.log_softmax(-1)
    real = batch.mask_B_L[:, 1:]
    want_lp = want.gather(-1, batch.tokens_B_L[:, 1:, None]).squeeze(-1) * real
    want_entropy = -(want.exp() * want).sum(-1) * real
    weight = torch.randn(real.shape)
    (want_grad,) = torch.autograd.grad(
        (want_lp * weight).sum() + 0.3 * (want_entropy * weight.cos()).sum(), hidden
    )
    lp, entropy = stage.token_logprobs(hidden, batch, temperature, with_entropy=True)
    (grad,) = torch.autograd.grad(
        (lp * weight).sum() + 0.3 * (entropy * weight.cos()).sum(), hidden
    )
    close(lp, want_lp, FP32, atol=1e-5)
    close(entropy, want_entropy, FP32, atol=1e-5)
    close(grad, want_grad, "fp32, analytic gradient", atol=1e-5)
