"""Kernels against their definitions, written out in fp64."""

from __future__ import annotations

import pytest
import torch

from glm_lora.model.delta_rule import causal_conv, chunk_length, delta_rule
from glm_lora.model.experts import grouped_linear
from glm_lora.model.hyper import sinkhorn
from glm_lora.model.mlp import clamped_swiglu
from tests.support import close


def recurrence(q, k, v, g, beta):
    """The delta rule, one position after another; ``[B, L, h, d]``, fp64."""
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error * beta[:, t, :, None])
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


@pytest.mark.parametrize("decay", ["mixed", "strongest", "none"])
@pytest.mark.parametrize("length", [1, 2, 5, 31, 32, 33, 64, 70])
def test_delta_rule_and_its_gradient(length, decay):
    generator = torch.Generator().manual_seed(length)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (2, length, 3, 4)
    q, k, v = noise(*shape), noise(*shape), noise(*shape)
    g = {
        "mixed": -5 * torch.sigmoid(3 * noise(*shape)),
        "strongest": torch.full(shape, -5.0, dtype=torch.float64),
        "none": torch.zeros(shape, dtype=torch.float64),
    }[decay]
    beta = torch.sigmoid(noise(*shape[:3]))
    weight = noise(*shape)
    exact = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    want = recurrence(*exact)
    want_grads = torch.autograd.grad((want * weight).sum(), exact)
    ours = [x.float().requires_grad_() for x in (q, k, v, g, beta)]
    got = delta_rule(*ours, lower_bound=-5.0)
    grads = torch.autograd.grad((got * weight.float()).sum(), ours)
    # fp32 rounding of a cumulated decay of up to 160 is 1e-5, and it is exponentiated.
    close(got, want, "fp32 exponents up to 80", atol=2e-5)
    for name, actual, expected in zip(["q", "k", "v", "g", "beta"], grads, want_grads, strict=True):
        scale = expected.abs().max().item() + 1e-3
        close(actual, expected, f"gradient of {name}", atol=1e-4 * scale)


def test_chunks_keep_exponents_in_range():
    assert chunk_length(5, -5.0) == 5
    assert chunk_length(1000, -5.0) == 32
    assert chunk_length(1000, -200.0) == 1
    assert chunk_length(1000, 0.0) == 1000


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_causal_conv_equals_conv1d(length):
    x = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64)
    want = torch.nn.functional.conv1d(x.transpose(1, 2), weight.unsqueeze(1), padding=3, groups=6)[
        :, :, :length
    ].transpose(1, 2)
    got = causal_conv(x, weight)
    close(got, want, "fp64", atol=1e-12)
    up = torch.randn_like(got)
    (want_grad,) = torch.autograd.grad(want, x, up)
    (grad,) = torch.autograd.grad(got, x, up)
    close(grad, want_grad, "fp64", atol=1e-12)


def test_clamped_swiglu_gradient():
    gate_up = (4 * torch.randn(5, 12, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clamped_swiglu(x, 1.5), (gate_up,))
    gate, up = gate_up.chunk(2, -1)
    want = torch.nn.functional.silu(gate.clamp(max=1.5)) * up.clamp(-1.5, 1.5)
    close(clamped_swiglu(gate_up, 1.5), want, "fp64", atol=1e-12)


def test_grouped_linear_skips_experts_without_rows():
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 3, dtype=torch.float64)
    counts = [2, 0, 3, 1]
    expert = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    want = torch.einsum("ni,noi->no", x, weight[expert])
    close(grouped_linear(x, weight, counts), want, "fp64", atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: grouped_linear(x, weight, counts), (x,))


def test_sinkhorn_is_nearly_doubly_stochastic():
    matrix, kept = sinkhorn(torch.rand(4, 4, 7) + 0.1, 20, 1e-6)
    close(matrix.sum(0), torch.ones(4, 7), "columns were normalised last", atol=1e-5)
    close(matrix.sum(1), torch.ones(4, 7), "20 iterations converge", atol=1e-4)
    assert len(kept) == 2 * 39
