"""Every Triton kernel is compiled for Hopper at the widths of GLM-5.3-Flash; no GPU is needed.

The interpreter says whether a kernel is right; that it can be compiled, and that a program finds
room in shared memory, would otherwise show on a GPU alone. ``make test-kernels`` runs this.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton's compiler: make test-kernels", allow_module_level=True)

HOPPER_SHARED = 227 * 1024
"""Bytes of shared memory that one program can have."""
BF16 = torch.bfloat16


class Hopper:
    """What Triton asks of a device before it compiles; nothing is ever launched on it."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[dict[str, Any]]:
    """Kernels called inside the test, by name: compiled and checked, not run."""
    jit = importlib.import_module("triton.runtime.jit")
    found: dict[str, Any] = {}
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[self.fn.__name__] = kernel
        assert kernel.asm["cubin"]
        shared = kernel.metadata.shared
        assert shared <= HOPPER_SHARED, f"{self.fn.__name__} needs {shared} bytes of shared memory"

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(importlib.import_module("triton.runtime").driver, "_active", Hopper())
    yield found
    assert found


def empty(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_(grad)


def backward(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """The backward pass for some upstream gradient."""
    torch.autograd.grad(outputs, inputs, [torch.zeros_like(x) for x in outputs])


def test_convolution(compiled):
    from glm_lora.model.kernels.kda import conv_silu

    width = 8192
    mixed = empty(130, 3 * width + 64, grad=True)
    weight, place = torch.zeros(3 * width, 4), torch.zeros(130, dtype=torch.int32)
    backward(list(conv_silu(mixed, weight, place)[:3]), [mixed])


def test_norms(compiled):
    from glm_lora.model.kernels.kda import gated_norm, unit

    x, gate = empty(130, 64, 128, grad=True), empty(130, 64, 128, grad=True)
    backward([gated_norm(x, gate, empty(128), 1e-5)], [x, gate])
    backward([unit(x)], [x])


@pytest.mark.parametrize("scaled", [False, True])
def test_swiglu(compiled, scaled):
    from glm_lora.model.kernels.moe import swiglu

    x, scale = empty(130, 2 * 2048, grad=True), torch.zeros(130, requires_grad=True)
    if not scaled:
        backward([swiglu(x, 7.0)], [x])
        return
    backward([swiglu(x, 7.0, scale)], [x, scale])


def test_moves_to_and_from_experts(compiled):
    from glm_lora.model.kernels.moe import from_experts, to_experts

    tokens, k = 20, 8
    token = torch.arange(tokens * k) // k
    place = torch.arange(tokens * k).view(tokens, k)
    x = empty(tokens, 4096, grad=True)
    backward([from_experts(to_experts(x, token, place), token, place)], [x])


def test_hyper_connection(compiled):
    from glm_lora.model.kernels import mhc

    streams, y = empty(130, 4, 4096, grad=True), empty(130, 4096, grad=True)
    fn, base, scale = empty(24, 4 * 4096), torch.zeros(24), torch.ones(3)
    x, post, comb, kept = mhc.read(streams, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-5)
    backward([x, mhc.write(kept, y, post, comb)], [streams, y])


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("vocabulary", [154_880, 154_880 // 8])
def test_head(compiled, vocabulary, entropy):
    from glm_lora.model.kernels.head import factors_, statistics

    logits, targets = empty(4, vocabulary), torch.zeros(4, dtype=torch.int64)
    row = torch.zeros(4)
    statistics(logits, targets, 0, 0.7)
    factors_(logits, targets, 0, row, row if entropy else None, 0.7)


def test_indexer(compiled):
    from glm_lora.model.kernels.indexer import scores

    scores(empty(130, 32, 128), torch.zeros(130, 32), empty(600, 128), 2048, 4)
    assert "wgmma" in compiled["_scores"].asm["ptx"]


@pytest.mark.parametrize("heads", [64, 32, 16, 8])
def test_sparse_attention(compiled, heads):
    from glm_lora.model.kernels.sparse import sparse_attention

    q, latents = empty(4, heads, 256, grad=True), empty(2052, 512, grad=True)
    chosen = torch.zeros(4, 512, dtype=torch.int32)
    out = sparse_attention(q, latents, empty(heads, 512, 512), chosen, 4, 256**-0.5)
    backward([out], [q, latents])
    if heads == 64:
        for kernel in compiled.values():
            assert "wgmma" in kernel.asm["ptx"] and "mma.sync" not in kernel.asm["ptx"]


def test_what_does_not_fit_is_noticed(compiled, monkeypatch):
    from glm_lora.model.kernels import sparse

    monkeypatch.setitem(sparse.FORWARD_TILES, 64, (256, 8, 2))
    query, chosen = empty(64, 4, 512), torch.zeros(4, 512, dtype=torch.int32)
    with pytest.raises(AssertionError, match="_forward needs 590848 bytes of shared memory"):
        sparse.attend(query, empty(2052, 512), chosen, 2048, 4, 1.0)
