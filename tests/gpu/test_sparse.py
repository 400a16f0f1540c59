"""The sparse attention kernels on a GPU: bfloat16 against fp64, the whole model, and memory."""

from __future__ import annotations

import pytest
import torch

from glm_lora.arch.spec import DSA
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.batch import pack
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import build_stage
from tests.gpu.parts import WIDE
from tests.model.sparse_checks import CASES, Case, distances, draw
from tests.model.weights import everything, load, random_base, random_factors, random_sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# 2^-9 for a rounding to bfloat16, of the queries in the latent space, of the shares and of the
# result; of the gradients twice as many.
BF16 = 1e-2
FULL_SIZE = {
    f"{heads} heads": Case(3100, 1052, heads, 256, 256, 512, 512) for heads in (64, 32, 16, 8)
}
"""The model's own sizes at every tensor-parallel size, with more queries than one block has."""


@pytest.mark.parametrize("name", [*CASES, *FULL_SIZE])
def test_kernels_compute_the_definition(name):
    case = (CASES | FULL_SIZE)[name]
    found = distances(draw(case, "cuda", torch.bfloat16), case.pool)
    assert {k: v for k, v in found.items() if not v < BF16} == {}


def test_memory_does_not_grow_with_queries_times_keys():
    from glm_lora.model.kernels.sparse import QUERIES_PER_BLOCK, sparse_attention

    case = Case(16384, 14336, 64, 256, 256, 512, 512)
    inputs = draw(case, "cuda", torch.bfloat16)
    q, latents = inputs.q.requires_grad_(), inputs.latents.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = sparse_attention(q, latents, inputs.weight, inputs.chosen, case.pool, 1 / 16)
    out.backward(inputs.up)
    peak = torch.cuda.max_memory_allocated() - before
    block = 4 * case.heads * QUERIES_PER_BLOCK * case.latent
    # Result, gradient of q, the latents' gradient in fp32 and the block's tensors at most.
    assert peak < 3 * 2 * q.numel() + 8 * latents.numel() + 8 * block
    # One bit for each head, query and key would be more.
    assert peak < case.heads * case.rows * case.length // 8


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_model_is_as_near_to_fp32_as_with_masks(recompute):
    """``WIDE`` has every kind of layer; both paths round to bfloat16, in other places."""
    ctx = ParallelContext(device=torch.device("cuda"))
    batch = pack(random_sequences([300, 40, 500], WIDE.vocab_size), device="cuda")
    assert max(batch.packing.lengths) > WIDE.index_topk and DSA in WIDE.layer_types

    def logprobs_and_gradients(dtype, backend):
        stage = build_stage(WIDE, ctx, dtype=dtype, recompute=recompute, dsa_backend=backend)
        load(stage, random_base(WIDE))
        adapters = attach_adapters(stage, everything(WIDE), seed=0)
        adapters.load_full(random_factors(adapters.selection))
        (out,) = run_microbatches(stage, [batch], lambda i, lp, entropy: lp.sum())
        grads = [p.grad.flatten().double() for p in adapters.parameters().values()]
        return out.logprobs.double(), torch.cat(grads)

    exact = logprobs_and_gradients(torch.float32, "auto")
    masks = logprobs_and_gradients(torch.bfloat16, "sdpa")
    ours = logprobs_and_gradients(torch.bfloat16, "triton")
    for what, want, other, got in zip(
        ("log-probabilities", "gradients"), exact, masks, ours, strict=True
    ):
        # The factor: router and indexer decide ties otherwise, in either of the two.
        assert (got - want).norm() < 2.0 * (other - want).norm(), what
