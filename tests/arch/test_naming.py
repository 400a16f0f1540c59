"""Every projection has one name per spelling, and no name is lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_lora.arch.naming import Spelling, spell, translate
from glm_lora.arch.projections import all_sites
from glm_lora.arch.spec import DENSE, DSA, FULL, KDA, SPARSE, TINY, ModelSpec
from glm_lora.errors import ModelError

SPELLINGS = st.sampled_from(list(Spelling))


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    layers = draw(st.integers(1, 12))
    return ModelSpec(
        num_hidden_layers=layers,
        layer_types=tuple(draw(st.sampled_from([KDA, DSA])) for _ in range(layers)),
        mlp_layer_types=tuple(draw(st.sampled_from([DENSE, SPARSE])) for _ in range(layers)),
        n_routed_experts=draw(st.integers(8, 20)),
    )


@given(specs(), SPELLINGS, SPELLINGS, st.data())
def test_translation_is_total_and_invertible(
    spec: ModelSpec, source: Spelling, target: Spelling, data: st.DataObject
) -> None:
    site = data.draw(st.sampled_from(all_sites(spec)))
    there = translate(spell(site, source), source, target)
    assert there == spell(site, target)
    assert translate(there, target, source) == spell(site, source)


@given(specs(), SPELLINGS)
def test_names_are_unique_in_every_spelling(spec: ModelSpec, spelling: Spelling) -> None:
    names = [spell(site, spelling) for site in all_sites(spec)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("spelling", list(Spelling))
def test_every_site_of_the_full_model(spelling: Spelling) -> None:
    for site in all_sites(FULL):
        assert translate(site.disk_name, Spelling.DISK, spelling) == spell(site, spelling)


def test_examples() -> None:
    disk = "model.language_model.layers.7.self_attn.q_a_proj"
    fused = "model.layers.7.self_attn.fused_qkv_a_proj_with_mqa[q_a_proj]"
    assert translate(disk, Spelling.DISK, Spelling.SGLANG) == fused
    forget = "model.language_model.layers.0.self_attn.forget_gate.f_a_proj"
    assert (
        translate(forget, Spelling.TRANSFORMERS, Spelling.DISK)
        == "model.language_model.layers.0.self_attn.f_a_proj"
    )
    expert = "model.language_model.layers.3.mlp.experts.287.up_proj"
    assert translate(expert, Spelling.DISK, Spelling.SGLANG) == (
        "model.layers.3.mlp.experts[287.up_proj]"
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        "q_proj",
        "model.language_model.layers.0.self_attn.conv1d",
        "model.language_model.layers.x.self_attn.q_proj",
        "model.language_model.layers.00.self_attn.q_proj",
        "model.language_model.layers.0.self_attn.q_proj.weight",
        "model.language_model.layers.0.mlp.experts.gate_proj",
        "model.language_model.layers.0.self_attn.forget_gate.f_a_proj",
        "model.visual.blocks.0.attn.qkv",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="no projection's name"):
        translate(name, Spelling.DISK, Spelling.SGLANG)


def test_sglang_names_hold_the_fused_modules() -> None:
    modules = {s.sglang_name.rsplit(".", 1)[-1] for s in all_sites(TINY) if s.sglang_part}
    assert modules == {"qkv_proj", "fused_qkv_a_proj_with_mqa", "gate_up_proj", "experts"}
