"""Drawing tokens by inverting the cumulative distribution."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_lora.rollout.sampling import draw, left_padded, uniforms
from tests.support import close


def test_draw_matches_the_distribution_written_out():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator) * 4
    temperature = torch.linspace(0.3, 2.0, 64)
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(logits, temperature, u)
    p = torch.softmax(logits.double() / temperature[:, None].double(), dim=-1).numpy()
    for row in range(64):
        boundaries = np.cumsum(p[row])
        assert tokens[row] == np.searchsorted(boundaries, float(u[row]), side="right")
        close(logprobs[row], np.log(p[row][tokens[row]]), "fp32 log-softmax", atol=1e-5)


@given(st.floats(0, 1, exclude_max=True), st.lists(st.booleans(), min_size=2, max_size=40))
def test_a_token_of_probability_zero_is_never_drawn(u, allowed):
    if not any(allowed):
        allowed[0] = True
    logits = torch.where(torch.tensor(allowed), 0.0, float("-inf"))[None]
    token, logprob = draw(logits, torch.ones(1), torch.tensor([u], dtype=torch.float64))
    assert allowed[int(token)]
    close(logprob[0], -np.log(sum(allowed)), "uniform over the allowed", atol=1e-5)


def test_numbers_depend_on_both_seeds_and_nothing_else():
    first = uniforms(1, 2, 4, 8)
    assert first.shape == (4, 8) and first.min() >= 0 and first.max() < 1
    assert np.array_equal(first[:2], uniforms(1, 2, 2, 8))
    assert not np.array_equal(first, uniforms(2, 1, 4, 8))
    assert not np.array_equal(first, uniforms(1, 3, 4, 8))


def test_left_padding():
    ids, mask = left_padded([[5, 6, 7], [8]], torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask is not None and mask.tolist() == [[True] * 3, [False, False, True]]
    assert left_padded([[5], [8]], torch.device("cpu"))[1] is None
