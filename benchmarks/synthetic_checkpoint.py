"""Synthetic checkpoints in the released format, of any size, for tests and benchmarks.

Several shards with an index, disk names, FP8 blocks with scales (or bfloat16 throughout), fp32
where the release has fp32, a multi-token-prediction layer behind the last one and a vision tower.
Values are random but cheap: they are taken from one pool of random bytes at changing offsets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glm_lora.arch.checkpoint_index import INDEX_FILE, SCALE_SUFFIX, scale_shape
from glm_lora.arch.projections import LAYERS_PREFIX, Param, all_params
from glm_lora.arch.spec import DSA, SPARSE, ModelSpec
from glm_lora.checkpoint.convert import disk_names
from glm_lora.checkpoint.hf_config import text_config, vision_config
from glm_lora.checkpoint.hf_writer import PlannedTensor, planned, write_shard
from glm_lora.checkpoint.random_init import fill_random
from glm_lora.checkpoint.to_hf import random_vision

QUANTISED = re.compile(
    r"\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa)\.weight$|\.mlp\..*(gate|up|down)_proj\.weight$"
)
"""What the release stores as FP8, besides the output projection of sparse attention."""
F32 = ("A_log", "dt_bias", "_base", "_scale", "e_score_correction_bias")
_POOL_BYTES = 2**22 + 4099


def is_quantised(spec: ModelSpec, param: Param) -> bool:
    """Whether the release stores ``param`` as FP8 blocks."""
    o_proj = param.key.endswith("o_proj.weight") and not spec.is_kda(param.layer or 0)
    return bool(QUANTISED.search(param.key)) or o_proj


def tensors(
    spec: ModelSpec, *, fp8: bool, seed: int = 0, mtp: bool = True, vision: bool = True
) -> Iterator[PlannedTensor]:
    """Everything such a checkpoint holds, in layer order."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(0, 255, (_POOL_BYTES,), dtype=torch.uint8, generator=generator)
    pool = pool.masked_fill((pool & 0x7F) == 0x7F, 0)  # no NaN
    full = _with_mtp(spec) if mtp else spec
    for param in all_params(full).values():
        yield from _param(full, param, fp8, seed, pool)
    if vision:
        yield from planned(random_vision(spec))


def _with_mtp(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        num_hidden_layers=spec.num_hidden_layers + 1,
        layer_types=(*spec.layer_types, DSA),
        mlp_layer_types=(*spec.mlp_layer_types, SPARSE),
    )


def _param(
    spec: ModelSpec, param: Param, fp8: bool, seed: int, pool: torch.Tensor
) -> Iterator[PlannedTensor]:
    for i, name in enumerate(disk_names(param)):
        shape = param.shape[1:] if param.row.expert else param.shape
        if fp8 and is_quantised(spec, param):
            yield PlannedTensor(name, torch.float8_e4m3fn, shape, _bytes(pool, name, shape))
            scale = scale_shape(shape)
            yield PlannedTensor(
                name + SCALE_SUFFIX, torch.float32, scale, _scale(pool, name, scale)
            )
            continue
        dtype = torch.float32 if param.key.endswith(F32) else torch.bfloat16

        def read(i: int = i, dtype: torch.dtype = dtype) -> torch.Tensor:
            rows = 1 if param.row.expert else param.shape[0]
            out = torch.empty((rows, *param.shape[1:]), dtype=dtype)
            fill_random(param, seed, out, i if param.row.expert else 0)
            return out[0] if param.row.expert else out

        yield PlannedTensor(name, dtype, shape, read)


def _bytes(pool: torch.Tensor, name: str, shape: tuple[int, ...]) -> Any:
    def read() -> torch.Tensor:
        count = shape[0] * shape[1]
        start = sum(name.encode()) * 977 % 4096
        turns = -(-count // (len(pool) - start))
        return pool[start:].repeat(turns)[:count].view(torch.float8_e4m3fn).view(shape)

    return read


def _scale(pool: torch.Tensor, name: str, shape: tuple[int, ...]) -> Any:
    def read() -> torch.Tensor:
        start = sum(name.encode()) % 4096
        values = pool[start : start + shape[0] * shape[1]].float().view(shape)
        return values.add_(1).mul_(2e-7)

    return read


def config_json(spec: ModelSpec, *, fp8: bool) -> dict[str, Any]:
    """A ``config.json`` as the release has it."""
    text = text_config(spec)
    text |= {"model_type": "glm5_next_text", "num_nextn_predict_layers": 1}
    config: dict[str, Any] = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"model_type": "glm5_next_vision", **vision_config(spec)},
    }
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    return config


def write_checkpoint(
    folder: Path,
    spec: ModelSpec,
    *,
    fp8: bool,
    shards: int = 3,
    seed: int = 0,
    mtp: bool = True,
    vision: bool = True,
) -> Path:
    """Write a whole checkpoint folder of about equal shards; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(tensors(spec, fp8=fp8, seed=seed, mtp=mtp, vision=vision))
    limit = sum(t.nbytes for t in everything) / shards
    groups: list[list[PlannedTensor]] = [[] for _ in range(shards)]
    filled = 0
    for tensor in everything:
        groups[min(shards - 1, int(filled / limit))].append(tensor)
        filled += tensor.nbytes
    weight_map = {}
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_shard(folder / name, group)
        weight_map |= {t.name: name for t in group}
    index = {"metadata": {"total_size": filled}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_json(spec, fp8=fp8)))
    return folder


def layer_of(name: str) -> int | None:
    """The layer a disk name belongs to, or None."""
    rest = name.removeprefix(LAYERS_PREFIX)
    return int(rest.split(".")[0]) if rest != name else None
