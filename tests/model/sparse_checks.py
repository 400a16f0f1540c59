"""Cases of the sparse attention kernels and their definition; for the interpreter and for GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """The last ``rows`` tokens of one sequence look at what was chosen for them."""

    length: int
    rows: int
    heads: int
    width: int
    v_width: int
    latent: int
    kept: int
    """Pools chosen for each query."""
    pool: int = 4
    unused: float = 0.0
    """Share of the choices that are left out (-1)."""


CASES = {
    "8 heads": Case(37, 9, 8, 12, 10, 32, 5),
    "64 heads": Case(70, 5, 64, 16, 16, 64, 9),
    "more heads than a program takes": Case(50, 3, 70, 8, 8, 32, 4),
    "no size is a power of two": Case(41, 6, 3, 7, 10, 32, 7, pool=3),
    "half of the choices unused": Case(30, 6, 8, 8, 8, 32, 4, unused=0.5),
    "nothing chosen, and whole pools": Case(30, 6, 8, 8, 8, 32, 4, unused=1.0),
    "from the first token on": Case(6, 6, 2, 8, 8, 32, 3),
    "several tiles": Case(420, 2, 16, 8, 8, 64, 70),
}
"""Small ones for the interpreter, odd on purpose."""


@dataclass(frozen=True)
class Inputs:
    """Random tensors of a case; ``up`` is the gradient of the result."""

    q: Tensor
    latents: Tensor
    weight: Tensor
    chosen: Tensor
    up: Tensor


def draw(case: Case, device: str, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Scores of order one, so that neither one token nor all of them decide the result."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    first = case.length - case.rows
    chosen = torch.full((case.rows, case.kept), -1, dtype=torch.int32)
    for row in range(case.rows):
        complete = (first + row + 1) // case.pool
        some = torch.randperm(complete, generator=generator)[: case.kept].int()
        chosen[row, : len(some)] = some
    left_out = torch.rand(chosen.shape, generator=generator) < case.unused
    chosen = chosen.masked_fill(left_out, -1)
    weight = normal(case.heads, case.width + case.v_width, case.latent) / case.latent**0.5
    tensors = (
        normal(case.rows, case.heads, case.width),
        normal(case.length, case.latent),
        weight,
    )
    q, latents, weight = (x.to(device, dtype) for x in tensors)
    up = normal(case.rows, case.heads, case.v_width).to(device, dtype)
    return Inputs(q, latents, weight, chosen.to(device), up)


def seen_tokens(chosen: Tensor, length: int, pool: int) -> Tensor:
    """Tokens each of the last queries sees, bool ``[R, L]``, written out one by one."""
    rows = chosen.shape[0]
    seen = torch.zeros(rows, length, dtype=torch.bool)
    for row, pools in enumerate(chosen.tolist()):
        position = length - rows + row
        tail = (position + 1) // pool
        for one in [p for p in pools if p >= 0] + [tail]:
            seen[row, one * pool : min((one + 1) * pool, position + 1)] = True
    return seen.to(chosen.device)


def definition(
    q: Tensor, latents: Tensor, weight: Tensor, chosen: Tensor, pool: int, scale: float
) -> Tensor:
    """Keys and values of every head and token, a mask, a softmax; zero where nothing is seen."""
    seen = seen_tokens(chosen, latents.shape[0], pool)
    k, v = torch.einsum("ld,hed->lhe", latents, weight).split(
        [q.shape[2], weight.shape[1] - q.shape[2]], dim=2
    )
    score = torch.einsum("rhe,lhe->hrl", q, k) * scale
    lowest = torch.finfo(score.dtype).min
    share = score.masked_fill(~seen, lowest).softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum("hrl,lhe->rhe", share, v)


def distances(inputs: Inputs, pool: int) -> dict[str, float]:
    """Relative distances of result and gradients from the definition in fp64."""
    from glm_lora.model.kernels.sparse import sparse_attention

    scale = inputs.q.shape[2] ** -0.5
    mine = [x.clone().requires_grad_() for x in (inputs.q, inputs.latents)]
    theirs = [x.double().requires_grad_() for x in (inputs.q, inputs.latents)]
    got = sparse_attention(*mine, inputs.weight, inputs.chosen, pool, scale)
    want = definition(*theirs, inputs.weight.double(), inputs.chosen, pool, scale)
    grads = torch.autograd.grad(got, mine, inputs.up)
    wants = torch.autograd.grad(want, theirs, inputs.up.double())
    pairs = {
        "result": (got, want),
        "gradient of q": (grads[0], wants[0]),
        "gradient of latents": (grads[1], wants[1]),
    }
    return {name: _off(a, b) for name, (a, b) in pairs.items()}


def _off(actual: Tensor, expected: Tensor) -> float:
    """NaN never passes a comparison."""
    a, b = actual.detach().double(), expected.detach()
    return ((a - b).norm() / b.norm()).item()
