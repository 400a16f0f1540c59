"""A checkpoint folder is checked before anything is built from it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from glm_lora.arch.checkpoint_index import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointIndex,
    read_index,
    verify_sites,
)
from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.safetensors_header import read_header
from glm_lora.arch.spec import FULL, TINY
from glm_lora.errors import CheckpointError, GlmLoraError, ModelError
from tests.hollow import write_hollow

SITES = trainable_sites(TINY)


def tensors(dtype: str = "BF16") -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"{s.disk_name}.weight": (dtype, s.shape) for s in SITES}


def write(folder: Path, files: dict[str, dict[str, tuple[str, tuple[int, ...]]]]) -> Path:
    weight_map: dict[str, str] = {}
    for name, content in files.items():
        write_hollow(folder / name, content)
        weight_map.update(dict.fromkeys(content, name))
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def index_of(folder: Path) -> CheckpointIndex:
    index = read_index(folder)
    assert index is not None
    return index


def refused(folder: Path, kind: type[GlmLoraError], says: str, spec=TINY) -> None:
    with pytest.raises(kind, match=says) as error:
        verify_sites(index_of(folder), spec)
    assert error.value.exit_code == 2


def test_what_transformers_wrote_is_accepted(base: Path) -> None:
    assert verify_sites(index_of(base), TINY) == 43


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    everything = tensors()
    half = dict(list(everything.items())[:20])
    rest = {k: v for k, v in everything.items() if k not in half}
    write(tmp_path, {"a.safetensors": half, "b.safetensors": rest})
    index = index_of(tmp_path)
    assert index.shards == ("a.safetensors", "b.safetensors")
    assert verify_sites(index, TINY) == 43


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert read_index(tmp_path) is None


def test_a_missing_site_is_named(tmp_path: Path) -> None:
    content = tensors()
    del content["model.language_model.layers.1.self_attn.f_b_proj.weight"]
    write(tmp_path, {"a.safetensors": content})
    refused(tmp_path, ModelError, r"lacks model\.language_model\.layers\.1\.self_attn\.f_b_proj")


def test_all_missing_sites_are_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": tensors()})
    refused(tmp_path, ModelError, "and 441 more trainable sites", FULL)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    content = tensors()
    name = "model.language_model.layers.3.self_attn.o_proj.weight"
    content[name] = ("BF16", (64, 65))
    write(tmp_path, {"a.safetensors": content})
    refused(tmp_path, ModelError, r"o_proj\.weight has shape \[64, 65\].*\[64, 64\]")


def test_memory_names_on_disk_are_not_taken(tmp_path: Path) -> None:
    content = {f"{s.name}.weight": ("BF16", s.shape) for s in SITES}
    write(tmp_path, {"a.safetensors": content})
    refused(tmp_path, ModelError, "lacks .*f_a_proj.*and 5 more")


def test_another_architecture(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": {"model.layers.0.self_attn.q_proj.weight": ("BF16", (1, 1))}})
    refused(tmp_path, ModelError, r"first tensor is model\.layers\.0")


def test_fp8_weights_need_their_scales(tmp_path: Path) -> None:
    content = tensors("F8_E4M3")
    write(tmp_path, {"a.safetensors": content})
    refused(tmp_path, ModelError, "_scale_inv")
    content |= {f"{s.disk_name}.weight_scale_inv": ("F32", (1, 1)) for s in SITES}
    write(tmp_path, {"a.safetensors": content})
    assert verify_sites(index_of(tmp_path), TINY) == 43
    content[f"{SITES[0].disk_name}.weight_scale_inv"] = ("F32", (2, 1))
    write(tmp_path, {"a.safetensors": content})
    refused(tmp_path, ModelError, r"_scale_inv has shape \[2, 1\]")


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": tensors()})
    (tmp_path / "a.safetensors").unlink()
    refused(tmp_path, CheckpointError, r"names a\.safetensors, which is not in")
    with pytest.raises(CheckpointError, match=r"names a\.safetensors, which is not in"):
        index_of(tmp_path).require_files()


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": tensors()})
    write_hollow(tmp_path / "a.safetensors", {"other": ("F32", (1,))})
    refused(tmp_path, CheckpointError, "which does not hold it")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"weight_map": {"a": "b"', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "no weight_map"),
        (b"null", "no weight_map"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": []}', "no weight_map"),
        (b'{"weight_map": {"a": 3}}', "maps a to 3"),
        (b'{"weight_map": {"a": "../secret"}}', "maps a to"),
        (b'{"weight_map": {"a": ""}}', "maps a to"),
    ],
)
def test_a_broken_index(tmp_path: Path, text: bytes, says: str) -> None:
    (tmp_path / INDEX_FILE).write_bytes(text)
    refused(tmp_path, CheckpointError, says)


def test_an_index_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).mkdir()
    refused(tmp_path, CheckpointError, "cannot be read")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 9) + b'{"a": 3}' + b" ",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 12) + b'{"a": {"b":1',
    ],
)
def test_a_file_that_is_no_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / SINGLE_FILE
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_header(path)


def test_a_truncated_shard(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    write_hollow(path, {"a": ("U8", (10,))})
    assert read_header(path).entries["a"].shape == (10,)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged: it is truncated"):
        read_header(path)
