"""Adapters on one rank: start, switch, load, gather, dropout, bookkeeping."""

from __future__ import annotations

import math

import pytest
import torch

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import FULL, TINY
from glm_lora.config import OptimizerConfig
from glm_lora.errors import CheckpointError, TargetError
from glm_lora.lora.adapter import initial_a
from glm_lora.lora.attach import attach_adapters
from glm_lora.model import linear
from glm_lora.model.batch import collate
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import build_stage
from glm_lora.targets.selection import make_selection
from glm_lora.train.optimizer import AdapterOptimizer
from tests.model.weights import (
    everything,
    load,
    random_base,
    random_factors,
    random_sequences,
)
from tests.support import close

CTX = ParallelContext()


@pytest.fixture
def stage():
    stage = build_stage(TINY, CTX, dtype=torch.float32)
    load(stage, random_base(TINY))
    return stage


@pytest.fixture
def batch():
    return collate(random_sequences([6, 9, 3], TINY.vocab_size))


def hidden(stage, batch):
    with torch.no_grad():
        return stage(batch)


def test_fresh_adapters_are_the_base_bit_for_bit(stage, batch):
    want = hidden(stage, batch)
    attach_adapters(stage, everything(TINY), seed=0)
    assert torch.equal(hidden(stage, batch), want)


def test_switched_off_adapters_are_the_base_bit_for_bit(stage, batch):
    want = hidden(stage, batch)
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    trained = hidden(stage, batch)
    assert not torch.allclose(trained, want)
    with adapters.enabled(False):
        assert torch.equal(hidden(stage, batch), want)
    assert torch.equal(hidden(stage, batch), trained)


def emptied_and_refilled(adapters):
    """As leaving the device and coming back does: other memory under the same tensor."""
    for p in adapters.parameters().values():
        values = p.detach().clone() + 0.01
        storage = p.untyped_storage()
        storage.resize_(0)
        storage.resize_(values.nbytes)
        p.detach().copy_(values)


def optimizer_step(adapters, **options):
    for p in adapters.parameters().values():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(adapters.parameters().values(), lr=0.01, **options).step()


def other_memory(adapters):
    for p in adapters.parameters().values():
        p.data = p.data + 0.01


def own_optimizer(adapters, fused=False):
    for p in adapters.parameters().values():
        p.grad = torch.ones_like(p)
    optimizer = AdapterOptimizer(adapters.parameters(), OptimizerConfig(lr=0.01), 10)
    if fused:
        optimizer._adam = torch.optim.AdamW(adapters.parameters().values(), lr=0.01, fused=True)
    optimizer.step(0.5)


WRITES = {
    "AdapterOptimizer": own_optimizer,
    "AdamW, one by one": lambda adapters: optimizer_step(adapters, foreach=False),
    "AdamW, together": lambda adapters: optimizer_step(adapters, foreach=True),
    "AdapterOptimizer, fused": lambda adapters: own_optimizer(adapters, fused=True),
    "load_full": lambda adapters: adapters.load_full(random_factors(adapters.selection, seed=9)),
    "other memory": other_memory,
    "emptied and refilled": emptied_and_refilled,
}


@pytest.mark.parametrize("write", WRITES)
def test_no_way_of_writing_an_adapter_leaves_an_old_copy_in_use(stage, batch, write):
    """Products read copies in the compute dtype: a stale one would train nothing, silently."""
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    before = hidden(stage, batch)
    WRITES[write](adapters)
    after = hidden(stage, batch)
    assert not torch.equal(after, before)
    stage.drop_fused()
    assert torch.equal(after, hidden(stage, batch))


def test_one_changed_factor_of_any_site_is_noticed(stage, batch):
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    latest = hidden(stage, batch)
    for key, p in adapters.parameters().items():
        with torch.no_grad():
            p.view(-1)[0].add_(1.0)
        now = hidden(stage, batch)
        assert not torch.equal(now, latest), key
        latest = now


