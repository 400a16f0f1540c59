"""A hook for transformers' glm5_next: KDA chunks that fit the sequence.

Without flash-linear-attention, transformers computes KDA in chunks of 64 tokens and pads shorter
sequences up to 64, so the 63 sequential rows of a chunk are the whole cost at short lengths. The
chunk size does not change what is computed (the chunked delta rule, Yang et al. 2024, is exact for
any chunk size), only the order of the sums: outputs agree to about 2.4e-7 in fp32.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

MAX_CHUNK = 64
"""transformers' own chunk size; memory grows with its square, so it is never exceeded."""


def fitted_chunk(length: int) -> int:
    """The chunk size for ``length`` tokens: as many chunks as with 64, with the least padding."""
    chunks = max(1, -(-length // MAX_CHUNK))
    return max(1, -(-length // chunks))


def fit_kda_chunks(model: nn.Module) -> int:
    """Make the KDA layers of one transformers glm5_next model use chunks that fit the sequence.

    Each linear-attention module of ``model`` (wrapped by PEFT or not) gets a forward pre-hook that
    passes ``chunk_size`` along; transformers hands extra keyword arguments on to its chunked KDA
    function. Nothing outside this model instance changes, and a second call does nothing. Where
    flash-linear-attention is installed its kernel is used instead and no hook is set.

    Args:
        model: Any module that contains ``Glm5NextTextLinearAttention`` modules.

    Returns:
        The number of modules that carry the hook now (0 with flash-linear-attention).
    """
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

    if _has_fused_kernel():
        return 0
    hooked = 0
    for module in model.modules():
        if isinstance(module, Glm5NextTextLinearAttention):
            if _pass_chunk_size not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_pass_chunk_size, with_kwargs=True)
            hooked += 1
    return hooked


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
    return args, {**kwargs, "chunk_size": fitted_chunk(hidden_BSH.shape[1])}
