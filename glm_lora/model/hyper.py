"""Manifold-constrained hyper-connections (Xie et al. 2026): four residual streams per token.

Per token a block reads ``sum_i pre_i stream_i`` and writes ``stream_j <- post_j y +
sum_i comb_ij stream_i`` with ``comb`` made doubly stochastic. The weights come from the RMS-normed
streams through one small frozen matrix, in fp32. All of it is per token: no communication.
Shapes: n tokens, m streams, H hidden; the small tensors keep the tokens last, ``[m, m, n]``, so
that sums over streams run along contiguous memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glm_lora.arch.spec import ModelSpec
from glm_lora.model.fast import takes
from glm_lora.model.parallel import ParallelContext


def sinkhorn(matrix: Tensor, iterations: int, eps: float) -> tuple[Tensor, list[Tensor]]:
    """Make positive ``[m, m, n]`` matrices (from, to, token) nearly doubly stochastic.

    Columns are normalised first, then rows and columns in turn. The second result is what
    ``sinkhorn_backward`` needs.
    """
    kept: list[Tensor] = []
    for step in range(2 * iterations - 1):
        total = matrix.sum(step % 2, keepdim=True).add_(eps)
        matrix = matrix / total
        kept += [matrix, total]
    return matrix, kept


def sinkhorn_backward(d_matrix: Tensor, kept: Sequence[Tensor]) -> Tensor:
    """Gradient of ``sinkhorn``: ``y = x / total(x)`` gives ``dx = (dy - sum(dy y)) / total``."""
    for step in reversed(range(len(kept) // 2)):
        matrix, total = kept[2 * step], kept[2 * step + 1]
        d_matrix = (d_matrix - (d_matrix * matrix).sum(step % 2, keepdim=True)).div_(total)
    return d_matrix


def _weighted_sum(weights: Tensor, streams: Tensor) -> Tensor:
    """``sum_i weights[i, n] streams[n, i]``: ``[n, H]``."""
    out = streams[:, 0] * weights[0].unsqueeze(-1)
    for i in range(1, streams.shape[1]):
        out.addcmul_(streams[:, i], weights[i].unsqueeze(-1))
    return out


class _Read(torch.autograd.Function):
    """Streams to (block input, post, comb); the weights of the connection are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        m = streams.shape[1]
        fp32 = streams.float()
        flat = fp32.flatten(1)
        # The RMS is one factor per token, so it commutes with the projection.
        mean = torch.linalg.vector_norm(flat, dim=-1).square_().div_(flat.shape[1])
        inverse = mean.add_(norm_eps).rsqrt_()
        raw = fn.float() @ flat.t()
        logits = torch.addcmul(base.unsqueeze(-1), raw * inverse, scale.unsqueeze(-1))
        gates = torch.sigmoid(logits[: 2 * m])
        pre = gates[:m] + eps
        soft = logits[2 * m :].view(m, m, -1).softmax(dim=1)
        comb, kept = sinkhorn(soft + eps, iterations, eps)
        ctx.save_for_backward(streams, fn, scale, inverse, raw, gates, pre, soft, *kept)
        return _weighted_sum(pre, fp32).to(streams.dtype), 2 * gates[m:], comb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        d_read, d_post, d_comb = grads
        streams, fn, scale, inverse, raw, gates, pre, soft, *kept = ctx.saved_tensors
        m, fp32 = streams.shape[1], streams.float()
        d_read = d_read.float().unsqueeze(1)
        d_gates = torch.cat([(fp32 * d_read).sum(-1).t(), 2 * d_post])
        d_gates.mul_(gates).mul_(1 - gates)
        d_soft = sinkhorn_backward(d_comb, kept).mul_(soft)
        d_soft.sub_(soft * d_soft.sum(1, keepdim=True))
        d_logits = torch.cat([d_gates, d_soft.flatten(0, 1)]).mul_(scale.unsqueeze(-1))
        # inverse = (|x|^2 / K + eps)^(-1/2)  =>  d inverse / dx = -inverse^3 x / K
        along = (d_logits * raw).sum(0).mul_(inverse.pow(3)).div_(-m * streams.shape[2])
        d_streams = torch.empty_like(fp32)
        torch.mul(pre.t().unsqueeze(-1), d_read, out=d_streams)
        d_flat = d_streams.view(d_streams.shape[0], -1)
        d_flat.addmm_((d_logits * inverse).t(), fn.float())
        d_flat.addcmul_(fp32.flatten(1), along.unsqueeze(-1))
        return d_streams.to(streams.dtype), None, None, None, None, None, None


