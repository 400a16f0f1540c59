"""The SGLang format, conversions both ways, the model card and the one entry for all formats."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.errors import CheckpointError, ConfigError, ExportError, SyncError
from glm_lora.export.card import CardFacts, model_card
from glm_lora.export.check import Reference, check_served
from glm_lora.export.load import load_adapter
from glm_lora.export.sglang import export_sglang
from glm_lora.export.write import convert, export
from glm_lora.rollout.embedded import EmbeddedEngine
from glm_lora.targets.selection import make_selection
from tests.tiny_checkpoint import random_state, tiny_selection

FACTS = CardFacts("org/base", "f" * 64, "mit", {"rollout/raw_reward": 0.875})


@pytest.fixture(scope="module")
def state():
    return random_state(tiny_selection(), version=60)


def test_the_sglang_format_has_disk_names_and_leaves(state, tmp_path):
    folder = export_sglang(state, tmp_path / "a", "org/base")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted({s.leaf for s in trainable_sites(TINY)})
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["glm_lora_digest"] == state.digest
    stored = load_file(folder / "adapter_model.safetensors")
    assert list(stored) == sorted(state.selection.tensor_shapes())
    assert not any("forget_gate" in name for name in stored)
    for name, tensor in state.tensors.items():
        assert torch.equal(stored[name], tensor)


def test_a_part_of_a_fused_projection_is_refused(tmp_path):
    sites = [s for s in trainable_sites(TINY) if s.leaf == "v_proj"]
    state = random_state(make_selection("tiny", TINY, sites, rank=2, alpha=4))
    with pytest.raises(SyncError, match=r"without .*q_proj"):
        export_sglang(state, tmp_path / "a", "x")
    export(state, tmp_path / "b", "peft", FACTS)


@pytest.mark.parametrize("first", ["peft", "sglang"])
def test_conversion_both_ways_gives_the_same_files_back(state, tmp_path, first):
    second = {"peft": "sglang", "sglang": "peft"}[first]
    export(state, tmp_path / "1", first, FACTS)
    convert(tmp_path / "1", TINY, tmp_path / "2", second, FACTS)
    convert(tmp_path / "2", TINY, tmp_path / "3", first, FACTS)
    for name in ("adapter_config.json", "selection.json", "README.md"):
        assert (tmp_path / "3" / name).read_text() == (tmp_path / "1" / name).read_text()
    one = load_file(tmp_path / "1" / "adapter_model.safetensors")
    three = load_file(tmp_path / "3" / "adapter_model.safetensors")
    assert all(torch.equal(one[k], three[k]) for k in one) and one.keys() == three.keys()
    again = load_adapter(tmp_path / "2", TINY)
    assert (again.digest, again.version) == (state.digest, 60)


def test_conversion_refuses_what_it_cannot_read(state, tmp_path):
    folder = export(state, tmp_path / "1", "sglang", FACTS)
    wide = replace(TINY, hidden_size=128)
    (folder / "selection.json").unlink()
    with pytest.raises(CheckpointError, match=r"\d+ misshapen"):
        convert(folder, wide, tmp_path / "2", "peft", FACTS)
    assert not (tmp_path / "2").exists()


def test_merged_goes_through_the_same_entry(base, state, tmp_path):
    export(state, tmp_path / "m", "merged", FACTS, hf_checkpoint=base)
    assert (tmp_path / "m" / "config.json").exists()
    assert "library_name: transformers" in (tmp_path / "m" / "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pfet", {}, "Did you mean 'peft'"),
        ("merged", {}, "--hf-checkpoint"),
        ("merged", {"fp8": "int4"}, "requantise, bf16"),
    ],
)
def test_bad_options_write_nothing(base, state, tmp_path, kind, options, message):
    if "fp8" in options:
        options = {**options, "hf_checkpoint": base}
    with pytest.raises(ConfigError, match=message):
        export(state, tmp_path / "x", kind, FACTS, **options)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["peft", "sglang"])
def test_an_export_is_served_as_it_was_exported(base, state, tmp_path, kind):
    engine = EmbeddedEngine(base, state.selection, dtype=torch.float32)
    engine.push(state)
    tokens = ((3, 5, 7, 11, 2), (9, 9, 30))
    scored = engine.score(tokens, state.ref())
    references = [Reference(t, s) for t, s in zip(tokens, scored, strict=True)]
    folder = export(state, tmp_path / "a", kind, FACTS)
    reports = check_served(folder, TINY, engine, references)
    assert len(reports) == 2
    # Scored alone now and in one padded batch before: fp32 sums in another order.
    assert all(r.max_difference < 1e-5 for r in reports)
    other = export(replace_state(state), tmp_path / "b", kind, FACTS)
    with pytest.raises(ExportError, match="not served as it was exported"):
        check_served(other, TINY, engine, references)


def replace_state(state):
    return random_state(state.selection, seed=77)


@pytest.mark.parametrize("kind", ["peft", "sglang", "merged"])
def test_the_card_names_everything(state, kind):
    card = model_card(state, FACTS, kind)
    front = card.split("---")[1]
    assert "base_model: org/base" in front
    assert "license: mit" in front
    for text in (state.digest, state.selection.hash, FACTS.base_fingerprint, "0.875", "43", "60"):
        assert text in card
    for site in trainable_sites(TINY):
        assert site.leaf in card
    assert ("--lora-target-modules" in card) == (kind == "sglang")
