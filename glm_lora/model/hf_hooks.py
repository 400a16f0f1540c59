"""Mending transformers' glm5_next: KDA kernels where the tensors are, chunks that fit the sequence.

Where flash-linear-attention is installed, transformers hands KDA to it on every device, and its
kernels end with an error on the CPU: on a GPU machine no model could be computed on the CPU. The
functions of its module are therefore replaced by ones that look where their input is, and how
wide.

Without flash-linear-attention, transformers computes KDA in chunks of 64 tokens and pads shorter
sequences up to 64, so the 63 sequential rows of a chunk are the whole cost at short lengths. The
chunk size does not change what is computed (the chunked delta rule, Yang et al. 2024, is exact for
any chunk size), only the order of the sums: outputs agree to about 2.4e-7 in fp32.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_CHUNK = 64
"""transformers' own chunk size; memory grows with its square, so it is never exceeded."""


def fitted_chunk(length: int) -> int:
    """The chunk size for ``length`` tokens: as many chunks as with 64, with the least padding."""
    chunks = max(1, -(-length // MAX_CHUNK))
    return max(1, -(-length // chunks))


def mend_kda(model: nn.Module) -> int:
    """Have a transformers glm5_next compute KDA where its tensors are, in chunks that fit.

    Each linear-attention module of ``model`` (wrapped by PEFT or not) gets a forward pre-hook that
    passes ``chunk_size`` along; transformers hands extra keyword arguments on to its chunked KDA
    function. A second call does nothing. Where flash-linear-attention is installed its kernel takes
    what is on a GPU in 16 bits, and from now on in this process only that.

    Args:
        model: Any module that contains ``Glm5NextTextLinearAttention`` modules.

    Returns:
        The number of modules that carry the hook now.
    """
    from transformers.models.glm5_next import modeling_glm5_next as hf

    for name in _DISPATCHED:
        function = getattr(hf, name)
        if function not in _DISPATCHERS:
            setattr(hf, name, _by_device(function))
    hooked = 0
    for module in model.modules():
        if isinstance(module, hf.Glm5NextTextLinearAttention):
            if _pass_chunk_size not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_pass_chunk_size, with_kwargs=True)
            hooked += 1
    return hooked


_DISPATCHED = (
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
"""Functions of transformers' module that take a kernel of another package if it is installed."""
_DISPATCHERS: set[Callable[..., Any]] = set()


def _for_kernels(x: Tensor) -> bool:
    """Triton multiplies fp32 as TF32, three digits: too few where two computations are compared."""
    return x.is_cuda and x.element_size() < 4


def _by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for 16-bit CUDA tensors, the definition that it wraps for others."""
    definition = inspect.unwrap(function)

    @functools.wraps(function)
    def choose(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Only the kernels keep packed sequences apart; transformers refuses them where it has none.
        packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        return (function if _for_kernels(x) or packed else definition)(x, *args, **kwargs)

    _DISPATCHERS.add(choose)
    return choose


@functools.cache
def _has_fused_kernel() -> bool:
    try:
        fla: Any = importlib.import_module("fla")
    except (ImportError, OSError, RuntimeError):
        # A broken installation (missing driver or Triton) counts as none, as in transformers.
        return False
    return hasattr(fla, "ops")


def _pass_chunk_size(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden_BSH = args[0] if args else kwargs["hidden_states"]
    if _for_kernels(hidden_BSH) and _has_fused_kernel():
        return args, kwargs
    return args, {**kwargs, "chunk_size": fitted_chunk(hidden_BSH.shape[1])}
