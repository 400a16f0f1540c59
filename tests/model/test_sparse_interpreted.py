"""The sparse attention kernels on CPU tensors, in Triton's interpreter: ``make test-kernels``.

Not covered: bfloat16, whose bits the interpreter's products take for integers; float16 takes its
place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm_lora.arch.spec import DENSE, DSA
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.batch import collate, pack
from glm_lora.model.fast import plain_torch
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import build_stage
from tests.model.interpreter import needs_interpreter
from tests.model.sparse_checks import CASES, Case, distances, draw
from tests.model.specs import SHORT_INDEX
from tests.model.weights import everything, load, random_base, random_factors, random_sequences
from tests.support import close

needs_interpreter()

from glm_lora.model.kernels import sparse  # noqa: E402

LIMITS = {
    # Sums of up to 300 terms in fp32, 2^-24 each, in another order.
    torch.float32: 2e-6,
    # 2^-12 for a rounding; queries, shares and gradients in the latent space are rounded, too.
    torch.float16: 2e-3,
}


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_definition(name, dtype):
    found = distances(draw(CASES[name], "cpu", dtype), CASES[name].pool)
    assert {k: v for k, v in found.items() if not v < LIMITS[dtype]} == {}


def test_blocks_of_queries_add_up(monkeypatch):
    case = CASES["8 heads"]
    monkeypatch.setattr(sparse, "QUERIES_PER_BLOCK", 4)
    found = distances(draw(case, "cpu", torch.float32), case.pool)
    assert max(found.values()) < LIMITS[torch.float32]


def test_no_tensor_is_as_large_as_heads_times_queries_times_keys(monkeypatch):
    case = Case(150, 6, 8, 8, 8, 32, 4)
    monkeypatch.setattr(sparse, "QUERIES_PER_BLOCK", 4)
    inputs = draw(case, "cpu", torch.float32)
    q, latents = inputs.q.requires_grad_(), inputs.latents.requires_grad_()
    with Largest() as largest:
        sparse.sparse_attention(q, latents, inputs.weight, inputs.chosen, 4, 1.0).sum().backward()
    # The gradient of all latents; in the latent space 8 x 4 x 32.
    assert largest.size == case.length * case.latent < case.heads * case.rows * case.length


class Largest(TorchDispatchMode):
    """The most numbers in any tensor made inside (the interpreter's own copies are bytes)."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.size = max(self.size, out.numel())
        return out


SPECS = {
    "short_index": SHORT_INDEX,
    "pools of three": replace(
        SHORT_INDEX, layer_types=(DSA,), mlp_layer_types=(DENSE,), num_hidden_layers=1,
        index_topk=12, index_kpool=3, num_attention_heads=3, kv_lora_rank=64, v_head_dim=10,
    ),
}  # fmt: skip


def trained(spec, sparse_from, batches, recompute="none"):
    """Log-probabilities and adapter gradients of one pass."""
    stage = build_stage(spec, ParallelContext(), dtype=torch.float32, recompute=recompute)
    load(stage, random_base(spec))
    for layer in stage.layers:
        if hasattr(layer.attention.block, "sparse_from"):
            layer.attention.block.sparse_from = sparse_from
    adapters = attach_adapters(stage, everything(spec), seed=0)
    adapters.load_full(random_factors(adapters.selection))
    outs = run_microbatches(stage, batches, lambda i, lp, entropy: (lp * lp.detach().sin()).sum())
    return [o.logprobs for o in outs], {k: p.grad for k, p in adapters.parameters().items()}


@pytest.mark.parametrize("together", [collate, pack])
@pytest.mark.parametrize("name", SPECS)
def test_the_sparse_path_equals_the_masked_one(name, together, monkeypatch):
    """Several sequences, some of them short, through the whole model."""
    spec, calls = SPECS[name], []
    attend = sparse.attend
    monkeypatch.setattr(sparse, "attend", lambda *args: calls.append(1) or attend(*args))
    batch = together(random_sequences([11, 17, 5, 17], spec.vocab_size))
    want, want_grads = trained(spec, None, [batch])
    assert not calls
    got, grads = trained(spec, 0, [batch])
    long = 4 if together is collate else sum(n > spec.index_topk for n in (11, 17, 17))
    assert len(calls) == spec.layer_types.count(DSA) * long
    close(got[0], want[0], "the same sums, absorbed, in fp32", atol=2e-5)
    for key, value in want_grads.items():
        scale = value.abs().max().item()
        close(grads[key], value, f"{key}: relative to its largest entry", atol=1e-4 * scale)


def test_shorter_sequences_go_through_masks(monkeypatch):
    """Each sequence of a packed row for itself, and nothing changes but who computes."""
    calls = []
    attend = sparse.attend
    monkeypatch.setattr(sparse, "attend", lambda *args: calls.append(1) or attend(*args))
    batch = pack(random_sequences([11, 17, 12, 5], SHORT_INDEX.vocab_size))
    want, want_grads = trained(SHORT_INDEX, None, [batch])
    got, grads = trained(SHORT_INDEX, 12, [batch])
    assert SHORT_INDEX.index_topk < 11
    assert len(calls) == 2 * SHORT_INDEX.layer_types.count(DSA), "those of 17 and 12 tokens"
    close(got[0], want[0], "the same sums, absorbed, in fp32", atol=2e-5)
    for key, value in want_grads.items():
        scale = value.abs().max().item()
        close(grads[key], value, f"{key}: relative to its largest entry", atol=1e-4 * scale)


def test_plain_torch_turns_it_off(monkeypatch):
    monkeypatch.setattr(sparse, "attend", None)
    batch = collate(random_sequences([13], SHORT_INDEX.vocab_size))
    with plain_torch():
        trained(SHORT_INDEX, 0, [batch])


@pytest.mark.parametrize("recompute", ["full", "attention"])
def test_a_layer_run_again_keeps_the_result_and_changes_no_bit(recompute, monkeypatch):
    spec, calls = SHORT_INDEX, []
    attend = sparse.attend
    monkeypatch.setattr(sparse, "attend", lambda *args: calls.append(1) or attend(*args))
    batch = pack(random_sequences([12, 15], spec.vocab_size))
    _, want = trained(spec, 0, [batch, batch])
    assert len(calls) == 2 * 2 * 2  # layers, batches, sequences
    _, got = trained(spec, 0, [batch, batch], recompute)
    assert len(calls) == 2 * 8
    # In the interpreter the additions have an order.
    for key, expected in want.items():
        assert torch.equal(got[key], expected), key
