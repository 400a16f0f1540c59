"""A model is read from config.json, or refused with the value that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm_lora.arch.spec import BUILTIN, FULL, ModelSpec, builtin, spec_from_config, spec_from_dir
from glm_lora.errors import ModelError


def test_the_pattern_of_the_full_model() -> None:
    assert [i for i in range(45) if not FULL.is_kda(i)] == list(range(3, 45, 4))
    assert [i for i in range(45) if not FULL.is_moe(i)] == [0, 1, 2]
    assert BUILTIN["GLM-5.3-Flash-4layer"] == FULL.first_layers(4)


def test_an_empty_text_config_means_transformers_defaults() -> None:
    assert spec_from_config({"model_type": "glm5_next", "text_config": {}}) == ModelSpec()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"num_hidden_layers": "45"}, "num_hidden_layers is '45'"),
        ({"num_hidden_layers": 0}, "positive whole number"),
        ({"num_hidden_layers": 4.0}, "positive whole number"),
        ({"num_hidden_layers": 10**9}, "at most 1000"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"rms_norm_eps": float("nan")}, "a number"),
        ({"norm_topk_prob": 1}, "true or false"),
        ({"layer_types": 5}, "wrong type"),
        ({"layer_types": ["mamba"] * 45}, "layer 0 is 'mamba'"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries"),
        ({"mlp_layer_types": ["dense"] * 44}, "mlp_layer_types has 44 entries"),
        ({"linear_attn_config": [1]}, "linear_attn_config"),
        ({"linear_attn_config": {"gate_lower_bound": None}}, "gate lower bound"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64"),
        ({"index_topk": 10, "index_kpool": 4}, "not a multiple"),
        ({"indexer_types": ["full"] * 7 + ["shared"] * 38}, "shares indexer selections"),
        ({"index_topk_pattern": "FSSF"}, "shares indexer selections"),
        ({"index_topk_freq": 2}, "shares indexer selections"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_group": 3, "n_routed_experts": 8}, "8 experts in 3 groups"),
    ],
)
def test_bad_values(text: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:
        spec_from_config({"model_type": "glm5_next", "text_config": text})
    assert error.value.exit_code == 2


@pytest.mark.parametrize("config", [None, [], "x", {}, {"model_type": "llama"}])
def test_other_files(config: Any) -> None:
    with pytest.raises(ModelError):
        spec_from_config(config)


def test_the_big_sister_is_named() -> None:
    with pytest.raises(ModelError, match=r"glm_moe_dsa.*not an architecture"):
        spec_from_config({"model_type": "glm_moe_dsa"})


def test_a_name_that_is_not_built_in() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'GLM-5.3-Flash'"):
        builtin("GLM-5.3-Flsh")


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", b"[]"])
def test_bad_config_files(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        spec_from_dir(tmp_path)


def test_the_spelling_full_attention(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"]
    text = {"num_hidden_layers": 2, "layer_types": kinds}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "glm5_next", "text_config": text})
    )
    assert not spec_from_dir(tmp_path).is_kda(1)
