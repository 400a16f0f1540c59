"""transformers + PEFT on the very weights of a stage: what a training step is compared with.

The peer's parameters are views of the stage's memory, so both compute with the same numbers and
the base is in memory once. Kernels: flash-linear-attention where it is installed, grouped_mm for
the experts, SDPA for the attention. Adapters are kept in the dtype of the base: PEFT's default
casts them and their inputs to fp32, which is slower.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import KDA, ModelSpec
from glm_lora.lora.state import AdapterSet
from glm_lora.model.kda import LinearAttention
from glm_lora.model.layer import DecoderLayer
from glm_lora.model.moe import MoE
from glm_lora.model.stage import Stage
from glm_lora.targets.selection import Selection

_NOT_TRANSFORMERS = {"layer_types", "mlp_layer_types", "eos_token_ids"}
_PREFIX = "base_model.model."


def peer_model(stage: Stage, selection: Selection, device: torch.device) -> nn.Module:
    """A PEFT model whose base parameters are the memory of ``stage``; adapters are fresh."""
    spec = stage.spec
    with torch.device("meta"):
        model = Glm5NextForConditionalGeneration(_config(spec))
    model = model.to(stage.dtype)
    for name, value in _parameters(stage).items():
        _place(model, name, value)
    model.model.visual.to_empty(device=device)
    if device.type == "cuda":
        model.set_experts_implementation("grouped_mm")
    model.config.use_cache = False
    left = [n for n, p in model.named_parameters() if p.is_meta]
    left += [n for n, b in model.named_buffers() if b.is_meta]
    assert not left, left
    ranks = {a.rank for a in selection.adapters}
    alphas = {a.alpha for a in selection.adapters}
    assert len(ranks) == len(alphas) == 1
    config = LoraConfig(
        r=ranks.pop(),
        lora_alpha=alphas.pop(),
        lora_dropout=0.0,
        target_modules=[a.site.name for a in selection.adapters],
    )
    peft = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(stage.dtype)
    return peft.train()


def copy_adapters(model: nn.Module, adapters: AdapterSet) -> dict[str, nn.Parameter]:
    """Give the peer the stage's A and B; returns its adapter parameters by serving key."""
    named = dict(model.named_parameters())
    mine = adapters.parameters()
    result = {}
    with torch.no_grad():
        for chosen in adapters.selection.adapters:
            for key, letter in ((chosen.a_key, "A"), (chosen.b_key, "B")):
                theirs = named[f"{_PREFIX}{chosen.site.name}.lora_{letter}.default.weight"]
                theirs.copy_(mine[key])
                result[key] = theirs
    return result


def set_recompute(model: nn.Module, full: bool) -> None:
    """Gradient checkpointing of every layer, or none."""
    base = model.get_base_model()  # pyright: ignore
    if full:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        base.gradient_checkpointing_disable()


def peer_loss(model: nn.Module, tokens_B_L: Tensor) -> Tensor:
    """Transformers' own causal loss: the mean over all tokens but the first."""
    return model(input_ids=tokens_B_L, labels=tokens_B_L).loss


def peer_logprobs(model: nn.Module, tokens_B_L: Tensor) -> Tensor:
    """Log-probability of each token but the first, fp32 ``[B, L - 1]``; no gradient."""
    with torch.no_grad():
        logits = model(input_ids=tokens_B_L).logits[:, :-1].float()
        own = logits.gather(-1, tokens_B_L[:, 1:, None]).squeeze(-1)
        return own - logits.logsumexp(-1)


def _config(spec: ModelSpec) -> Glm5NextConfig:
    text = {k: v for k, v in vars(spec).items() if k not in _NOT_TRANSFORMERS}
    text |= {
        # Releases differ in what they call DSA layers; all understand this name.
        "layer_types": [t if t == KDA else "full_attention" for t in spec.layer_types],
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
    return config


def _parameters(stage: Stage) -> dict[str, Tensor]:
    """Every parameter by its name in transformers; fused ones whole."""
    held, result = stage.base_parameters(), {}
    for key, param in all_params(stage.spec).items():
        value = held[key]
        if param.layer is not None and ("conv1d" in key or ".experts." in key):
            layer = stage.layers[param.layer - stage.layers[0].index]  # pyright: ignore
            assert isinstance(layer, DecoderLayer)
            attention, mlp = layer.attention.block, layer.mlp.block
            if "conv1d" in key:
                assert isinstance(attention, LinearAttention)
                value = attention.conv.unsqueeze(1)
            elif "down_proj" not in key and "shared" not in key:
                assert isinstance(mlp, MoE)
                value = mlp.gate_up
        result[param.memory_name] = value
    return result


def _place(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value
