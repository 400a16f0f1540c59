"""The stage as a container: keys, shards, loading, refusals, recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm_lora.arch.projections import all_params, trainable_sites
from glm_lora.arch.spec import FULL, TINY
from glm_lora.errors import CheckpointError, ConfigError, ModelError
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.batch import collate, distinct
from glm_lora.model.indexer import Indexer
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import build_stage
from tests.model.specs import ALL
from tests.model.weights import (
    everything,
    load,
    local_base,
    random_base,
    random_factors,
    random_sequences,
)
from tests.support import close


def tiny_stage(spec=TINY, **kwargs):
    stage = build_stage(spec, ParallelContext(), dtype=torch.float32, **kwargs)
    load(stage, random_base(spec))
    return stage


@pytest.mark.parametrize("name", ALL)
def test_base_keys_and_shapes_are_those_of_the_facts_table(name):
    spec = ALL[name]
    stage = build_stage(spec, ParallelContext(), dtype=torch.bfloat16)
    got = {k: (tuple(t.shape), t.dtype) for k, t in stage.base_parameters().items()}
    want = {
        k: (p.shape, torch.float32 if p.fp32 else torch.bfloat16)
        for k, p in all_params(spec).items()
    }
    assert got == want


def test_shards_of_all_ranks_hold_the_whole_model_once():
    meta = torch.device("meta")
    spec = FULL.first_layers(8)
    total = 0
    for pp in range(2):
        for ep in range(4):
            for tp in range(2):
                ctx = ParallelContext(
                    tp_size=2,
                    tp_rank=tp,
                    pp_size=2,
                    pp_rank=pp,
                    ep_size=4,
                    ep_rank=ep,
                    sequence_parallel=True,
                    device=meta,
                )
                stage = build_stage(spec, ctx, dtype=torch.bfloat16)
                for key, t in stage.base_parameters().items():
                    p = all_params(spec)[key]
                    copies = (1 if p.tp_axis is not None else 2) * (1 if p.row.expert else 4)
                    total += t.numel() / copies
    assert total == sum(p.numel for p in all_params(spec).values())


def test_loading_reads_back_bit_for_bit_and_shares_no_memory():
    spec = ALL["moe_kda"]
    stage, base = tiny_stage(spec), random_base(spec)
    local = local_base(base, spec, stage.ctx)
    for key, tensor in stage.base_parameters().items():
        assert torch.equal(tensor, local[key]), key
    storages = {s.data_ptr() for s in stage.base_storages()}
    assert {t.untyped_storage().data_ptr() for t in stage.base_parameters().values()} == storages


def test_loading_refuses_unknown_keys_and_wrong_shapes():
    stage = tiny_stage()
    with pytest.raises(CheckpointError, match="not part of this pipeline stage"):
        stage.load_base("model.language_model.layers.9.input_layernorm.weight", torch.ones(64))
    with pytest.raises(CheckpointError, match=r"local shape \(3,\); expected \(64,\)"):
        stage.load_base("model.language_model.norm.weight", torch.ones(3))


def test_every_trainable_site_is_a_linear_site():
    sites = tiny_stage().linear_sites()
    for site in trainable_sites(TINY):
        assert sites[site.disk_name].shape == site.shape
        assert sites[site.disk_name].kind == site.kind


def test_nothing_of_the_base_takes_gradients():
    assert not any(p.requires_grad for p in tiny_stage().parameters())


@pytest.mark.parametrize("recompute", ["full", "mlp", "attention"])
def test_recomputation_changes_no_bit(recompute):
    spec = ALL["moe_kda"]
    batch = collate(random_sequences([9, 4], spec.vocab_size))
    grads = []
    for mode in ("none", recompute):
        stage = tiny_stage(spec, recompute=mode)
        adapters = attach_adapters(stage, everything(spec, dropout=0.2), seed=0)
        adapters.load_full(random_factors(adapters.selection))
        torch.manual_seed(3)
        run_microbatches(stage, [batch], lambda i, lp, entropy: lp.sum())
        grads.append({k: p.grad for k, p in adapters.parameters().items()})
    for key, expected in grads[0].items():
        assert torch.equal(grads[1][key], expected), key


@pytest.mark.parametrize("recompute", ["full", "attention", "none"])
def test_masked_attention_is_computed_once_and_recomputation_changes_no_bit(recompute, monkeypatch):
    """The backward pass takes the result of the first pass; with another result it would differ."""
    spec = ALL["short_index"]
    batch = collate(random_sequences([21, 30], spec.vocab_size))
    scores, scored = Indexer._scores, []
    monkeypatch.setattr(Indexer, "_scores", lambda *args: scored.append(1) or scores(*args))
    kept, grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, []
    for mode in ("none", recompute):
        stage = tiny_stage(spec, recompute=mode)
        adapters = attach_adapters(stage, everything(spec), seed=0)
        adapters.load_full(random_factors(adapters.selection))
        scored.clear()
        with Calls(kept) as calls:
            run_microbatches(stage, [batch, batch], lambda i, lp, entropy: lp.sum())
        grads.append({k: p.grad for k, p in adapters.parameters().items()})
    # Two layers, two batches; the first queries are causal, the others one block with masks. The
    # last layer is never run again: its backward pass comes next.
    again = {"none": 0, "full": 2, "attention": 2}[recompute]
    assert calls.masked == len(scored) == 4
    assert calls.causal == 4 + again
    for key, expected in grads[0].items():
        assert torch.equal(grads[1][key], expected), key


class Calls(TorchDispatchMode):
    """Counts how often one attention kernel runs, with and without a mask."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel, self.masked, self.causal = kernel, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.kernel:
            masked = (kwargs or {}).get("attn_mask") is not None
            self.masked, self.causal = self.masked + masked, self.causal + (not masked)
        return func(*args, **(kwargs or {}))


