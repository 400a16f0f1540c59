"""Built-in description, config.json and index are one model, or the command stops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from glm_lora.arch.checkpoint_index import INDEX_FILE
from glm_lora.arch.spec import BUILTIN, FULL, TINY
from glm_lora.config import SelectionConfig
from glm_lora.errors import CheckpointError, ModelError
from glm_lora.targets.model import known_model
from glm_lora.targets.report import run_targets


@pytest.mark.parametrize("name", list(BUILTIN))
def test_the_three_sources_agree(model_folder, name: str) -> None:
    folder = model_folder(BUILTIN[name])
    built_in = known_model(name)
    read = known_model("another name", folder)
    checked = known_model(name, folder)
    assert built_in.spec == read.spec == checked.spec
    assert INDEX_FILE in checked.source and "trainable sites" in checked.source
    texts = {
        run_targets(model_name=name, config=SelectionConfig(), hf_checkpoint=f, as_json=True)
        for f in (None, folder)
    }
    reports = [{k: v for k, v in json.loads(t).items() if k != "source"} for t in texts]
    assert reports[0] == reports[-1]


def test_config_alone_is_enough(model_folder) -> None:
    model = known_model("mine", model_folder(replace(TINY, hidden_size=128), index=False))
    assert model.spec.hidden_size == 128 and model.source == "config.json"


def test_a_slice_of_a_longer_checkpoint_needs_only_its_own_files(model_folder) -> None:
    name = "GLM-5.3-Flash-4layer"
    folder = model_folder(FULL.first_layers(8))
    (folder / "model-00007.safetensors").unlink()
    assert known_model(name, folder).spec == BUILTIN[name]
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002\.safetensors"):
        known_model(name, folder)


def test_every_file_of_the_index_must_be_there(model_folder) -> None:
    folder = model_folder(TINY)
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["model.visual.post_layernorm.weight"] = "vision.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names vision\.safetensors"):
        known_model("tiny", folder)


def test_an_index_with_more_layers_than_the_config(model_folder) -> None:
    folder = model_folder(FULL.first_layers(8))
    config = model_folder(FULL.first_layers(4), "short", index=False) / "config.json"
    (folder / "config.json").write_text(config.read_text())
    with pytest.raises(ModelError, match=r"holds layer 7, but config\.json has 4 layers"):
        known_model("mine", folder)


def test_the_mtp_layer_may_follow_the_last(model_folder) -> None:
    folder = model_folder(FULL)
    index = json.loads((folder / INDEX_FILE).read_text())
    name = "model.language_model.layers.45.eh_proj.weight"
    index["weight_map"][name] = "model-00044.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert known_model("GLM-5.3-Flash", folder).spec == FULL


@pytest.mark.parametrize(
    ("name", "spec", "says"),
    [
        ("tiny", replace(TINY, hidden_size=128), "hidden_size 128 instead of 64"),
        ("tiny", FULL.first_layers(4), "is not tiny"),
        ("GLM-5.3-Flash", FULL.first_layers(4), "num_hidden_layers 4 instead of 45"),
        ("GLM-5.3-Flash", replace(FULL, index_kpool=16), "index_kpool 16 instead of 4"),
    ],
)
def test_a_folder_of_another_model(model_folder, name: str, spec, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        known_model(name, model_folder(spec))


def test_an_index_of_another_model(model_folder) -> None:
    folder = model_folder(TINY)
    other = model_folder(replace(TINY, q_lora_rank=48), "other", index=False)
    (folder / "config.json").write_text((other / "config.json").read_text())
    with pytest.raises(ModelError, match=r"q_a_proj\.weight has shape \[32, 64\].*\[48, 64\]"):
        known_model("mine", folder)


def test_an_unknown_name_without_a_folder() -> None:
    with pytest.raises(ModelError, match="Did you mean 'tiny'"):
        known_model("tny")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        known_model("tiny", tmp_path / "none")


def test_a_broken_index_stops_the_command(model_folder) -> None:
    folder = model_folder(TINY)
    text = (folder / INDEX_FILE).read_text()
    (folder / INDEX_FILE).write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="not valid JSON") as error:
        run_targets(model_name="tiny", config=SelectionConfig(), hf_checkpoint=folder)
    assert error.value.exit_code == 2
