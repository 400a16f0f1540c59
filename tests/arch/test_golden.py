"""The facts table says what transformers says, at full size and on disk."""

from __future__ import annotations

import json
from pathlib import Path

from glm_lora.arch.foreign import MTP_LAYER, mtp_modules, vision_modules
from glm_lora.arch.projections import (
    LAYERS_PREFIX,
    all_params,
    all_sites,
    layer_rows,
    trainable_sites,
)
from glm_lora.arch.safetensors_header import read_header
from glm_lora.arch.spec import FULL, TINY, spec_from_dir

GOLDEN = Path(__file__).parent.parent / "golden" / "glm5_3_flash_sites.tsv"


def test_the_golden_file_equals_the_table() -> None:
    lines = [f"{s.name}\t{s.out_features}\t{s.in_features}" for s in trainable_sites(FULL)]
    golden = GOLDEN.read_text(encoding="ascii").splitlines()
    assert len(golden) == 485
    assert sorted(lines) == sorted(golden)


def test_the_golden_file_is_what_transformers_builds(golden_script, flash_on_meta) -> None:
    assert golden_script.site_lines(flash_on_meta) == GOLDEN.read_text().splitlines()


def test_every_text_parameter_has_transformers_name_and_shape(flash_on_meta) -> None:
    theirs = {
        name: tuple(value.shape)
        for name, value in flash_on_meta.state_dict().items()
        if ".visual." not in name
    }
    ours: dict[str, tuple[int, ...]] = {}
    for param in all_params(FULL).values():
        name = param.memory_name
        shape = param.shape
        if name in ours:  # q, k, v convolutions on axis 0; expert gate and up on axis 1
            axis = 1 if param.row.expert else 0
            merged = list(ours[name])
            merged[axis] += shape[axis]
            shape = tuple(merged)
        ours[name] = shape
    assert ours == theirs


def test_the_parameter_count_of_the_whole_model(flash_on_meta) -> None:
    vision = sum(p.numel() for n, p in flash_on_meta.named_parameters() if ".visual." in n)
    buffers = sum(b.numel() for n, b in flash_on_meta.named_buffers() if "e_score" in n)
    text = sum(p.numel for p in all_params(FULL).values())
    total = sum(p.numel() for p in flash_on_meta.parameters())
    assert text + vision == total + buffers


def test_vision_names_are_transformers(flash_on_meta) -> None:
    theirs = {
        name.rsplit(".", 1)[0] for name, _ in flash_on_meta.named_parameters() if "visual" in name
    }
    assert set(vision_modules()) == theirs


def test_disk_names_and_shapes_are_those_transformers_writes(base: Path) -> None:
    theirs = {
        name: info.shape
        for name, info in read_header(base / "model.safetensors").entries.items()
        if ".visual." not in name
    }
    ours: dict[str, tuple[int, ...]] = {}
    for key, param in all_params(TINY).items():
        if param.row.expert:
            before, after = key.rsplit(".", 2)[0], key.rsplit(".", 2)[1:]
            for expert in range(TINY.n_routed_experts):
                ours[f"{before}.{expert}.{'.'.join(after)}"] = param.shape[1:]
        else:
            ours[key] = param.shape
    assert ours == theirs


def test_the_released_checkpoint_has_this_many_tensors(flash_on_meta) -> None:
    """Its 62 shards hold 76,108 tensors: text, vision and MTP, and a scale per FP8 weight."""
    fp8 = {"dsa", "dense_mlp", "shared_experts", "routed_experts"}
    text = sum(FULL.n_routed_experts if p.row.expert else 1 for p in all_params(FULL).values())
    scales = sum(s.group in fp8 for s in all_sites(FULL))
    vision = sum("visual" in name for name, _ in flash_on_meta.named_parameters())
    groups = {row.path: row.group for row in layer_rows(FULL, 3)}
    mtp = 0
    for name in mtp_modules():
        path = name.removeprefix(f"{LAYERS_PREFIX}{MTP_LAYER}.")
        plain = ".".join(part for part in path.split(".") if not part.isdigit())
        mtp += 2 if groups.get(plain) in fp8 else 1
    assert text + scales + vision + mtp == 76_108


def test_config_and_builtin_agree(base: Path) -> None:
    assert spec_from_dir(base) == TINY


def test_the_nested_spelling_of_the_released_config(tmp_path: Path, base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    text = config["text_config"]
    text["linear_attn_config"] = {
        "head_dim": text.pop("linear_head_dim"),
        "num_heads": text.pop("linear_num_heads"),
        "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"),
        "gate_lower_bound": text.pop("linear_lower_bound"),
    }
    text["first_k_dense_replace"] = 3
    del text["mlp_layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert spec_from_dir(tmp_path) == TINY