def test_copies_are_made_once_for_all_passes_of_a_step(stage, batch, monkeypatch):
    made = []
    real = linear.fuse
    monkeypatch.setattr(linear, "fuse", lambda *args: made.append(1) or real(*args))
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    for layer in stage.layers:
        layer.recompute = "full"
    run_microbatches(stage, [batch, batch], lambda i, lp, entropy: lp.sum())
    groups = {site.group for site in stage.linear_sites().values() if site.adapter}
    assert len(made) == len(groups)
    with adapters.enabled(False):
        hidden(stage, batch)
    assert len(made) == len(groups)


def test_adapters_equal_merged_weights(stage, batch):
    selection = everything(TINY, rank=3, alpha=5.0)
    adapters = attach_adapters(stage, selection, seed=0)
    factors = random_factors(selection)
    adapters.load_full(factors)
    got = hidden(stage, batch)
    for a in selection.adapters:
        weight = stage.base_parameters()[f"{a.site.disk_name}.weight"]
        weight += 5.0 / 3.0 * factors[a.b_key] @ factors[a.a_key]
    with adapters.enabled(False):
        close(got, hidden(stage, batch), "fp32: merged before or after the product", atol=1e-4)


def test_ranks_may_differ_at_equal_scaling(stage, batch):
    sites = trainable_sites(TINY)
    ranks = {sites[0].disk_name: 2, sites[1].disk_name: 7}
    selection = make_selection("t", TINY, sites, rank=4, alpha=8.0, ranks=ranks)
    adapters = attach_adapters(stage, selection, seed=0)
    assert {k: tuple(p.shape) for k, p in adapters.parameters().items()} == (
        selection.tensor_shapes()
    )
    adapters.load_full(random_factors(selection))
    run_microbatches(stage, [batch], lambda i, lp, entropy: lp.sum())
    assert all(p.grad.shape == p.shape and p.grad.any() for p in adapters.parameters().values())


def test_initial_a_is_kaiming_uniform_and_depends_only_on_seed_and_name():
    a = initial_a((8, 4096), 0, "x")
    assert a.abs().max() <= 1 / math.sqrt(4096)
    assert a.std() == pytest.approx(1 / math.sqrt(3 * 4096), rel=0.02)
    assert torch.equal(a, initial_a((8, 4096), 0, "x"))
    assert not torch.equal(a, initial_a((8, 4096), 1, "x"))
    assert not torch.equal(a, initial_a((8, 4096), 0, "y"))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_topology_starts_from_the_same_adapter(tp):
    selection = everything(TINY)
    parts = []
    for rank in range(tp):
        ctx = ParallelContext(tp_size=tp, tp_rank=rank, sequence_parallel=tp > 1)
        stage = build_stage(TINY, ctx, dtype=torch.float32)
        parts.append(attach_adapters(stage, selection, seed=4))
    for key, shape in selection.tensor_shapes().items():
        axis = parts[0].tp_axis(key)
        pieces = [p.parameters()[key] for p in parts]
        full = torch.cat(pieces, dim=axis) if axis is not None else pieces[0]
        assert tuple(full.shape) == shape
        if "lora_A" in key:
            assert torch.equal(full, initial_a(shape, 4, key.removesuffix(".lora_A.weight")))
        else:
            assert not full.any()


def test_load_and_gather_round_trip(stage):
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    factors = random_factors(adapters.selection)
    adapters.load_full(factors)
    back = adapters.gather(CTX)
    assert list(back) == list(adapters.selection.tensor_shapes())
    for key, tensor in factors.items():
        assert torch.equal(back[key], tensor)
        assert back[key].data_ptr() != adapters.parameters()[key].data_ptr()
        # Pickled, a part of a larger storage takes all of it along.
        assert back[key].untyped_storage().nbytes() == back[key].nbytes
    assert adapters.gather(CTX, torch.bfloat16)[key].dtype is torch.bfloat16


