"""Conversion of checkpoints in the released format, against transformers and the definition."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Glm5NextForConditionalGeneration

from benchmarks.synthetic_checkpoint import is_quantised, layer_of, write_checkpoint
from glm_lora.arch.checkpoint_index import SCALE_SUFFIX
from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import ModelSpec
from glm_lora.checkpoint import base_writer
from glm_lora.checkpoint.convert import disk_names, from_memory, open_source, wanted_names
from glm_lora.checkpoint.hf_reader import HfReader, dequantise_block
from glm_lora.checkpoint.manifest import read_manifest
from glm_lora.checkpoint.prepare import prepare
from glm_lora.checkpoint.torch_dist import RELEASE, load_tensors, sharded_state_dict
from tests.checkpoint.released_case import SMALL, case

ALIGNED = replace(
    SMALL, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, q_lora_rank=128,
    kv_lora_rank=128, v_head_dim=32, linear_head_dim=32,
)  # fmt: skip
"""transformers takes the block size from the shapes, which is right only for multiples of 128."""


def load_whole(ref_load: Path, spec: ModelSpec) -> dict[str, Tensor]:
    records = read_manifest(ref_load).tensors
    local = {r.key: torch.empty(r.shape, dtype=getattr(torch, r.dtype)) for r in records}
    load_tensors(ref_load / RELEASE, sharded_state_dict(local, all_params(spec)))
    return local


@pytest.mark.parametrize(("spec", "fp8"), [(SMALL, False), (ALIGNED, True)], ids=["bf16", "fp8"])
def test_against_transformers(
    tmp_path: Path, spec: ModelSpec, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_writer, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(base_writer, "PART_BYTES", 300_000)
    hf = write_checkpoint(tmp_path / "hf", spec, fp8=fp8)
    result = prepare(case(tmp_path, hf, verify=True))
    ours = load_whole(tmp_path / "base", spec)
    model = Glm5NextForConditionalGeneration.from_pretrained(hf)
    theirs = from_memory(model.state_dict(), all_params(spec).values())
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value.to(theirs[key].dtype), theirs[key]), key
    assert result.skipped["vision tower"] == 25 and result.skipped["layers beyond the base"] > 40
    assert len(list((tmp_path / "base" / RELEASE).glob("*.distcp"))) > 3


def test_ragged_blocks_by_definition(tmp_path: Path) -> None:
    hf = write_checkpoint(tmp_path / "hf", SMALL, fp8=True)
    prepare(case(tmp_path, hf))
    ours = load_whole(tmp_path / "base", SMALL)
    reader = HfReader.open(hf)
    raw = {n: _as_stored(reader, n) for n in reader.entries}
    quantised = 0
    for key, param in all_params(SMALL).items():
        expected = []
        for name in disk_names(param):
            value = raw[name]
            if name + SCALE_SUFFIX in raw:
                rows, columns = value.shape
                scale = raw[name + SCALE_SUFFIX].repeat_interleave(128, 0)[:rows]
                scale = scale.repeat_interleave(128, 1)[:, :columns]
                value = (value.float() * scale).bfloat16()
                quantised += 1
            expected.append(value)
        whole = torch.stack(expected) if param.row.expert else expected[0]
        assert ours[key].dtype is whole.dtype and torch.equal(ours[key], whole), key
    assert quantised == sum(
        len(disk_names(p)) for p in all_params(SMALL).values() if is_quantised(SMALL, p)
    )


def _as_stored(reader: HfReader, name: str) -> Tensor:
    from glm_lora.checkpoint.safetensors_file import read_rows

    return read_rows(reader.entries[name])


@pytest.mark.parametrize("nan", [False, True])
def test_every_fp8_value(nan: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    if not nan:
        codes[[0x7F, 0xFF]] = 0
    weight = codes.view(torch.float8_e4m3fn).repeat(3, 1)
    scale = torch.tensor([3.7e-5, 1.9e3])
    out = torch.empty(3, 256, dtype=torch.bfloat16)
    dequantise_block(weight, scale, out)
    expected = (weight.float() * scale.repeat_interleave(128)).bfloat16()
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_the_fingerprint_depends_on_values_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = set()
    for shards, workers, chunk, part in ((1, 1, 2**24, 2**29), (4, 3, 5_000, 100_000)):
        monkeypatch.setattr(base_writer, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(base_writer, "PART_BYTES", part)
        folder = tmp_path / str(shards)
        hf = write_checkpoint(folder / "hf", SMALL, fp8=True, shards=shards)
        prints.add(prepare(case(folder, hf, workers=workers)).fingerprint)
    assert len(prints) == 1


def test_a_slice_needs_only_its_shards(tmp_path: Path) -> None:
    """62 shards, of which those without the first layers, embeddings, norm and head are deleted."""
    deep = replace(
        SMALL, num_hidden_layers=45, layer_types=(), mlp_layer_types=(), n_routed_experts=4,
    )  # fmt: skip
    hf = write_checkpoint(tmp_path / "hf", deep, fp8=True, shards=62)
    whole = HfReader.open(hf)
    needed = {
        entry.path.name
        for name, entry in whole.entries.items()
        if (layer_of(name) is None and not name.startswith("model.visual"))
        or (layer_of(name) is not None and layer_of(name) < 4)
    }
    wanted = wanted_names(deep.first_layers(4))
    assert len(needed) < 15
    assert set(HfReader.open(hf, wanted).files) == needed
    for shard in whole.files.keys() - needed:
        (hf / shard).unlink()
    result = prepare(case(tmp_path, hf, num_layers=4))
    assert result.skipped["layers beyond the base"] == sum(
        (layer_of(n) or 0) >= 4 for n in whole.entries
    )
    assert read_manifest(tmp_path / "base").spec == deep.first_layers(4)
    assert set(read_manifest(tmp_path / "base").source["files"]) == needed


def test_hub_cache_layout_and_read_only_source(tmp_path: Path) -> None:
    real = write_checkpoint(tmp_path / "blobs", SMALL, fp8=True)
    snapshot = tmp_path / "models--x--y" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(real.iterdir())):
        blob = real / f"{i:064x}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    for folder in (real, snapshot):
        folder.chmod(0o555)
    try:
        assert prepare(case(tmp_path, snapshot)).made == ("base",)
    finally:
        for folder in (real, snapshot):
            folder.chmod(0o755)


def test_source_dtype_is_kept(tmp_path: Path) -> None:
    hf = write_checkpoint(tmp_path / "hf", SMALL, fp8=True)
    source = open_source(HfReader.open(hf), SMALL)
    by_dtype: dict[torch.dtype, set[str]] = {}
    for param in all_params(SMALL).values():
        by_dtype.setdefault(source.dtype(param), set()).add(param.row.leaf)
    assert by_dtype.keys() == {torch.float32, torch.bfloat16}
    assert {"A_log", "dt_bias", "hc_attn_base", "hc_ffn_scale", "e_score_correction_bias"} == (
        by_dtype[torch.float32] - {"hc_attn_scale", "hc_ffn_base"}
    )
