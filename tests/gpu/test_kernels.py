"""Every CUDA kernel against its definition in higher precision, on random bfloat16 inputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm_lora.model.batch import pack
from glm_lora.model.delta_rule import delta_rule, fused_delta_rule
from glm_lora.model.experts import grouped_linear
from glm_lora.model.fast import active_paths, plain_torch, takes
from glm_lora.model.head import token_logprobs
from glm_lora.model.linear import _LoraProduct, fuse
from glm_lora.model.mlp import clamped_swiglu
from glm_lora.model.norm import gated_rms_norm
from tests.model.kernel_checks import Bench, KernelChecks, dispatch, gated_norm_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# bfloat16 results keep 8 bits: 2^-9 relative, a little more where two roundings meet.
BF16 = 4e-3
LENGTHS = (5, 1, 200, 64, 130)


@pytest.fixture
def bench():
    # The device's exponential is good to 2^-22, and its argument is rounded once more.
    return Bench("cuda", torch.bfloat16, BF16, fp32=1e-5)


@pytest.fixture
def draw(bench):
    return bench.normal


@pytest.fixture
def both(bench):
    return bench.both


class TestTritonKernels(KernelChecks):
    @pytest.fixture
    def dots(self, bench):
        return bench


def test_the_paths_are_active(draw):
    assert takes("fused", draw(1)) and takes("grouped_mm", draw(1))
    assert not any(kernel.startswith("torch (") for kernel in active_paths().values())
    with plain_torch():
        assert not takes("fused", draw(1))


def test_gated_norm_and_swiglu_take_their_kernels(draw, both):
    weight = draw(128)
    inputs = [draw(77, 3, 128), draw(77, 3, 128)]
    both(
        lambda x, gate: gated_rms_norm(x, gate, weight, 1e-5),
        lambda x, gate: gated_norm_of(x, gate, weight),
        inputs,
    )
    swiglu = lambda x: clamped_swiglu(x, 3.0)  # noqa: E731
    both(swiglu, swiglu, [4 * draw(33, 2 * 640)])


def test_grouped_products_and_moves(draw, both):
    from glm_lora.model.kernels.moe import from_experts, to_experts

    tokens, k, experts, hidden, width = 301, 4, 16, 256, 128
    weight = draw(experts, width, hidden) / 16
    down = draw(experts, hidden, width) / 16
    chosen = torch.rand(tokens, experts, device="cuda").topk(k).indices
    chosen[chosen == 3] = 4  # an expert without rows
    order, ends, place = dispatch(chosen, experts)

    def fast(x):
        rows = to_experts(x, order // k, place)
        return from_experts(
            grouped_linear(grouped_linear(rows, weight, ends), down, ends), order // k, place
        )

    def exact(x):
        inner = torch.einsum("nh,nkwh->nkw", x, weight.double()[chosen])
        return torch.einsum("nkw,nkhw->nh", inner, down.double()[chosen])

    both(fast, exact, [draw(tokens, hidden)], 2 * BF16)


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities(draw, both, entropy):
    weight, targets = draw(5003, 256) / 16, torch.randint(0, 5003, (700,), device="cuda")
    options = {"temperature": 0.7, "with_entropy": entropy}

    def exact(hidden):
        share = (hidden @ weight.double().t() / 0.7).log_softmax(-1)
        own = share.gather(-1, targets[:, None]).squeeze(-1)
        return (own, -(share * share.exp()).sum(-1)) if entropy else own

    def fast(hidden):
        found = token_logprobs(hidden, weight, targets, **options)
        return found if entropy else found[0]

    both(fast, exact, [draw(700, 256)], 2 * BF16)


def test_adapted_projection(draw, both):
    weight = draw(96, 256) / 16
    spans = [slice(0, 32), slice(48, 96)]
    factors = [
        draw(*s, dtype=torch.float32) / 8 for s in ((16, 256), (32, 16), (16, 256), (48, 16))
    ]

    def exact(x, *factors):
        y = x @ weight.double().t()
        parts = [torch.zeros_like(y) for _ in spans]
        for part, span, a, b in zip(parts, spans, factors[0::2], factors[1::2], strict=True):
            part[:, span] = 2.0 * x @ a.t() @ b.t()
        return y + sum(parts)

    def fast(x, *factors):
        pairs = zip(spans, factors[0::2], factors[1::2], strict=True)
        live = [
            (SimpleNamespace(rows=r), SimpleNamespace(a=a, b=b, scaling=2.0)) for r, a, b in pairs
        ]
        return _LoraProduct.apply(x, weight, fuse(live, 96, x.dtype), *factors)

    both(fast, exact, [draw(301, 256), *factors], 2 * BF16)


@pytest.mark.slow  # the first call compiles for minutes
@pytest.mark.parametrize("lengths", [(256, 256), LENGTHS])
def test_delta_rule(draw, both, lengths):
    batch = pack([[1] * n for n in lengths], device="cuda")
    tokens, heads, size = batch.num_tokens, 64, 128
    log_rate = 0.3 * draw(heads, dtype=torch.float32)
    bias = draw(heads * size, dtype=torch.float32)

    def exact(q, k, v, decay, beta):
        rate = log_rate.exp()[:, None]
        g = -5 * torch.sigmoid((decay.float() + bias.view(heads, size)) * rate)
        inputs = (q.float(), k.float(), v.float(), g, torch.sigmoid(beta.float()))
        parts = zip(*(x.split(lengths) for x in inputs), strict=True)
        outs = [delta_rule(*(x[None] for x in p), lower_bound=-5.0)[0] for p in parts]
        return torch.cat(outs)

    def fast(q, k, v, decay, beta):
        return fused_delta_rule(q, k, v, decay, beta, log_rate, bias, -5.0, batch)

    inputs = [draw(tokens, heads, size) for _ in range(4)] + [draw(tokens, heads)]
    both(fast, exact, inputs, 4 * BF16)
