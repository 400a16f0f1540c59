"""From a base back to a Hugging Face checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.synthetic_checkpoint import layer_of, write_checkpoint
from glm_lora.arch.checkpoint_index import SCALE_SUFFIX
from glm_lora.arch.spec import spec_from_dir
from glm_lora.checkpoint import base_writer
from glm_lora.checkpoint.hf_reader import HfReader
from glm_lora.checkpoint.manifest import read_manifest
from glm_lora.checkpoint.prepare import PrepareResult, prepare
from glm_lora.checkpoint.to_hf import write_hf
from glm_lora.errors import CheckpointError
from tests.checkpoint.released_case import SMALL, case
from tests.support import load_whole


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("layers", [None, 4])
def test_round_trip(
    tmp_path: Path, fp8: bool, layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_writer, "CHUNK_BYTES", 40_000)
    hf = write_checkpoint(tmp_path / "hf", SMALL, fp8=fp8)
    (hf / "tokenizer.json").write_text("{}")
    back = tmp_path / "back"
    result = prepare(case(tmp_path, hf, to_hf=back, num_layers=layers))
    assert result.made == ("base", "to_hf")
    kept = layers or SMALL.num_hidden_layers
    source, written = HfReader.open(hf), HfReader.open(back)
    expected = {
        n for n in source.entries
        if not n.endswith(SCALE_SUFFIX) and (layer_of(n) is None or layer_of(n) < kept)
    }  # fmt: skip
    assert written.entries.keys() == expected
    for name in expected:
        value, original = written.rows(name), source.rows(name)
        assert value.dtype is original.dtype and torch.equal(value, original), name
    assert spec_from_dir(back) == SMALL.first_layers(kept)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    assert (back / "tokenizer.json").exists() and not (back / "glm_lora.json").exists()
    again = prepare(case(tmp_path / "again", back))
    assert again.fingerprint == result.fingerprint
    load_whole(back)


def test_the_tiny_model(tiny: PrepareResult, tmp_path: Path) -> None:
    write_hf(tiny.ref_load, read_manifest(tiny.ref_load), tiny.hf_checkpoint, tmp_path / "back")
    source, back = HfReader.open(tiny.hf_checkpoint), HfReader.open(tmp_path / "back")
    assert source.entries.keys() == back.entries.keys()
    assert all(torch.equal(source.rows(n), back.rows(n)) for n in source.entries)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.decode(tokenizer("7?>").input_ids) == "7?>"


def test_random_without_a_source(tmp_path: Path) -> None:
    config = case(
        tmp_path, tmp_path / "none", model_name="tiny", init="random", to_hf=tmp_path / "back"
    )
    result = prepare(config)
    assert result.made == ("data", "base", "to_hf")
    load_whole(tmp_path / "back")
    again = prepare(case(tmp_path / "again", tmp_path / "back"))
    assert again.fingerprint == result.fingerprint


def test_targets_that_are_not_empty_are_refused_first(tmp_path: Path) -> None:
    hf = write_checkpoint(tmp_path / "hf", replace(SMALL), fp8=False)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="back is not empty"):
        prepare(case(tmp_path, hf, to_hf=tmp_path / "back"))
    assert not (tmp_path / "base").exists()
