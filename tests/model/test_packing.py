"""Packed batches: each sequence as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm_lora.lora.attach import attach_adapters
from glm_lora.model.batch import by_sequence, collate, pack
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import build_stage
from tests.model.specs import ALL
from tests.model.weights import everything, load, random_base, random_factors, random_sequences
from tests.support import close

LENGTHS = [9, 9, 1, 70, 4, 33]


def adapted(spec, seed=5):
    stage = build_stage(spec, ParallelContext(), dtype=torch.float32)
    load(stage, random_base(spec))
    selection = everything(spec)
    adapters = attach_adapters(stage, selection, seed=0)
    adapters.load_full(random_factors(selection, seed))
    return stage, adapters


@pytest.mark.parametrize("name", ALL)
def test_logprobs_and_gradients_equal_padded_ones(name):
    spec = ALL[name]
    stage, adapters = adapted(spec)
    sequences = random_sequences(LENGTHS, spec.vocab_size)
    results = []
    for batch in (collate(sequences), pack(sequences)):
        adapters.zero_grad()
        (out,) = run_microbatches(
            stage, [batch], lambda i, lp, h: lp.sum() + 0.3 * h.sum(), with_entropy=True
        )
        grads = {k: p.grad.clone() for k, p in adapters.parameters().items()}
        results.append((out, grads))
    (padded, want), (packed, got) = results
    close(packed.logprobs, padded.logprobs, "same sums in other blocks", atol=2e-5)
    close(packed.entropy, padded.entropy, "same sums in other blocks", atol=2e-5)
    for key, value in want.items():
        scale = value.abs().max().item() + 1e-6
        close(got[key], value, key, atol=1e-4 * scale)


def test_neighbours_change_nothing():
    spec = ALL["moe_kda"]
    stage, _ = adapted(spec)
    mine, *others = random_sequences([20, 30, 7], spec.vocab_size)
    hidden = [
        stage(pack([mine, *rest]))[:20]
        for rest in (others, random_sequences([30, 7], spec.vocab_size, seed=9))
    ]
    close(*hidden, "experts share products of other sizes", atol=1e-5)


def test_wanted_and_routed_experts_follow_their_tokens():
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8]]
    wanted = [[False, False, True], [True], [False, True, False, True]]
    routed = [np.full((len(s), 2, 3), i) for i, s in enumerate(sequences)]
    batch = pack(sequences, wanted=wanted, routed_experts=[routed[0], None, routed[2]])
    assert batch.tokens_B_L.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.next_rows.tolist() == [1, 4, 6]
    assert batch.packing.score_places.tolist() == [1, 8, 10]
    assert batch.score_shape == (3, 4)
    assert batch.routed_experts[0, :, 0, 0].tolist() == [0, 0, 0, -1, 2, 2, 2, 2]
    assert pack(sequences).next_rows.tolist() == [0, 1, 4, 5, 6]
    assert batch.bounds.tolist() == [0, 3, 4, 8]
    assert batch.place.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_runs_of_equal_lengths_share_a_call():
    batch = pack([[1] * n for n in (2, 2, 3, 1, 1)])
    shapes = []

    def twice(x):
        shapes.append(tuple(x.shape))
        return 2 * x

    flat = torch.arange(9.0)
    assert torch.equal(by_sequence(batch, twice, flat), 2 * flat)
    assert shapes == [(2, 2), (1, 3), (2, 1)]


def test_nothing_packed_is_the_batch_that_only_keeps_pace():
    assert torch.equal(pack([]).mask_B_L, collate([]).mask_B_L)


def test_equal_blocks_change_no_result():
    """What CUDA does with sequences longer than index_topk: cut, filled up, one at a time."""
    spec = ALL["short_index"]
    stage, _ = adapted(spec)
    block = stage.layers[0].attention.block
    heads, length = spec.num_attention_heads, 70
    q = torch.randn(2, length, heads, block.qk_dim, requires_grad=True)
    kv = torch.randn(2, length, heads, block.qk_dim + block.v_dim, requires_grad=True)
    x, latent = torch.randn(2 * length, spec.hidden_size), torch.randn(2 * length, spec.q_lora_rank)
    batch = collate(random_sequences([length, length], spec.vocab_size))
    index = [part.unflatten(0, (2, length)) for part in block.indexer.project(x, latent, batch)]
    want, got = block._masked(q, kv, *index), block._in_equal_blocks(q, kv, *index)
    close(got, want, "other block sizes", atol=1e-5)
    up = torch.randn_like(want)
    pairs = zip(*(torch.autograd.grad(y, (q, kv), up) for y in (got, want)), strict=True)
    for actual, expected in pairs:
        close(actual, expected, "other block sizes", atol=1e-4)
