"""Every CUDA kernel against its definition in higher precision, on random bfloat16 inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glm_lora.model import hyper
from glm_lora.model.batch import pack
from glm_lora.model.delta_rule import causal_conv, delta_rule, fused_delta_rule
from glm_lora.model.experts import grouped_linear
from glm_lora.model.fast import active_paths, plain_torch, takes
from glm_lora.model.head import token_logprobs
from glm_lora.model.linear import _LoraProduct
from glm_lora.model.mlp import clamped_swiglu
from glm_lora.model.norm import gated_rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# bfloat16 results keep 8 bits: 2^-9 relative, a little more where two roundings meet.
BF16 = 4e-3
LENGTHS = (5, 1, 200, 64, 130)


@pytest.fixture
def draw():
    """Random tensors, new ones for every test."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    return normal


def off(actual, expected):
    """Relative distance; NaN never passes a comparison."""
    a, b = actual.double(), expected.double()
    return ((a - b).norm() / b.norm()).item()


def both(fast, exact, inputs, limit=BF16):
    """Run both with gradients of one random upstream; the exact side in fp64 or fp32."""
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    got, want = fast(*mine), exact(*theirs)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    ups = [torch.randn_like(x) for x in got]
    for a, b in zip(got, want, strict=True):
        assert off(a, b) < limit
    grads = torch.autograd.grad(got, mine, ups)
    wants = torch.autograd.grad(
        want, theirs, [u.to(b.dtype) for u, b in zip(ups, want, strict=True)]
    )
    for i, (a, b) in enumerate(zip(grads, wants, strict=True)):
        assert off(a, b) < 2 * limit, f"gradient of input {i}"


def test_the_paths_are_active(draw):
    assert takes("fused", draw(1)) and takes("grouped_mm", draw(1))
    assert not any(kernel.startswith("torch (") for kernel in active_paths().values())
    with plain_torch():
        assert not takes("fused", draw(1))


def test_convolution_of_packed_sequences(draw):
    from glm_lora.model.kernels.kda import conv_silu

    batch = pack([[1] * n for n in LENGTHS], device="cuda")
    width, rest, tokens = 512, 8, batch.num_tokens
    weight = draw(3 * width, 4, dtype=torch.float32)

    def exact(mixed):
        parts = [
            F.silu(causal_conv(x[None, :, : 3 * width], weight.double()))[0]
            for x in mixed.split(LENGTHS)
        ]
        return *torch.cat(parts).chunk(3, dim=1), mixed[:, 3 * width :]

    both(lambda x: conv_silu(x, weight, batch.place), exact, [draw(tokens, 3 * width + rest)])


def test_gated_norm(draw):
    weight = draw(128)

    def exact(x, gate):
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        return normed * torch.sigmoid(gate)

    inputs = [draw(77, 3, 128), draw(77, 3, 128)]
    both(lambda x, g: gated_rms_norm(x, g, weight, 1e-5), exact, inputs)


def test_unit_norm(draw):
    from glm_lora.model.kernels.kda import unit

    def exact(x):
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    both(unit, exact, [draw(77, 3, 128)])


@pytest.mark.parametrize("scaled", [False, True])
def test_swiglu(draw, scaled):
    from glm_lora.model.kernels.moe import swiglu

    x = 4 * draw(33, 2 * 640)
    if not scaled:
        both(lambda x: clamped_swiglu(x, 3.0), lambda x: clamped_swiglu(x, 3.0), [x])
        return
    scale = draw(33, dtype=torch.float32)
    exact = lambda x, s: clamped_swiglu(x, 3.0) * s.unsqueeze(-1)  # noqa: E731
    both(lambda x, s: swiglu(x, 3.0, s), exact, [x, scale])


def test_grouped_products_and_moves(draw):
    from glm_lora.model.kernels.moe import from_experts, to_experts

    tokens, k, experts, hidden, width = 301, 4, 16, 256, 128
    weight = draw(experts, width, hidden) / 16
    down = draw(experts, hidden, width) / 16
    chosen = torch.rand(tokens, experts, device="cuda").topk(k).indices
    chosen[chosen == 3] = 4  # an expert without rows
    expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device="cuda"), right=True).int()
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device="cuda")
    place = place.view(tokens, k)

    def fast(x):
        rows = to_experts(x, order // k, place)
        return from_experts(
            grouped_linear(grouped_linear(rows, weight, ends), down, ends), order // k, place
        )

    def exact(x):
        inner = torch.einsum("nh,nkwh->nkw", x, weight.double()[chosen])
        return torch.einsum("nkw,nkhw->nh", inner, down.double()[chosen])

    both(fast, exact, [draw(tokens, hidden)], 2 * BF16)


@pytest.mark.parametrize("tokens", [1, 131])
def test_hyper_connection(draw, tokens):
    from glm_lora.model.kernels import mhc

    hidden, rows = 768, torch.tensor([0] * 4 + [1] * 4 + [2] * 16, device="cuda")
    fn, base = draw(24, 4 * hidden) * 0.02, draw(24, dtype=torch.float32)
    scale = 1 + 0.2 * draw(3, dtype=torch.float32)

    def fast(streams, y):
        x, post, comb, kept = mhc.read(
            streams, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-5
        )
        return x, mhc.write(kept, y + x, post, comb)

    def exact(streams, y):
        x, post, comb = hyper._Read.apply(streams.float(), fn, base, scale[rows], 20, 1e-6, 1e-5)
        return x, hyper._Write.apply(streams.float(), y.float() + x, post, comb)

    both(fast, exact, [draw(tokens, 4, hidden), draw(tokens, hidden)])


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities(draw, entropy):
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


def test_indexer_scores(draw):
    from glm_lora.model.kernels.indexer import scores

    rows, heads, size, pools, first = 150, 8, 64, 90, 240
    query, keys = draw(rows, heads, size), draw(pools, size)
    weights = draw(rows, heads, dtype=torch.float32)
    got = scores(query, weights, keys, first, 4)
    each = torch.relu(torch.einsum("rhd,pd->rhp", query.double(), keys.double()) * size**-0.5)
    want = torch.einsum("rh,rhp->rp", weights.double(), each)
    position = first + torch.arange(rows, device="cuda")
    complete = 4 * torch.arange(pools, device="cuda") + 3 <= position[:, None]
    assert off(got[complete], want[complete]) < 1e-5
    assert (got[~complete] < -1e38).all()


def test_adapted_projection(draw):
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
        return _LoraProduct.apply(x, weight, spans, [2.0, 2.0], *factors)

    both(fast, exact, [draw(301, 256), *factors], 2 * BF16)


@pytest.mark.slow  # the first call compiles for minutes
@pytest.mark.parametrize("lengths", [(256, 256), LENGTHS])
def test_delta_rule(draw, lengths):
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
