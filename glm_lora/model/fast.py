"""Which parts run on fused CUDA kernels, and why the others do not.

Every fast path computes what the plain torch code next to it computes; that code is its reference
and its fallback. A path is taken for bfloat16 CUDA tensors when the packages it needs are there.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Path = Literal["delta_rule", "fused", "grouped_mm"]
"""KDA's sequence kernel, the elementwise and per-token Triton kernels, the experts' products."""

DsaBackend = Literal["auto", "sdpa", "triton"]
"""What computes DSA above ``index_topk`` tokens; auto is the faster one for the length."""

SMALLEST_LATENT = 32
"""The sparse kernel cuts latents in halves, and a matrix unit takes 16 columns."""

_SPARSE_WINS = {64: 8192, 32: 16384, 16: 20480, 1: 32768}
"""Tokens of a sequence from which the sparse kernel takes less time than masks, by the fewest heads
on a rank; from both kernels' times on an H200 (docs/performance.md)."""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the plain torch code on every device inside this block (forward and backward)."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def takes(path: Path, x: Tensor) -> bool:
    """Whether the fast ``path`` is taken for ``x``; says so once in the log where it cannot be."""
    if x.device.type != "cuda" or x.dtype is not torch.bfloat16 or _PLAIN.get():
        return False
    return missing(path) is None


def is_plain() -> bool:
    """Whether ``plain_torch`` is on."""
    return _PLAIN.get()


def sparse_from(
    backend: DsaBackend, device: torch.device, dtype: torch.dtype, latent: int, heads: int
) -> int | None:
    """From how many tokens on a sequence is computed by the sparse kernel; None is never.

    Where it was asked for and cannot run, the log says so once.

    Args:
        backend: The wish.
        device: Where the activations are.
        dtype: Of the activations.
        latent: Size of the latents.
        heads: On this rank.
    """
    if backend == "sdpa":
        return None
    reason = _no_sparse(device.type, dtype, latent)
    if reason is None:
        return 0 if backend == "triton" else _faster_from(heads)
    if backend == "triton":
        _say_no_sparse(reason)
    return None


def _faster_from(heads: int) -> int:
    return next(tokens for fewest, tokens in _SPARSE_WINS.items() if heads >= fewest)


def _no_sparse(device: str, dtype: torch.dtype, latent: int) -> str | None:
    if device != "cuda":
        return f"it needs a CUDA device, not {device}"
    if dtype is not torch.bfloat16:
        return f"it needs bfloat16, not {str(dtype).removeprefix('torch.')}"
    if latent < SMALLEST_LATENT or latent.bit_count() != 1:
        return f"kv_lora_rank is {latent}, not a power of two from {SMALLEST_LATENT} on"
    return missing("fused")


@functools.cache
def _say_no_sparse(reason: str) -> None:
    log.warning("--dsa-backend triton: DSA runs as SDPA with masks: %s", reason)


@functools.cache
def missing(path: Path) -> str | None:
    """Why ``path`` cannot be taken on a CUDA device; None when it can."""
    reason = _reason(path)
    if reason is not None and torch.cuda.is_available():
        log.warning("%s runs as plain torch code: %s", path, reason)
    return reason


def _reason(path: Path) -> str | None:
    if path == "grouped_mm":
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            return "grouped_mm needs compute capability 8.0"
        return None
    try:
        importlib.import_module("triton")
        if path == "delta_rule":
            importlib.import_module("fla.ops.kda")
    except (ImportError, OSError, RuntimeError) as error:
        # A broken installation (missing driver or compiler) counts as none.
        return f"{type(error).__name__}: {error}"
    return None


def active_paths(dsa_backend: DsaBackend = "auto") -> dict[str, str]:
    """For each part of the model, what computes it on a bfloat16 CUDA tensor of this machine."""
    if not torch.cuda.is_available():
        return dict.fromkeys([*_PARTS, _DSA], "torch (no CUDA device)")
    parts = dict(_PARTS)
    if dsa_backend != "sdpa":
        whole = f"masks below {_faster_from(64):,} tokens (64 heads), triton from there on"
        parts[_DSA] = ("fused", whole if dsa_backend == "auto" else "triton, chosen tokens only")
    found = {
        part: kernel if (reason := missing(path)) is None else f"torch ({reason})"
        for part, (path, kernel) in parts.items()
    }
    found.setdefault(_DSA, "SDPA with masks")
    return found


_DSA = "DSA above index_topk"

_PARTS: dict[str, tuple[Path, str]] = {
    "KDA delta rule": ("delta_rule", "flash-linear-attention chunk_kda"),
    "KDA convolution and gated norm": ("fused", "triton"),
    "hyper-connections": ("fused", "triton"),
    "routed experts": ("grouped_mm", "torch grouped_mm"),
    "SwiGLU, dispatch and combine": ("fused", "triton"),
    "indexer scores": ("fused", "triton"),
    "log-probabilities": ("fused", "triton"),
}
