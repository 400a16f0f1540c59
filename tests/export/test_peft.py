"""The PEFT export against stock PEFT and transformers, and against arithmetic on the weights."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Glm5NextForConditionalGeneration

from glm_lora.arch.projections import Status, all_params, trainable_sites
from glm_lora.arch.spec import FULL, TINY
from glm_lora.errors import CheckpointError, ConfigError, ExportError, SyncError, TargetError
from glm_lora.export.adapter_folder import SELECTION_FILE
from glm_lora.export.check import Reference, check_peft
from glm_lora.export.load import load_adapter
from glm_lora.export.peft import export_peft, target_pattern
from glm_lora.lora.serving import CONFIG_FILE, WEIGHTS_FILE
from glm_lora.targets.selection import make_selection
from tests.merged_model import MergedModel
from tests.support import close
from tests.tiny_checkpoint import random_state, tiny_selection

TOKENS = ((3, 5, 7, 11, 2, 9, 30, 4), (8, 8, 1, 19, 21))


@pytest.fixture(scope="module")
def merged(base):
    return MergedModel(base)


@pytest.fixture(scope="module")
def state():
    return random_state(tiny_selection())


@pytest.fixture(scope="module")
def exported(base, state, tmp_path_factory):
    return export_peft(state, tmp_path_factory.mktemp("peft") / "adapter", str(base))


def test_reload_with_stock_peft_equals_the_merged_weights(base, merged, state, exported):
    references = [Reference(t, merged.logprobs(t, state)) for t in TOKENS]
    report = check_peft(exported, base, state, references)
    assert report.num_sites == 43
    assert report.num_tensors == 86
    assert report.max_difference <= 1e-4
    assert report.effect > 0.1, "an adapter that does nothing would pass every comparison"


def test_check_fails_for_another_adapter_and_for_other_numbers(base, merged, state, exported):
    other = random_state(state.selection, seed=9)
    with pytest.raises(ExportError, match="other values than were exported"):
        check_peft(exported, base, other)
    wrong = Reference(TOKENS[0], merged.logprobs(TOKENS[0], other))
    with pytest.raises(ExportError, match="differs from the trainer"):
        check_peft(exported, base, state, [wrong])
    nans = Reference(TOKENS[0], np.full(len(TOKENS[0]) - 1, np.nan))
    with pytest.raises(ExportError, match="differs from the trainer by nan"):
        check_peft(exported, base, state, [nans])


def test_check_counts_what_peft_adapts(base, state, exported, tmp_path):
    config = json.loads((exported / CONFIG_FILE).read_text())
    config["target_modules"] = ["q_proj", "down_proj"]
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    (tmp_path / WEIGHTS_FILE).write_bytes((exported / WEIGHTS_FILE).read_bytes())
    with pytest.raises(ExportError, match="86 tensors of 43 sites"):
        check_peft(tmp_path, base, state)


def test_ranks_per_group_are_padded_at_constant_scaling(base, merged, tmp_path):
    sites = trainable_sites(TINY)
    ranks = {s.disk_name: 2 for s in sites if s.group == "dense_mlp"}
    selection = make_selection("tiny", TINY, sites, rank=4, alpha=6.0, ranks=ranks)
    state = random_state(selection)
    folder = export_peft(state, tmp_path / "a", str(base))
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert {t.shape[0] for k, t in load_file(folder / WEIGHTS_FILE).items() if "lora_A" in k} == {4}
    check_peft(folder, base, state, [Reference(t, merged.logprobs(t, state)) for t in TOKENS])
    again = load_adapter(folder, TINY)
    assert again.digest == state.digest
    assert again.selection == selection


@pytest.mark.parametrize("spec", [FULL, FULL.first_layers(4), TINY], ids=["full", "slice", "tiny"])
def test_pattern_matches_the_selection_and_nothing_else(spec):
    selection = tiny_selection(spec)
    pattern = re.compile(target_pattern(selection))
    modules = {p.memory_name.removesuffix(".weight") for p in all_params(spec).values()}
    modules |= {f"model.visual.blocks.{i}.attn.proj" for i in range(3)}
    modules |= {f"model.visual.blocks.0.mlp.{n}_proj" for n in ("gate", "up", "down")}
    matched = {m for m in modules if pattern.fullmatch(m)}
    assert matched == {a.site.name for a in selection.adapters}
    assert len(matched) == (485 if spec is FULL else 43)


def test_pattern_of_a_partial_selection_is_exact_per_layer():
    sites = [
        s for s in trainable_sites(TINY) if (s.layer, s.leaf) in ((0, "b_proj"), (3, "o_proj"))
    ]
    selection = make_selection("tiny", TINY, sites, rank=2, alpha=4)
    pattern = re.compile(target_pattern(selection))
    names = {s.name for s in trainable_sites(TINY)}
    assert {n for n in names if pattern.fullmatch(n)} == {s.name for s in sites}


def test_pattern_agrees_with_pefts_own_matching(base):
    model = Glm5NextForConditionalGeneration.from_pretrained(base)
    sites = [s for s in trainable_sites(TINY) if s.layer != 1 and s.leaf in ("b_proj", "up_proj")]
    selection = make_selection("tiny", TINY, sites, rank=2, alpha=4)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=target_pattern(selection)))
    adapted = {
        name.split(".lora_A.")[0].removeprefix("base_model.model.")
        for name, _ in peft.named_parameters()
        if ".lora_A." in name
    }
    assert adapted == {s.name for s in sites}


def test_round_trip_is_bit_exact_in_both_dtypes(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        state = random_state(tiny_selection(), version=7, dtype=dtype)
        again = load_adapter(export_peft(state, tmp_path / str(dtype), "tiny"), TINY)
        assert again.digest == state.digest
        assert again.version == 7
        assert again.selection == state.selection


def test_an_adapter_that_peft_saved_itself_loads(base, state, tmp_path):
    """PEFT's own file, without our selection.json: same tensors under our keys."""
    model = Glm5NextForConditionalGeneration.from_pretrained(base)
    folder = export_peft(state, tmp_path / "ours", str(base))
    PeftModel.from_pretrained(model, str(folder)).save_pretrained(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / SELECTION_FILE).exists()
    again = load_adapter(tmp_path / "theirs", TINY)
    assert again.digest == state.digest
    assert [a.site for a in again.selection.adapters] == [a.site for a in state.selection.adapters]


