"""Damaged and foreign sources: the tensor and its file are named, and nothing looks finished."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_checkpoint import write_checkpoint
from glm_lora.arch.checkpoint_index import INDEX_FILE
from glm_lora.checkpoint.prepare import prepare
from glm_lora.checkpoint.torch_dist import TRACKER
from glm_lora.errors import CheckpointError, ModelError
from tests.checkpoint.released_case import SMALL, case

FIRST = "model-00001-of-00003.safetensors"
DENSE = "model.language_model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf", SMALL, fp8=True)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a safetensors file and leave its data alone."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit_index(hf: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((hf / INDEX_FILE).read_text())
    change(index["weight_map"])
    (hf / INDEX_FILE).write_text(json.dumps(index))


def rename(old: str, new: str, hf: Path) -> None:
    """Rename a tensor in its shard and in the index."""
    shard = json.loads((hf / INDEX_FILE).read_text())["weight_map"][old]
    edit_header(hf / shard, lambda h: h.update({new: h.pop(old)}))
    edit_index(hf, lambda m: m.update({new: m.pop(old)}))


def flip(hf: Path, position: int) -> None:
    data = bytearray((hf / FIRST).read_bytes())
    data[position] ^= 0xFF
    (hf / FIRST).write_bytes(data)


def truncate(hf: Path) -> None:
    os.truncate(hf / FIRST, (hf / FIRST).stat().st_size - 5)


def duplicate_in_header(hf: Path) -> None:
    path = hf / FIRST
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length].rstrip()
    entry = json.dumps(json.loads(text)[DENSE])
    text = text[:-1] + f',"{DENSE}":{entry}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def duplicate_over_shards(hf: Path) -> None:
    (hf / "model-00002-of-00003.safetensors").write_bytes((hf / FIRST).read_bytes())


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, rf"{FIRST} is damaged: it is truncated"),
    "longer": (lambda hf: (hf / FIRST).open("ab").write(b"x"), "longer than its header"),
    "empty file": (lambda hf: os.truncate(hf / FIRST, 0), rf"{FIRST} is damaged"),
    "header length flipped": (lambda hf: flip(hf, 3), rf"{FIRST} is damaged: .* bytes cannot hold"),
    "header byte flipped": (lambda hf: flip(hf, 9), rf"{FIRST} is damaged: its header is not JSON"),
    "shape does not fit": (
        lambda hf: edit_header(hf / FIRST, lambda h: h[DENSE].update(shape=[7, 7])),
        "down_proj.* has .* bytes",
    ),
    "unknown dtype": (
        lambda hf: edit_header(hf / FIRST, lambda h: h[DENSE].update(dtype="F4")),
        r"header entry of 'model\.language_model\.layers\.0\.mlp\.down_proj",
    ),
    "twice in a header": (duplicate_in_header, "down_proj.weight' is in the header twice"),
    "twice over shards": (duplicate_over_shards, "is both in .*00001.* and in .*00002"),
    "missing shard": (lambda hf: (hf / FIRST).unlink(), r"lacks 1 of 3 shards \(model-00001"),
    "index names another shard": (
        lambda hf: edit_index(hf, lambda m: m.update({DENSE: "model-00003-of-00003.safetensors"})),
        "layers.0.mlp.down_proj.weight.*index",
    ),
    "index forgets a tensor": (
        lambda hf: edit_index(hf, lambda m: m.pop(DENSE)),
        "holds .*down_proj.weight, which the index puts into no shard",
    ),
    "index is no JSON": (
        lambda hf: (hf / INDEX_FILE).write_text("{"),
        "index.json is not valid JSON",
    ),
    "index leaves the folder": (
        lambda hf: edit_index(hf, lambda m: m.update({DENSE: "../x.safetensors"})),
        r"down_proj\.weight to '\.\./x",
    ),
    "missing tensor": (
        lambda hf: rename(DENSE, "model.visual.extra", hf),
        "lacks model.language_model.layers.0.mlp.down_proj.weight",
    ),
    "unexpected tensor": (
        lambda hf: rename("model.visual.patch_embed.proj.bias", "model.language_model.odd", hf),
        "model.language_model.odd in .*safetensors is not a tensor of glm5_next",
    ),
    "missing scale": (
        lambda hf: rename(DENSE + "_scale_inv", "model.visual.scale", hf),
        "down_proj.weight in .* is FP8 but .*_scale_inv is missing",
    ),
    "scale without FP8": (
        lambda hf: rename(
            "model.visual.patch_embed.proj.bias",
            "model.language_model.layers.0.self_attn.q_proj.weight_scale_inv",
            hf,
        ),
        "q_proj.weight_scale_inv in .* scales a weight that is not FP8",
    ),
    "wrong shape": (
        lambda hf: edit_header(hf / FIRST, lambda h: h[DENSE]["shape"].reverse()),
        r"down_proj.weight in .* has shape \(300, 200\); expected \(200, 300\)",
    ),
    "wrong dtype": (
        lambda hf: edit_header(
            hf / FIRST,
            lambda h: h["model.language_model.norm.weight".replace("norm", "embed_tokens")].update(
                dtype="F16"
            ),
        ),
        r"embed_tokens.weight in .* has dtype torch.float16; expected BF16, F32, or F8_E4M3",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_damage(tmp_path: Path, hf: Path, name: str) -> None:
    damage, message = CASES[name]
    damage(hf)
    with pytest.raises(CheckpointError, match=message) as caught:
        prepare(case(tmp_path, hf))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "base" / TRACKER).exists()


def test_a_tensor_that_vanishes_while_converting(
    tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glm_lora.checkpoint import base_build

    start = base_build._start

    def truncate_then_start(plan: Any) -> None:
        start(plan)
        os.truncate(hf / FIRST, 20_000)

    monkeypatch.setattr(base_build, "_start", truncate_then_start)
    with pytest.raises(CheckpointError, match="is damaged: it ends inside"):
        prepare(case(tmp_path, hf))
    assert not (tmp_path / "base" / TRACKER).exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "glm_moe_dsa"}, "model_type 'glm_moe_dsa'.*expected 'glm5_next'"),
        ([1], "holds a list"),
        (
            {"model_type": "glm5_next", "text_config": {"num_hidden_layers": "4"}},
            "num_hidden_layers|type",
        ),
    ],
)
def test_other_config(tmp_path: Path, hf: Path, content: object, message: str) -> None:
    (hf / "config.json").write_text(json.dumps(content))
    with pytest.raises((ModelError, CheckpointError), match=message):
        prepare(case(tmp_path, hf))
    assert not (tmp_path / "base").exists()


def test_more_layers_than_there_are(tmp_path: Path, hf: Path) -> None:
    with pytest.raises(CheckpointError, match="has 5 layers; expected at least the 9"):
        prepare(case(tmp_path, hf, num_layers=9))


def test_the_wrong_folder_for_a_built_in_name(tmp_path: Path, hf: Path) -> None:
    with pytest.raises(ModelError, match=r"is not GLM-5\.3-Flash-4layer"):
        prepare(case(tmp_path, hf, model_name="GLM-5.3-Flash-4layer"))


def test_a_changed_source_is_noticed(tmp_path: Path, hf: Path) -> None:
    prepare(case(tmp_path, hf))
    write_checkpoint(hf, SMALL, fp8=True, seed=1)
    with pytest.raises(CheckpointError, match=r"another source.*--force"):
        prepare(case(tmp_path, hf))
    assert prepare(case(tmp_path, hf, force=True)).made == ("base",)


def test_not_enough_disk(tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_lora.checkpoint.files.free_bytes", lambda folder: 10)
    with pytest.raises(CheckpointError, match=r"the base needs .* [kM]B and the disk of"):
        prepare(case(tmp_path, hf))


def test_disk_full_in_the_middle(tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("glm_lora.checkpoint.base_writer.record_frame", no_space)
    with pytest.raises(CheckpointError, match=r"the disk of .*base is full.*parts are kept"):
        prepare(case(tmp_path, hf))
    monkeypatch.undo()
    assert prepare(case(tmp_path, hf)).made == ("base",)