class _Write(torch.autograd.Function):
    """``out_j = post_j y + sum_i comb_ij stream_i``."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        # Contiguous per token: batched products of strided small matrices take a slow path.
        mix = comb.permute(2, 1, 0).to(streams.dtype).contiguous()
        ctx.save_for_backward(streams, y, post, mix)
        out = torch.bmm(mix, streams)
        return out.addcmul_(post.t().to(y.dtype).unsqueeze(-1), y.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        streams, y, post, mix = ctx.saved_tensors
        d_out = grads[0].contiguous()
        d_streams = None
        if ctx.needs_input_grad[0]:
            d_streams = torch.bmm(mix.transpose(1, 2), d_out)
        d_y = _weighted_sum(post.to(y.dtype), d_out)
        d_post = (d_out * y.unsqueeze(1)).sum(-1).t().float()
        d_comb = torch.bmm(d_out, streams.transpose(1, 2)).permute(2, 1, 0).float()
        return d_streams, d_y, d_post, d_comb.contiguous()


class HyperConnection(nn.Module):
    """The reading and writing weights of one block; all parameters are replicated and frozen."""

    def __init__(self, spec: ModelSpec, ctx: ParallelContext, dtype: torch.dtype) -> None:
        super().__init__()
        self.iterations = spec.hc_sinkhorn_iters
        self.eps, self.norm_eps = spec.hc_eps, spec.rms_norm_eps
        m = spec.hc_mult
        width = (2 + m) * m

        def frozen(*shape: int, of: torch.dtype = torch.float32) -> nn.Parameter:
            empty = torch.empty(*shape, dtype=of, device=ctx.device)
            return nn.Parameter(empty, requires_grad=False)

        self.fn = frozen(width, m * spec.hidden_size, of=dtype)
        self.base, self.scale = frozen(width), frozen(3)
        # Which of the three scales each row of fn takes: pre, post or comb.
        self.scale_of_row = torch.tensor([0] * m + [1] * m + [2] * m * m, device=ctx.device)

    def named_base(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters by the last part of their disk name."""
        yield "fn", self.fn
        yield "base", self.base
        yield "scale", self.scale

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Collapse the streams into a block's input.

        Args:
            streams: ``[n, m, H]``.

        Returns:
            The block's input ``[n, H]`` and what ``write`` takes: post, comb and the streams.
        """
        if self._fused(streams):
            from glm_lora.model.kernels import mhc

            eps = {"eps": self.eps, "norm_eps": self.norm_eps}
            weights = (self.fn, self.base, self.scale)
            return mhc.read(streams, *weights, iterations=self.iterations, **eps)
        scale = self.scale[self.scale_of_row]
        x, post, comb = _Read.apply(  # pyright: ignore[reportGeneralTypeIssues]
            streams, self.fn, self.base, scale, self.iterations, self.eps, self.norm_eps
        )
        return x, post, comb, streams

    def write(self, y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
        """Mix the streams and add a block's output ``y [n, H]``: new streams ``[n, m, H]``."""
        if self._fused(streams):
            from glm_lora.model.kernels import mhc

            return mhc.write(streams, y, post, comb)
        return _Write.apply(streams, y, post, comb)  # pyright: ignore[reportReturnType]

    @staticmethod
    def _fused(streams: Tensor) -> bool:
        tokens, m, hidden = streams.shape
        return tokens > 0 and m == 4 and hidden % 256 == 0 and takes("fused", streams)
