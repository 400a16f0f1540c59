"""Named parts of the released checkpoint that are no part of the text model we train.

They are known so that asking for one is refused with its own reason rather than as a misspelling:
the vision tower and the multi-token-prediction (MTP) layer. Names only; neither is ever loaded.
Sources: transformers' ``modeling_glm5_next.py`` (vision), and the released checkpoint's count of
1,760 tensors in layer 45 (MTP), which these names add up to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from glm_lora.arch.projections import (
    DSA_ROWS,
    LAYERS_PREFIX,
    MOE_ROWS,
    Status,
    all_params,
)
from glm_lora.arch.spec import FULL, ModelSpec

VISION_PREFIX = "model.visual."
VISION_BLOCKS = 24
MTP_LAYER = FULL.num_hidden_layers
"""Layer number of the MTP layer on disk."""

_VISION_REASON = "the vision tower is frozen: only the text model is trained"
_MTP_REASON = (
    f"layer {MTP_LAYER} on disk is the multi-token-prediction layer, which is dropped for training"
)

_VISION_BLOCK = (
    "norm1",
    "norm2",
    "attn.qkv",
    "attn.proj",
    "attn.q_norm",
    "attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_VISION_TOP = (
    "patch_embed.proj",
    "post_layernorm",
    "downsample",
    "merger.proj",
    "merger.gate_proj",
    "merger.up_proj",
    "merger.down_proj",
    "merger.post_projection_norm",
)
_MTP_OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_MTP_NORMS = ("input_layernorm", "post_attention_layernorm")


class NonTarget(NamedTuple):
    """A named module or bare parameter that LoRA cannot adapt."""

    names: tuple[str, ...]
    """Full names without ``.weight`` and ``.bias``: in transformers' memory, then on disk."""
    reason: str
    part: str
    """text, vision or mtp."""


def vision_modules() -> Iterator[str]:
    """Module names of the vision tower (the same in memory and on disk)."""
    for name in _VISION_TOP:
        yield VISION_PREFIX + name
    for block in range(VISION_BLOCKS):
        for name in _VISION_BLOCK:
            yield f"{VISION_PREFIX}blocks.{block}.{name}"


def mtp_modules() -> Iterator[str]:
    """Module names of the MTP layer, as on disk: sparse attention with experts, without mHC."""
    prefix = f"{LAYERS_PREFIX}{MTP_LAYER}."
    for name in (*_MTP_OWN, *_MTP_NORMS):
        yield prefix + name
    for row in (*DSA_ROWS, *MOE_ROWS):
        if not row.expert:
            yield prefix + row.path
            continue
        for expert in range(FULL.n_routed_experts):
            yield prefix + row.expert_path(expert)


@lru_cache(maxsize=4)
def non_targets(spec: ModelSpec) -> tuple[NonTarget, ...]:
    """Everything named that is no linear projection of ``spec``: its other parameters first."""
    found: dict[tuple[str, ...], NonTarget] = {}
    for param in all_params(spec).values():
        if param.row.status is Status.NOT_A_TARGET:
            names = tuple(dict.fromkeys((_module(param.memory_name), _module(param.key))))
            found.setdefault(names, NonTarget(names, param.row.reason, "text"))
    found.update({(m,): NonTarget((m,), _VISION_REASON, "vision") for m in vision_modules()})
    found.update({(m,): NonTarget((m,), _MTP_REASON, "mtp") for m in mtp_modules()})
    return tuple(found.values())


def _module(parameter: str) -> str:
    return parameter.removesuffix(".weight").removesuffix(".bias")