def test_load_is_strict_and_changes_nothing_when_it_refuses(stage):
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    before = adapters.replica_hashes()
    factors = random_factors(adapters.selection)
    key = next(iter(factors))
    with pytest.raises(CheckpointError, match="1 missing"):
        adapters.load_full({k: v for k, v in factors.items() if k != key})
    with pytest.raises(CheckpointError, match="1 unknown"):
        adapters.load_full({**factors, "x": torch.ones(1)})
    with pytest.raises(CheckpointError, match="has shape"):
        adapters.load_full({**factors, key: factors[key].t()})
    assert adapters.replica_hashes() == before


def test_a_selection_of_another_model_is_refused(stage):
    with pytest.raises(TargetError, match="another model"):
        attach_adapters(stage, everything(FULL.first_layers(1)), seed=0)


def test_dead_sites_are_named_until_both_factors_have_had_a_gradient(stage, batch):
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    names = [a.site.disk_name for a in adapters.selection.adapters]
    assert adapters.dead_sites(CTX) == names
    optimizer = torch.optim.SGD(adapters.parameters().values(), lr=0.1)
    for step in range(2):
        adapters.zero_grad()
        run_microbatches(stage, [batch], lambda i, lp, entropy: lp.mean())
        adapters.sync_gradients(CTX)
        adapters.record_gradients()
        if step == 0:
            assert adapters.dead_sites(CTX) == names  # A has no gradient while B is zero
        optimizer.step()
    assert adapters.dead_sites(CTX) == []


def test_an_unused_adapter_is_dead(stage, batch):
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    dead = adapters.selection.adapters[3]
    stage.linear_sites()[dead.site.disk_name].adapter = None
    run_microbatches(stage, [batch], lambda i, lp, entropy: lp.mean())
    adapters.sync_gradients(CTX)
    adapters.record_gradients()
    assert adapters.dead_sites(CTX) == [dead.site.disk_name]


def test_grad_norm_is_the_norm_of_all_gradients(stage, batch):
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    run_microbatches(stage, [batch], lambda i, lp, entropy: lp.mean())
    want = torch.cat([p.grad.flatten() for p in adapters.parameters().values()]).norm()
    assert adapters.grad_norm(CTX) == pytest.approx(float(want), rel=1e-5)


def test_dropout_acts_in_training_only_and_follows_the_seed(stage, batch):
    plain = attach_adapters(stage, everything(TINY), seed=0)
    factors = random_factors(plain.selection)
    plain.load_full(factors)
    want = hidden(stage, batch)
    adapters = attach_adapters(stage, everything(TINY, dropout=0.5), seed=0)
    adapters.load_full(factors)
    with adapters.evaluation():
        assert torch.equal(hidden(stage, batch), want)
    torch.manual_seed(0)
    first = hidden(stage, batch)
    second = hidden(stage, batch)
    torch.manual_seed(0)
    assert torch.equal(hidden(stage, batch), first)
    assert not torch.equal(first, second)
    assert not torch.allclose(first, want)


def test_dropout_keeps_the_expected_delta(stage):
    site = stage.linear_sites()[everything(TINY).adapters[0].site.disk_name]
    adapters = attach_adapters(stage, everything(TINY, dropout=0.25), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    x = torch.randn(1, 64).expand(20000, -1)
    torch.manual_seed(1)
    with torch.no_grad():
        dropped = site.group(x)[:, site.rows].mean(0)
        with adapters.evaluation():
            want = site.group(x[:1])[0, site.rows]
    close(dropped, want, "mean of 20000 draws", atol=0.05)


def test_bf16_compute_keeps_fp32_masters(batch):
    stage = build_stage(TINY, CTX, dtype=torch.bfloat16)
    load(stage, random_base(TINY))
    adapters = attach_adapters(stage, everything(TINY), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    out = run_microbatches(stage, [batch], lambda i, lp, entropy: lp.mean())
    assert out[0].logprobs.dtype is torch.float32
    for p in adapters.parameters().values():
        assert p.dtype is p.grad.dtype is torch.float32
        assert torch.isfinite(p.grad).all()
        assert p.grad.any()
