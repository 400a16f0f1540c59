"""A tiny random glm5_next checkpoint written by transformers, and random adapters for it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY, ModelSpec
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.protocols import AdapterState
from glm_lora.targets.selection import Selection, make_selection

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "projection_intermediate_size": 16,
}


def write_checkpoint(folder: Path, spec: ModelSpec = TINY, seed: int = 0) -> Path:
    """Random weights large enough that every projection matters; a vision tower of one block."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    names = {f.name for f in fields(spec)} - {"eos_token_ids", "layer_types", "mlp_layer_types"}
    text = {name: getattr(spec, name) for name in names}
    text |= {
        "layer_types": list(spec.layer_types),
        "mlp_layer_types": list(spec.mlp_layer_types),
        "num_key_value_heads": spec.num_attention_heads,
        "eos_token_id": list(spec.eos_token_ids),
    }
    vision = VISION | {"out_hidden_size": spec.hidden_size}
    torch.manual_seed(seed)
    model = Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "language_model" in name and "_hc." not in name:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def tiny_selection(spec: ModelSpec = TINY, rank: int = 4, **kwargs) -> Selection:
    """All trainable sites of ``spec``."""
    return make_selection("tiny", spec, trainable_sites(spec), rank=rank, alpha=2 * rank, **kwargs)


def mixed_ranks(group: str) -> Selection:
    """All trainable sites of tiny: rank 2 in ``group``, rank 4 elsewhere, one scaling."""
    ranks = {s.disk_name: 2 for s in trainable_sites(TINY) if s.group == group}
    return tiny_selection(ranks=ranks)


def random_state(
    selection: Selection,
    *,
    version: int = 1,
    seed: int = 1,
    zero_b: bool = False,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
) -> AdapterState:
    """A random adapter whose output is about ``scale`` of a projection's own output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in selection.tensor_shapes().items():
        value = torch.randn(shape, generator=generator)
        if ".lora_A." in name:
            value *= shape[1] ** -0.5
        else:
            value *= 0.0 if zero_b else scale / (2 * shape[1] ** 0.5)
        tensors[name] = value.to(dtype)
    return AdapterState(selection, tensors, version, fingerprint_tensors(tensors))
