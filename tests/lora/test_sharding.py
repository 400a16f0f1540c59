"""The sharding rules, against the algebra they come from."""

from __future__ import annotations

import pytest
import torch

from glm_lora.arch.projections import Kind
from glm_lora.lora.sharding import is_partial, local_shape, local_slice, tp_axis
from tests.support import close

T = 4


@pytest.mark.parametrize("kind", [Kind.COLUMN, Kind.ROW])
def test_shards_compute_the_whole_delta_and_partial_gradients_add_up(kind):
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = noise(3, 8).requires_grad_(), noise(12, 3).requires_grad_()
    x, dy = noise(5, 8), noise(5, 12)
    want = x @ a.t() @ b.t()
    da, db = torch.autograd.grad(want, (a, b), dy)
    outs, grads = [], []
    for rank in range(T):
        part_a = local_slice((3, 8), tp_axis(kind, "A"), T, rank)
        part_b = local_slice((12, 3), tp_axis(kind, "B"), T, rank)
        own_a = a.detach()[part_a].requires_grad_()
        own_b = b.detach()[part_b].requires_grad_()
        assert tuple(own_a.shape) == local_shape((3, 8), tp_axis(kind, "A"), T)
        assert tuple(own_b.shape) == local_shape((12, 3), tp_axis(kind, "B"), T)
        own_x = x[:, part_a[1]]
        out = own_x @ own_a.t() @ own_b.t()
        own_dy = dy[:, part_b[0]]
        outs.append(out)
        grads.append(torch.autograd.grad(out, (own_a, own_b), own_dy))
    got = torch.cat(outs, 1) if kind is Kind.COLUMN else sum(outs)
    close(got, want, "fp64", atol=1e-12)
    for i, (letter, full) in enumerate((("A", da), ("B", db))):
        parts = [g[i] for g in grads]
        axis = tp_axis(kind, letter)
        if is_partial(kind, letter, sequence_parallel=False):
            assert axis is None
            close(sum(parts), full, "summed over ranks", atol=1e-12)
        else:
            close(torch.cat(parts, axis), full, "each rank has its own part whole", atol=1e-12)


def test_replicated_projections_are_partial_only_when_tokens_are_cut():
    for letter in ("A", "B"):
        assert tp_axis(Kind.REPLICATED, letter) is None
        assert is_partial(Kind.REPLICATED, letter, sequence_parallel=True)
        assert not is_partial(Kind.REPLICATED, letter, sequence_parallel=False)