def test_stages_in_sequence_are_the_model():
    spec = ALL["four"]
    base, batch = random_base(spec), collate(random_sequences([6, 3], spec.vocab_size))
    whole = tiny_stage(spec)
    streams = None
    for part in (range(0, 1), range(1, 4)):
        stage = build_stage(spec, ParallelContext(), dtype=torch.float32, layer_range=part)
        load(stage, base)
        streams = stage(batch, streams)
    assert torch.equal(streams, whole(batch))


def test_neighbours_in_a_batch_change_nothing():
    stage = tiny_stage(ALL["short_index"])
    sequences = random_sequences([20, 3, 33], 32)
    together = collate(sequences)
    lp, _ = stage.token_logprobs(stage(together), together)
    for row, sequence in enumerate(sequences):
        alone = collate([sequence])
        want, _ = stage.token_logprobs(stage(alone), alone)
        torch.testing.assert_close(lp[row, : len(sequence) - 1], want[0], atol=2e-5, rtol=0)


def test_only_wanted_tokens_are_scored():
    stage = tiny_stage()
    sequences = random_sequences([5, 8], 32)
    everyone = collate(sequences)
    full, _ = stage.token_logprobs(stage(everyone), everyone)
    flags = [[False, False, True, False, True], [False] * 7 + [True]]
    some = collate(sequences, wanted=flags)
    got, _ = stage.token_logprobs(stage(some), some)
    keep = some.wanted_B_L[:, 1:]
    assert keep.sum() == 3
    torch.testing.assert_close(got[keep], full[keep])
    assert not got[~keep].any()


def test_distinct_sequences_stand_for_all():
    stage = tiny_stage()
    sequences = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6], [4, 5, 7]]
    few, index = distinct(sequences)
    assert (few, index) == ([[1, 2, 3], [4, 5, 6], [4, 5, 7]], [0, 1, 0, 1, 2])
    batch, all_of_them = collate(few), collate(sequences)
    got, _ = stage.token_logprobs(stage(batch), batch)
    want, _ = stage.token_logprobs(stage(all_of_them), all_of_them)
    close(got[index], want, "products of other row counts round otherwise", atol=1e-5)


def test_an_empty_batch_runs_and_gives_zero_gradients():
    stage = tiny_stage()
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    out = run_microbatches(stage, [collate([])], lambda i, lp, entropy: lp.sum())
    assert not out[0].logprobs.any()
    assert not any(p.grad.any() for p in adapters.parameters().values())


def test_replayed_experts_are_used_and_the_own_choice_gives_the_same_result():
    spec = ALL["four"]
    stage = tiny_stage(spec)
    sequences = random_sequences([6, 4], spec.vocab_size)
    chosen = []
    router = stage.layers[3].mlp.block.router
    router.register_forward_hook(lambda module, args, result: chosen.append(result[1]))
    batch = collate(sequences)
    want = stage(batch)
    own = chosen[0].view(2, 6, 1, -1).numpy()
    replay = collate(sequences, routed_experts=[own[0], own[1, :3]])
    assert torch.equal(stage(replay), want)
    other = (own + 1) % spec.n_routed_experts
    changed = stage(collate(sequences, routed_experts=[other[0], None]))
    assert not torch.allclose(changed[:6], want[:6])
    close(changed[6:10], want[6:10], "products of other row counts round otherwise", atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 3, "sequence_parallel": True}, "tensor parallel 3 does not divide"),
        ({"ep_size": 3}, "expert parallel 3 does not divide"),
        ({"tp_size": 2}, "without sequence parallel on a model with experts"),
    ],
)
def test_topologies_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        build_stage(TINY, ParallelContext(**fields), dtype=torch.float32)


def test_a_model_without_the_tail_pool_is_refused():
    with pytest.raises(ModelError, match="always_select_tail"):
        build_stage(
            replace(TINY, index_kpool_always_select_tail=False),
            ParallelContext(),
            dtype=torch.float32,
        )
