"""The independent reference: transformers (and PEFT) models of a ModelSpec, and their weights."""

from __future__ import annotations

import functools
import re

import torch
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import ModelSpec
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.stage import Stage, build_stage
from tests.model.weights import load

_NOT_TRANSFORMERS = {"layer_types", "mlp_layer_types", "eos_token_ids"}


def reference_model(spec: ModelSpec, seed: int = 0) -> Glm5NextForConditionalGeneration:
    """A transformers model of ``spec`` with every parameter random enough to matter."""
    text = {k: v for k, v in vars(spec).items() if k not in _NOT_TRANSFORMERS}
    text |= {
        "layer_types": list(spec.layer_types),
        "mlp_layer_types": list(spec.mlp_layer_types),
        "indexer_types": ["full"] * spec.num_hidden_layers,
        "num_key_value_heads": spec.num_attention_heads,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": spec.hidden_size,
        "projection_intermediate_size": 16,
    }
    config = Glm5NextConfig(text_config=text, vision_config=vision)
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = Glm5NextForConditionalGeneration(config).float().eval()
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(p: torch.Tensor, mean: float, std: float) -> None:
        p.copy_(mean + std * torch.randn(p.shape, generator=generator))

    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "visual" in name or not name.startswith(("model.language_model", "lm_head")):
                continue
            if not p.is_floating_point():
                continue
            if "norm" in name and name.endswith("weight"):
                normal(p, 1.0, 0.1)
            elif "_hc.scale" in name:
                normal(p, 1.0, 0.2)
            elif p.dim() == 1:
                normal(p, 0.0, 0.3)
            elif "conv1d" in name:
                normal(p, 0.0, 0.5)
            elif "embed_tokens" in name:
                normal(p, 0.0, 1.0)
            else:
                # Half as large a head keeps the logits at order 1.
                gain = 0.5 if name.startswith("lm_head") else 1.0
                normal(p, 0.0, gain / p.shape[-1] ** 0.5)
    return model


def full_base(model: torch.nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Canonical full tensors from a transformers state dict, cut by hand."""
    state = {k: v.detach() for k, v in model.state_dict().items()}
    out = {}
    for key, param in all_params(spec).items():
        value = state[param.memory_name]
        if match := re.search(r"\.([qkv])_conv1d\.", key):
            value = value.chunk(3)["qkv".index(match[1])]
        elif ".experts.gate_proj" in key:
            value = value[:, : spec.moe_intermediate_size]
        elif ".experts.up_proj" in key:
            value = value[:, spec.moe_intermediate_size :]
        assert tuple(value.shape) == param.shape, key
        out[key] = value
    return out


@functools.cache
def pair(spec: ModelSpec, seed: int = 0) -> tuple[Glm5NextForConditionalGeneration, Stage]:
    """A transformers model and a one-rank stage with the same weights."""
    model = reference_model(spec, seed)
    stage = build_stage(spec, ParallelContext(), dtype=torch.float32)
    load(stage, full_base(model, spec))
    return model, stage
