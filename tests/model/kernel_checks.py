"""Every Triton kernel against its definition in fp64, on random inputs.

One list of checks for two places: ``tests/gpu/test_kernels.py`` runs it on a GPU, and
``tests/model/test_kernels_interpreted.py`` on CPU tensors in Triton's interpreter. The sizes are
small, and odd on purpose: no multiples of a tile, single rows, nothing at all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from glm_lora.model.delta_rule import causal_conv
from glm_lora.model.head import _block, _fused_block, _Wanted
from glm_lora.model.mlp import clamped_swiglu

FP32 = 2e-6
"""Relative distance of fp32 results: 2^-24 for a rounding, and about ten of them in a row."""


@dataclass
class Bench:
    """Where kernels run, on which dtype, and how near (relative) their results have to come."""

    device: str
    dtype: torch.dtype
    limit: float
    fp32: float = FP32
    """``limit`` where results are fp32 whatever the inputs are."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers, the same in every run."""
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def both(self, fast, exact, inputs: list[Tensor], limit: float | None = None) -> None:
        """Run both with gradients of one random upstream; ``exact`` is given fp64 inputs."""
        limit = limit or self.limit
        mine = [x.clone().requires_grad_() for x in inputs]
        theirs = [x.double().requires_grad_() for x in inputs]
        got, want = fast(*mine), exact(*theirs)
        got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        ups = [self.normal(*x.shape, dtype=x.dtype) for x in got]
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            near(a, b, limit, f"result {i}")
        grads = torch.autograd.grad(got, mine, ups)
        upstream = [u.to(b.dtype) for u, b in zip(ups, want, strict=True)]
        wants = torch.autograd.grad(want, theirs, upstream)
        for i, (a, b) in enumerate(zip(grads, wants, strict=True)):
            near(a, b, 2 * limit, f"gradient of input {i}")


def near(actual: Tensor, expected: Tensor, limit: float, what: str) -> None:
    """Assert a relative distance below ``limit`` (absolute from zeros); NaN never passes."""
    a, b = actual.detach().double(), expected.detach().double()
    assert a.shape == b.shape, f"{what}: {tuple(a.shape)} instead of {tuple(b.shape)}"
    if a.numel():
        distance = ((a - b).norm() / (b.norm() if b.any() else 1.0)).item()
        assert distance < limit, f"{what}: off by {distance:.3g}, limit {limit:.3g}"