def change(exported, tmp_path, tensors=None, config=None, keep_selection=True):
    """A copy of ``exported`` with functions applied to its tensors and configuration."""
    loaded = load_file(exported / WEIGHTS_FILE)
    settings = json.loads((exported / CONFIG_FILE).read_text())
    if tensors:
        tensors(loaded)
    if config:
        config(settings)
    save_file({k: v.contiguous() for k, v in loaded.items()}, tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(settings))
    if keep_selection:
        (tmp_path / SELECTION_FILE).write_text((exported / SELECTION_FILE).read_text())
    return tmp_path


Q = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_{}.weight"
VISUAL = "base_model.model.model.visual.blocks.0.attn.proj.lora_A.weight"


@pytest.mark.parametrize("keep_selection", [True, False])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop(Q.format("B")), r"1 missing \(.*layers.0.self_attn.q_proj.lora_B.weight"),
        (lambda t: (t.pop(Q.format("A")), t.pop(Q.format("B"))), r"missing \(.*layers.0.*q_proj"),
        (lambda t: t.update({VISUAL: t[Q.format("A")].clone()}), r"1 unknown \(.*visual"),
        (lambda t: t.update({"x.weight": torch.ones(1)}), r"1 unknown \(x.weight\)"),
        (lambda t: t.update({Q.format("A"): t[Q.format("A")].T}), r"1 misshapen .*\[64, 4\]"),
        (lambda t: t[Q.format("B")].fill_(float("nan")), r"1 not finite"),
        (
            lambda t: t.update(
                {Q.format("A").removeprefix("base_model.model."): torch.ones(4, 64)}
            ),
            r"1 twice",
        ),
    ],
    ids=["no B", "no site", "vision", "stray", "transposed", "nan", "twice"],
)
def test_import_refuses_and_lists(exported, tmp_path, spoil, message, keep_selection):
    folder = change(exported, tmp_path, tensors=spoil, keep_selection=keep_selection)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(folder, TINY)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_rslora", True),
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", "4"),
        ("lora_alpha", 0),
        ("lora_alpha", None),
        ("lora_alpha", 7),
    ],
)
def test_import_refuses_configurations_it_cannot_serve(exported, tmp_path, key, value):
    folder = change(exported, tmp_path, config=lambda c: c.update({key: value}))
    with pytest.raises(CheckpointError):
        load_adapter(folder, TINY)


def test_import_refuses_changed_values_wrong_model_and_missing_files(exported, tmp_path):
    folder = tmp_path / "digest"
    folder.mkdir()
    for name in (CONFIG_FILE, SELECTION_FILE):
        (folder / name).write_text((exported / name).read_text())
    tensors = load_file(exported / WEIGHTS_FILE)
    tensors[Q.format("B")][0, 0] += 1
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"digest": "0" * 64})
    with pytest.raises(CheckpointError, match="other values than its own digest"):
        load_adapter(folder, TINY)
    with pytest.raises(TargetError, match="another model"):
        load_adapter(exported, FULL)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_adapter(tmp_path / "nowhere", TINY)
    (folder / WEIGHTS_FILE).write_bytes((exported / WEIGHTS_FILE).read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapter(folder, TINY)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_adapter(folder, TINY)
    (folder / CONFIG_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapter(folder, TINY)


def test_export_refuses_a_state_that_is_not_its_selection(state, tmp_path):
    tensors = dict(state.tensors)
    tensors.pop(next(iter(tensors)))
    with pytest.raises(SyncError, match="1 missing"):
        export_peft(type(state)(state.selection, tensors, 1, state.digest), tmp_path / "a", "x")
    assert not list(tmp_path.iterdir())


def test_output_must_be_new_or_empty_and_writable(state, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "keep.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export_peft(state, tmp_path / "full", "x")
    assert (tmp_path / "full" / "keep.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        export_peft(state, tmp_path / "file", "x")
    (tmp_path / "empty").mkdir()
    export_peft(state, tmp_path / "empty", "x")
    assert (tmp_path / "empty" / CONFIG_FILE).exists()
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="cannot be made"):
            export_peft(state, tmp_path / "locked" / "a", "x")


def test_a_full_disk_leaves_nothing_behind(state, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("glm_lora.checkpoint.safetensors_file.save_file", full)
    with pytest.raises(ExportError, match="No space left"):
        export_peft(state, tmp_path / "a", "x")
    assert not list(tmp_path.iterdir())


def test_frozen_parameters_are_not_sites():
    frozen = {p.memory_name for p in all_params(TINY).values() if p.row.status is Status.FROZEN}
    assert not frozen & {f"{s.name}.weight" for s in trainable_sites(TINY)}


def test_values_in_the_file_are_the_states(state, exported):
    stored = load_file(exported / WEIGHTS_FILE)
    adapter = state.selection.adapters[3]
    assert adapter.site.leaf == "f_a_proj"
    key = f"base_model.model.{adapter.site.name}.lora_A.weight"
    assert ".forget_gate." in key
    close(stored[key], state.tensors[adapter.a_key], "a move, no arithmetic")
