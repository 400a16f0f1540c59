"""The two sequence kernels of KDA in plain torch: causal convolution and gated delta rule.

Shapes: B sequences, L positions, h local heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm_lora.model.norm import unit_norm

_LARGEST_EXPONENT = 80.0  # exp(80) * 1000 is still finite in fp32, exp(-80) / 1000 still normal


class _CausalConv(torch.autograd.Function):
    """Depthwise causal convolution with a frozen weight: nothing but the weight is kept."""

    @staticmethod
    def forward(ctx: Any, x_BLC: Tensor, weight_CK: Tensor) -> Tensor:
        ctx.save_for_backward(weight_CK)
        length, last = x_BLC.shape[1], weight_CK.shape[1] - 1
        out = x_BLC * weight_CK[:, last]
        for back in range(1, min(last + 1, length)):
            out[:, back:].addcmul_(x_BLC[:, : length - back], weight_CK[:, last - back])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight_CK,) = ctx.saved_tensors
        dy = grads[0]
        length, last = dy.shape[1], weight_CK.shape[1] - 1
        dx = dy * weight_CK[:, last]
        for back in range(1, min(last + 1, length)):
            dx[:, : length - back].addcmul_(dy[:, back:], weight_CK[:, last - back])
        return dx, None


def causal_conv(x_BLC: Tensor, weight_CK: Tensor) -> Tensor:
    """Each channel convolved over its last K positions: ``y_t = sum_s w[K-1-s] x[t-s]``.

    Computed in the weight's dtype (fp32). Starts from zeros, as every sequence does.
    """
    x_BLC = x_BLC.to(weight_CK.dtype)
    return _CausalConv.apply(x_BLC, weight_CK)  # pyright: ignore[reportReturnType]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, lower_bound: float
) -> Tensor:
    """Gated delta rule with a decay per channel (Kimi Linear, arXiv 2510.26692, section 3).

    The state obeys ``S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T`` and
    ``o_t = S_t^T q_t / sqrt(d)`` with unit q and k. Within a chunk the products of Householder
    factors are one unit-triangular system (WY form), solved at once; chunks follow each other
    through the state. The decays between two positions are split at the chunk's middle, which
    bounds every exponent, so that the pairwise terms are plain matrix products.

    Args:
        q: ``[B, L, h, d]``, not yet normalised.
        k: As ``q``.
        v: As ``q``.
        log_decay: g, ``[B, L, h, d]``, between ``lower_bound`` and 0.
        beta: ``[B, L, h]``.
        lower_bound: Smallest possible g (negative); decides the chunk length.

    Returns:
        ``[B, L, h, d]`` in the dtype of ``v``; all arithmetic is fp32.
    """
    dtype, length = v.dtype, v.shape[1]
    q, k, v, g = (x.transpose(1, 2).float() for x in (q, k, v, log_decay))
    beta = beta.transpose(1, 2).float().unsqueeze(-1)
    q, k = unit_norm(q) * q.shape[-1] ** -0.5, unit_norm(k)
    chunk = chunk_length(length, lower_bound)
    if chunk >= length:
        out, _ = _chunk(q, k, v * beta, g, beta, None, last=True)
        return out.transpose(1, 2).to(dtype)
    state, outs = None, []
    for start in range(0, length, chunk):
        part = slice(start, start + chunk)
        qc, kc, vc, gc, bc = (x[:, :, part] for x in (q, k, v, g, beta))
        last = start + chunk >= length
        out, state = _chunk(qc, kc, vc * bc, gc, bc, state, last=last)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2).to(dtype)


def chunk_length(length: int, lower_bound: float) -> int:
    """Positions per chunk: as long as half a chunk's decay fits into fp32's exponent."""
    return max(1, min(length, 2 * int(_LARGEST_EXPONENT / max(-lower_bound, 1e-3))))


def _chunk(
    q: Tensor,
    k: Tensor,
    v_beta: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    last: bool,
) -> tuple[Tensor, Tensor | None]:
    """One chunk, ``[B, h, C, d]``: its outputs and the state after it (None when ``last``)."""
    length = k.shape[2]
    total = g.cumsum(2)
    middle = total[:, :, (length - 1) // 2 : (length - 1) // 2 + 1]
    rise = (total - middle).exp()
    fall = (middle - total).exp()
    k_rise, k_fall, q_rise = k * beta * rise, k * fall, q * rise
    pairs = torch.cat([k_rise, q_rise], dim=2) @ k_fall.transpose(-1, -2)
    solve = pairs[:, :, :length].tril(-1)
    attend = pairs[:, :, length:].tril()
    right = v_beta
    if state is not None:
        # exp(total) = rise * exp(middle): move the state to the chunk's middle once.
        moved = state * middle.exp().transpose(-1, -2)
        right = v_beta - k_rise @ moved
    update = torch.linalg.solve_triangular(
        solve + torch.eye(length, dtype=solve.dtype, device=solve.device),
        right,
        upper=False,
        unitriangular=True,
    )
    out = attend @ update
    if state is not None:
        out = out + q_rise @ moved
    if last:
        return out, None
    end = total[:, :, -1:]
    new = (k * (end - total).exp()).transpose(-1, -2) @ update
    if state is not None:
        new = new + state * end.exp().transpose(-1, -2)
    return out, new