def dispatch(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``chosen [N, k]``: order of the rows by expert, where each expert ends, the way back."""
    expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=chosen.device), right=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=chosen.device)
    return order, ends.int(), place.view(chosen.shape)


def gated_norm_of(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    return normed * torch.sigmoid(gate)


def hyper_read(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Block input, post and comb ``[n, from, to]`` as the paper of ``hyper`` has them."""
    flat, rows = streams.flatten(1), torch.tensor([0] * 4 + [1] * 4 + [2] * 16)
    normed = flat / (flat.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    logits = normed @ fn.double().t() * scale.double()[rows.to(scale.device)] + base.double()
    pre, post = torch.sigmoid(logits[:, :4]) + 1e-6, 2 * torch.sigmoid(logits[:, 4:8])
    comb = logits[:, 8:].unflatten(1, (4, 4)).softmax(-1) + 1e-6
    for step in range(39):
        comb = comb / (comb.sum(1 + step % 2, keepdim=True) + 1e-6)
    return torch.einsum("ni,nih->nh", pre, streams), post, comb


class KernelChecks:
    """The checks; a subclass has the fixtures ``bench`` and, for kernels with ``dot``, ``dots``."""

    @pytest.mark.parametrize(
        ("lengths", "width", "rest"),
        [((5, 1, 40, 2, 50), 520, 8), ((2, 1, 30, 3, 1, 28), 256, 3), ((1,), 16, 0), ((), 16, 2)],
    )
    def test_convolution_of_packed_sequences(self, bench, lengths, width, rest):
        from glm_lora.model.kernels.kda import conv_silu

        places = [torch.arange(n, dtype=torch.int32) for n in lengths]
        place = torch.cat([*places, torch.zeros(0, dtype=torch.int32)]).to(bench.device)
        weight = bench.normal(3 * width, 4, dtype=torch.float32)

        def exact(mixed):
            parts = [
                F.silu(causal_conv(x[None, :, : 3 * width], weight.double()))[0]
                for x in mixed.split(lengths)
            ]
            return *torch.cat([*parts, mixed[:0, : 3 * width]]).chunk(3, 1), mixed[:, 3 * width :]

        mixed = bench.normal(sum(lengths), 3 * width + rest)
        bench.both(lambda x: conv_silu(x, weight, place), exact, [mixed])

    @pytest.mark.parametrize("shape", [(77, 3, 128), (1, 1, 16), (3, 8192), (0, 3, 128)])
    def test_gated_norm(self, bench, shape):
        from glm_lora.model.kernels.kda import gated_norm

        weight = bench.normal(shape[-1])
        bench.both(
            lambda x, gate: gated_norm(x, gate, weight, 1e-5),
            lambda x, gate: gated_norm_of(x, gate, weight),
            [bench.normal(*shape), bench.normal(*shape)],
        )

    @pytest.mark.parametrize("shape", [(77, 3, 128), (1, 1, 16), (3, 8192), (0, 3, 128)])
    def test_unit_norm(self, bench, shape):
        from glm_lora.model.kernels.kda import unit

        def exact(x):
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

        bench.both(unit, exact, [bench.normal(*shape)])

    @pytest.mark.parametrize("scaled", [False, True])
    @pytest.mark.parametrize(("rows", "width"), [(33, 640), (1, 1), (3, 2500), (0, 64)])
    def test_swiglu(self, bench, rows, width, scaled):
        from glm_lora.model.kernels.moe import swiglu

        x = 4 * bench.normal(rows, 2 * width)
        if not scaled:
            bench.both(lambda x: swiglu(x, 3.0), lambda x: clamped_swiglu(x, 3.0), [x])
            return
        bench.both(
            lambda x, s: swiglu(x, 3.0, s),
            lambda x, s: clamped_swiglu(x, 3.0) * s.unsqueeze(-1),
            [x, bench.normal(rows, dtype=torch.float32)],
        )

    @pytest.mark.parametrize("column", [0, 5])
    def test_swiglu_does_not_clamp_nan_away(self, bench, column):
        from glm_lora.model.kernels.moe import swiglu

        x = bench.normal(2, 10)
        x[1, column] = float("nan")
        x.requires_grad_()
        y = swiglu(x, 3.0)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert y.isnan().nonzero().tolist() == [[1, 0]]
        assert grad[1, 0].isnan(), "the gate's gradient depends on both"
        assert not grad[0].isnan().any()

    @pytest.mark.parametrize(
        ("tokens", "k", "experts", "hidden"),
        [(33, 4, 16, 256), (17, 8, 288, 2100), (1, 1, 1, 3), (0, 4, 16, 32)],
    )
    def test_moves_to_and_from_experts(self, bench, tokens, k, experts, hidden):
        from glm_lora.model.kernels.moe import from_experts, to_experts

        factor = bench.normal(experts)
        # Of 288 experts most have no row here.
        chosen = bench.normal(tokens, experts, dtype=torch.float32).topk(k).indices
        order, _, place = dispatch(chosen, experts)
        token, own = order // k, factor[chosen.flatten()[order]].unsqueeze(1)

        def fast(x):
            return from_experts(to_experts(x, token, place) * own, token, place)

        def exact(x):
            return x * factor.double()[chosen].sum(1, keepdim=True)

        # A row is rounded after its factor, and the sum can be smaller than its terms.
        bench.both(fast, exact, [bench.normal(tokens, hidden)], 2 * bench.limit)

    @pytest.mark.parametrize(("tokens", "hidden"), [(67, 768), (1, 256), (3, 2304)])
    def test_hyper_connection(self, dots, tokens, hidden):
        from glm_lora.model.kernels import mhc

        fn, base = dots.normal(24, 4 * hidden) * 0.02, dots.normal(24, dtype=torch.float32)
        scale = 1 + 0.2 * dots.normal(3, dtype=torch.float32)

        def fast(streams, y):
            x, post, comb, kept = mhc.read(
                streams, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-5
            )
            return x, mhc.write(kept, y + x, post, comb)

        def exact(streams, y):
            x, post, comb = hyper_read(streams, fn, base, scale)
            mixed = torch.einsum("nij,nih->njh", comb, streams)
            return x, mixed + post.unsqueeze(-1) * (y + x).unsqueeze(1)

        dots.both(fast, exact, [dots.normal(tokens, 4, hidden), dots.normal(tokens, hidden)])

    @pytest.mark.parametrize("entropy", [False, True])
    @pytest.mark.parametrize(
        ("rows", "cuts"), [(9, (0, 5003)), (7, (0, 4096, 4097, 9000)), (1, (0, 1)), (0, (0, 50))]
    )
    def test_head_of_a_cut_vocabulary(self, bench, rows, cuts, entropy):
        from glm_lora.model.kernels.head import factors_, statistics

        logits = 3 * bench.normal(rows, cuts[-1])
        # The first and the last token of every part, then others.
        edges = [t for a, b in itertools.pairwise(cuts) for t in (a, b - 1)]
        targets = torch.tensor([*edges, *range(rows)][:rows], dtype=torch.int64) % cuts[-1]
        targets = targets.to(bench.device)
        z = logits.double() / 0.7
        log_sum, log_share = z.logsumexp(-1), z.log_softmax(-1)
        disorder = -(log_share * log_share.exp()).sum(-1)
        wanted = [F.one_hot(targets, cuts[-1]) - log_share.exp()]
        if entropy:
            wanted.append(-(log_share + disorder.unsqueeze(-1)) * log_share.exp())
        own_z = z.gather(1, targets.unsqueeze(1)).squeeze(1)
        for first, end in itertools.pairwise(cuts):
            block, part = logits[:, first:end].contiguous(), z[:, first:end]
            top, total, product, own = statistics(block, targets, first, 0.7)
            power = (part - part.amax(-1, keepdim=True)).exp()
            near(top, part.amax(-1), bench.fp32, "largest logit")
            near(total, power.sum(-1), bench.fp32, "partition function")
            near(product, (power * part).sum(-1), 4 * bench.fp32, "mean logit")
            mine = (targets >= first) & (targets < end)
            near(own[mine], own_z[mine], bench.fp32, "logit of the target")
            assert not own[~mine].any()
            kept = disorder.float() if entropy else None
            factors = factors_(block, targets, first, log_sum.float(), kept, 0.7)
            for got, want in zip(factors, wanted, strict=True):
                # log p of 20 and more has an absolute error of 2^-20, and is exponentiated.
                near(got, want[:, first:end], max(bench.limit, 4 * bench.fp32), "factor")

    def test_head_on_one_rank(self, bench):
        logits, targets = 3 * bench.normal(5, 70), torch.arange(5, device=bench.device) * 17
        wanted = _Wanted(entropy=True, gradient=True, entropy_gradient=True)
        want = _block(logits.clone(), targets, 0.7, wanted, None, 0)
        got = _fused_block(logits, targets, 0.7, wanted, None, 0)
        near(got[0], want[0], 4 * bench.fp32, "log-probability")
        near(got[1], want[1], 4 * bench.fp32, "entropy")
        for a, b in zip(got[2], want[2], strict=True):
            near(a, b, 2 * bench.limit, "factor")

    @pytest.mark.parametrize(
        ("rows", "heads", "size", "pools", "first", "pool"),
        [
            (150, 4, 64, 90, 240, 4),
            (70, 5, 32, 130, 0, 8),  # most pools are not complete
            (1, 1, 16, 1, 3, 4),
            (3, 2, 16, 140, 200, 1),
            (2, 3, 16, 0, 0, 4),
            (0, 3, 16, 5, 9, 4),
        ],
    )
    def test_indexer_scores(self, dots, rows, heads, size, pools, first, pool):
        from glm_lora.model.kernels.indexer import scores

        query, keys = dots.normal(rows, heads, size), dots.normal(pools, size)
        weights = dots.normal(rows, heads, dtype=torch.float32)
        got = scores(query, weights, keys, first, pool)
        each = torch.relu(torch.einsum("rhd,pd->rhp", query.double(), keys.double()) * size**-0.5)
        want = torch.einsum("rh,rhp->rp", weights.double(), each)
        position = first + torch.arange(rows, device=dots.device)
        last = pool * torch.arange(pools, device=dots.device) + pool - 1
        complete = last <= position[:, None]
        # Sums over heads with both signs: fp32, whatever the inputs are.
        near(got[complete], want[complete], 1e-5, "scores")
        assert got.shape == (rows, pools)
        assert (got[~complete] < -1e38).all()

    def test_indexer_scores_do_not_hide_nan(self, dots):
        from glm_lora.model.kernels.indexer import scores

        query, keys = dots.normal(2, 1, 16), dots.normal(3, 16)
        query[1, 0, 4] = float("nan")
        weights = torch.ones(2, 1, device=dots.device)
        assert scores(query, weights, keys, 40, 4).isnan().tolist() == [[False] * 3, [True] * 3]
