"""``config.json`` of a glm5_next checkpoint as transformers and SGLang read it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from glm_lora.arch.spec import ModelSpec

SMALL_FILES = (".json", ".jinja", ".txt", ".model")
"""Endings of the files beside the weights that belong to a checkpoint."""
SGLANG_KEYS = {"mhc": True, "index_kpool_compress": True}
"""Keys of ``text_config`` that transformers does not write; without them SGLang serves the model
without hyper-connections and without the pool compressor."""
_CUT_LISTS = ("layer_types", "mlp_layer_types", "indexer_types")

_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "projection_intermediate_size": 32,
    "image_size": 28,
    "swiglu_limit": 10.0,
}
"""One small block: the tower is frozen and never runs, but its tensors are on disk as in GLM."""


def text_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``text_config`` of ``spec`` as transformers and SGLang read it."""
    values = asdict(spec)
    eos = values.pop("eos_token_ids")
    values.update(
        mlp_layer_types=list(spec.mlp_layer_types),
        num_key_value_heads=spec.num_attention_heads,
        eos_token_id=eos[0] if len(eos) == 1 else list(eos),
        **SGLANG_KEYS,
    )
    # Releases of transformers spell the types differently, but agree on the default pattern.
    del values["layer_types"]
    if spec.layer_types != ModelSpec(num_hidden_layers=spec.num_hidden_layers).layer_types:
        values["layer_types"] = list(spec.layer_types)
    return values


def vision_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``vision_config`` of a small tower beside a text model of ``spec``."""
    return dict(_VISION, out_hidden_size=spec.hidden_size)


def cut_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A ``config.json`` for the first ``layers`` layers, without a multi-token-prediction layer."""
    result = dict(config)
    text = dict(result.get("text_config", result))
    text["num_hidden_layers"] = layers
    text |= {k: text[k][:layers] for k in _CUT_LISTS if isinstance(text.get(k), list)}
    if "num_nextn_predict_layers" in text:
        text["num_nextn_predict_layers"] = 0
    if "text_config" in result:
        return result | {"text_config": text}
    return text
