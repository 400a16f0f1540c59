"""The two sequence kernels of KDA: causal convolution and gated delta rule.

Shapes: B sequences, L positions, h local heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm_lora.model.batch import ModelBatch
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
    v, g = (x.transpose(1, 2).float().contiguous() for x in (v, log_decay))
    beta = beta.transpose(1, 2).float().contiguous().unsqueeze(-1)
    q, k = unit_norm(torch.stack([q, k]).transpose(2, 3).float().contiguous()).unbind()
    chunk = chunk_length(length, lower_bound)
    if chunk >= length:
        out, _ = _chunk(q, k, v, g, beta, None, True)
        return out.transpose(1, 2).to(dtype)
    state, outs = None, []
    for start in range(0, length, chunk):
        part = slice(start, start + chunk)
        inputs = (x[:, :, part] for x in (q, k, v, g, beta))
        out, state = _chunk(*inputs, state, start + chunk >= length)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2).to(dtype)


def fused_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    log_rate: Tensor,
    time_bias: Tensor,
    lower_bound: float,
    batch: ModelBatch,
) -> Tensor:
    """``delta_rule`` by flash-linear-attention's kernel, with its decay and beta gates.

    Args:
        q: ``[N, h, d]``, all sequences of ``batch`` behind each other; not yet normalised.
        k: As ``q``.
        v: As ``q``.
        decay: f, ``[N, h, d]``: g is ``lower_bound * sigmoid(exp(log_rate) (f + time_bias))``.
        beta: ``[N, h]``, before its sigmoid.
        log_rate: fp32 ``[h]``.
        time_bias: fp32 ``[h d]``.
        lower_bound: Between -5 and 0.
        batch: Says where sequences begin.

    Returns:
        ``[N, h, d]``.
    """
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    from glm_lora.model.kernels.kda import unit

    # Its own norm is tuned again for every 1024 tokens more, and other kernels for every number of
    # rows: hence the norm before it, and one row always.
    one = len(batch.bounds) == 2
    bounds = {} if one else {"cu_seqlens": batch.device_bounds, "cu_seqlens_cpu": batch.bounds}
    out, _ = chunk_kda(
        *(x.unsqueeze(0) for x in (unit(q), unit(k), v, decay, beta)),
        A_log=log_rate,
        dt_bias=time_bias,
        lower_bound=lower_bound,
        safe_gate=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        **bounds,
    )
    return out.squeeze(0)


def chunk_length(length: int, lower_bound: float) -> int:
    """Positions per chunk: as long as half a chunk's decay fits into fp32's exponent."""
    return max(1, min(length, 2 * int(_LARGEST_EXPONENT / max(-lower_bound, 1e-3))))


def _solve(lower: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """``(I + tril(lower, -1))^-1 right``, or with the transposed matrix; ``[..., C, d]``.

    Written as ``x A = b`` on transposed operands: LAPACK's column order is then torch's row order,
    and neither input nor result is copied or left with swapped strides.
    """
    matrix = lower if transposed else lower.transpose(-1, -2)
    return torch.linalg.solve_triangular(
        matrix, right.transpose(-1, -2), upper=not transposed, left=False, unitriangular=True
    ).transpose(-1, -2)


class _Chunk(torch.autograd.Function):
    """One chunk, ``[B, h, C, d]``: its outputs and the state ``[B, h, d, d]`` after it.

    With G the cumulated log-decay, ``rise = exp(G - middle)`` and ``fall = exp(middle - G)``:
    ``(I + tril(k_rise k_fall^T, -1)) U = beta v - k_rise S`` and
    ``o = tril(q_rise k_fall^T) U + q_rise S``, S being the state moved to the middle. No result
    depends on the choice of the middle, so no gradient goes through it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        length = k.shape[2]
        total = g.cumsum(2)
        middle = total[:, :, (length - 1) // 2].unsqueeze(2)
        rise = (total - middle).exp_()
        fall = rise.reciprocal()
        k_rise = k * beta
        scale = q.shape[-1] ** -0.5
        rising = torch.cat([k_rise.mul_(rise), (q * rise).mul_(scale)], dim=2)
        falling = k * fall
        pairs = rising @ falling.transpose(-1, -2)
        solve, attend = pairs[:, :, :length], pairs[:, :, length:].tril()
        right, moved = v * beta, None
        if state is not None:
            moved = state * middle.exp().transpose(-1, -2)
            right = right - rising[:, :, :length] @ moved
        update = _solve(solve, right)
        out = attend @ update
        if moved is not None:
            out += rising[:, :, length:] @ moved
        new, leave, remain = None, None, None
        if not last:
            leave = (total[:, :, -1:] - total).exp_()
            remain = total[:, :, -1:].exp().transpose(-1, -2)
            new = (k * leave).transpose(-1, -2) @ update
            if state is not None:
                new += state * remain
        ctx.save_for_backward(
            *(k, v, beta, rise, fall, rising, falling, solve, attend, update),
            *(state, moved, middle, leave, remain),
        )
        return out, new

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        k, v, beta, rise, fall, rising, falling, *rest = ctx.saved_tensors
        solve, attend, update, state, moved, middle, leave, remain = rest
        d_out, d_new = grads
        assert d_out is not None
        length = k.shape[2]
        d_update = attend.transpose(-1, -2) @ d_out
        if d_new is not None and leave is not None:
            d_update += (k * leave) @ d_new
        d_right = _solve(solve, d_update, transposed=True)
        d_pairs = torch.cat([d_right.neg(), d_out], dim=2) @ update.transpose(-1, -2)
        d_pairs[:, :, :length].tril_(-1)
        d_pairs[:, :, length:].tril_()
        d_rising = d_pairs @ falling
        d_falling = d_pairs.transpose(-1, -2) @ rising
        d_state = None
        if moved is not None:
            signed = torch.cat([d_right.neg(), d_out], dim=2)
            d_rising += signed @ moved.transpose(-1, -2)
            d_state = (rising.transpose(-1, -2) @ signed) * middle.exp().transpose(-1, -2)
        # d exp(x) = exp(x) dx: each factor carries its own gradient back to G.
        carried = d_rising * rising
        d_total = (carried[:, :, :length] + carried[:, :, length:]).sub_(d_falling * falling)
        d_k_beta = d_rising[:, :, :length] * rise
        d_q = (d_rising[:, :, length:] * rise).mul_(k.shape[-1] ** -0.5)
        d_k = (d_falling * fall).addcmul_(d_k_beta, beta)
        d_beta = (d_k_beta * k).addcmul_(d_right, v).sum(-1, keepdim=True)
        if d_new is not None and leave is not None and remain is not None:
            d_leave = update @ d_new.transpose(-1, -2) * leave
            d_k += d_leave
            d_leave *= k
            d_total -= d_leave
            d_total[:, :, -1] += d_leave.sum(2)
            if state is not None:
                kept = d_new * remain
                d_total[:, :, -1] += (kept * state).sum(-1)
                d_state = kept if d_state is None else d_state + kept
        d_g = d_total.flip(2).cumsum(2).flip(2)
        return d_q, d_k, d_right * beta, d_g, d_beta, d_state, None


def _chunk(*inputs: Any) -> tuple[Tensor, Tensor | None]:
    return _Chunk.apply(*inputs)  # pyright: ignore[reportReturnType]
