"""The plugin's view of the facts table, and its checks, without SGLang."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import entry_points

import pytest

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import FULL, TINY
from glm_lora.fingerprint import record_of
from glm_lora.rollout.sglang_plugin.hooks import find_problems
from glm_lora.rollout.sglang_plugin.widths import (
    MODULES,
    PARTS,
    REPLICATED,
    TARGETS,
    adapter_shapes,
    any_widths,
    fused_parts,
    module_names,
    module_widths,
    spec_of,
)
from tests.tiny_checkpoint import random_state, tiny_selection

STOCK = """q_proj k_proj v_proj o_proj q_a_proj kv_a_proj_with_mqa q_b_proj kv_b_proj gate_proj
up_proj down_proj"""


def test_names_come_from_the_facts_table():
    assert set(TARGETS) == {s.leaf for s in trainable_sites(FULL)}
    assert set(TARGETS) - set(STOCK.split()) == {
        "b_proj",
        "f_a_proj",
        "f_b_proj",
        "g_a_proj",
        "g_b_proj",
    }
    assert set(REPLICATED) == {"f_a_proj", "g_a_proj", "fused_qkv_a_proj_with_mqa"}
    assert PARTS["qkv_proj"] == ("q_proj", "k_proj", "v_proj")
    assert PARTS["fused_qkv_a_proj_with_mqa"] == ("q_a_proj", "kv_a_proj_with_mqa")
    assert PARTS["o_proj"] == ("o_proj",)
    assert "kv_b_proj" not in MODULES


def test_widths_differ_per_layer():
    assert module_widths(FULL, "o_proj", 0) == (64 * 128, 4096)
    assert module_widths(FULL, "o_proj", 3) == (64 * 256, 4096)
    assert module_widths(FULL, "qkv_proj", 0) == (4096, 3 * 64 * 128)
    assert module_widths(FULL, "qkv_proj", 3) is None
    assert any_widths(FULL, "qkv_proj", 3) == (4096, 3 * 64 * 128)
    assert module_widths(FULL, "fused_qkv_a_proj_with_mqa", 3) == (4096, 1536 + 512)
    assert module_widths(FULL, "gate_up_proj", 0) == (4096, 2 * 12288)
    assert module_widths(FULL, "gate_up_proj", 4) == (4096, 2 * 2048)
    assert module_widths(FULL, "down_proj", 4) == (2048, 4096)
    assert module_widths(FULL, "f_a_proj", 0) == (4096, 128)
    assert module_widths(FULL, "b_proj", 0) == (4096, 64)
    with pytest.raises(KeyError):
        any_widths(FULL, "kv_b_proj", 3)


def test_modules_are_those_of_the_sites_and_no_others():
    names = module_names(FULL)
    # 34 KDA layers with 7 modules, 11 DSA layers with 3, 45 MLPs with 2.
    assert len(names) == 34 * 7 + 11 * 3 + 45 * 2
    assert "model.layers.3.mlp.shared_experts.down_proj" in names
    assert "model.layers.0.mlp.down_proj" in names
    assert not any(".experts." in n or ".indexer." in n or "visual" in n for n in names)
    assert not any(n.startswith("model.layers.45.") for n in names)


def test_spec_of_reads_sglangs_resolved_configuration():
    config = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 0,
        "v_head_dim": 16,
        "first_k_dense_replace": 3,
        "index_topk": None,
        "linear_attn_config": {"head_dim": 16, "num_heads": 4, "kda_layers": [0, 1, 2]},
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    }
    spec = spec_of(config, [True, True, True, False])
    assert adapter_shapes(spec, 4) == adapter_shapes(TINY, 4)
    assert module_names(spec) == module_names(TINY)


def records_of(tensors):
    return [record_of(k, t) for k, t in tensors.items()]


def test_a_good_adapter_has_no_problems_and_every_spoiled_one_is_named():
    state = random_state(tiny_selection())
    shapes, parts = adapter_shapes(TINY, 4), fused_parts(TINY)
    assert find_problems(records_of(state.tensors), shapes, parts) == []
    for name, tensor in state.tensors.items():
        rest = {k: v for k, v in state.tensors.items() if k != name}
        assert any(name in p for p in find_problems(records_of(rest), shapes, parts)), name
        wrong = {**rest, name: tensor[:-1]}
        assert any(name in p for p in find_problems(records_of(wrong), shapes, parts)), name
    extra = {**state.tensors, "model.language_model.layers.9.x.lora_A.weight": tensor}
    assert "no tensor of this model" in find_problems(records_of(extra), shapes, parts)[0]
    assert find_problems([], shapes, parts) == ["no tensors"]
    whole_site = {k: v for k, v in state.tensors.items() if ".o_proj." not in k}
    assert find_problems(records_of(whole_site), shapes, parts) == []


def test_the_entry_point_is_declared():
    points = entry_points(group="sglang.srt.plugins")
    assert [p.value for p in points if p.name == "glm_lora"] == [
        "glm_lora.rollout.sglang_plugin:register"
    ]


def test_it_imports_neither_torch_nor_the_rest_of_the_package():
    code = """
        import sys
        import glm_lora.rollout.sglang_plugin.widths
        import glm_lora.rollout.sglang_plugin.hooks
        import glm_lora.rollout.sglang_plugin.tables
        bad = {"torch", "transformers", "peft", "pydantic", "megatron", "ray", "httpx"}
        print(sorted(bad & set(sys.modules)))
        print(sorted(m for m in sys.modules if m.startswith("glm_lora") and "plugin" not in m))
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert out[0] == "[]"
    assert out[1] == str(
        [
            "glm_lora",
            "glm_lora.arch",
            "glm_lora.arch.projections",
            "glm_lora.arch.spec",
            "glm_lora.errors",
            "glm_lora.fingerprint",
            "glm_lora.rollout",
        ]
    )
