"""From a Hugging Face checkpoint to the tensors of a base: which are used, checked, and how.

Every tensor of the text model is used exactly once. The vision tower, layers beyond those wanted
(the multi-token-prediction layer, or everything behind a slice) are skipped and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from glm_lora.arch.checkpoint_index import SCALE_SUFFIX, scale_shape
from glm_lora.arch.foreign import VISION_PREFIX
from glm_lora.arch.projections import LAYERS_PREFIX, Param, all_params
from glm_lora.arch.spec import ModelSpec
from glm_lora.checkpoint.hf_reader import HfReader
from glm_lora.errors import CheckpointError

_LAYER = re.compile(re.escape(LAYERS_PREFIX) + r"(\d+)\.")
_ACCEPTED = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def disk_names(param: Param) -> list[str]:
    """The names on disk that make up ``param``: itself, or one per routed expert."""
    row = param.row
    if not row.expert:
        return [param.key]
    prefix = param.key.removesuffix(row.path + row.suffix)
    return [prefix + row.expert_path(e) + row.suffix for e in range(param.shape[0])]


def wanted_names(spec: ModelSpec) -> frozenset[str]:
    """Every name on disk that a base of ``spec`` needs, with the scales there may be."""
    names = [name for param in all_params(spec).values() for name in disk_names(param)]
    return frozenset([*names, *(name + SCALE_SUFFIX for name in names)])


def skip_reason(name: str, layers: int) -> str | None:
    """Why a tensor on disk is no part of a base of ``layers`` layers; None when it is one."""
    if name.startswith(VISION_PREFIX):
        return "vision tower"
    match = _LAYER.match(name)
    if match and int(match[1]) >= layers:
        return "layers beyond the base"
    return None


@dataclass(frozen=True)
class HfSource:
    """A checked Hugging Face checkpoint as the source of a base's values."""

    reader: HfReader
    spec: ModelSpec
    skipped: Mapping[str, int]
    """Number of tensors that are not used, by reason."""

    def dtype(self, param: Param) -> torch.dtype:
        """What is on disk; FP8 becomes bfloat16."""
        stored = self.reader.entries[disk_names(param)[0]].dtype
        return torch.bfloat16 if stored is torch.float8_e4m3fn else stored

    def fill(self, param: Param, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` with rows from ``start`` on (of routed experts: one expert per row)."""
        if not param.row.expert:
            self.reader.rows_into(param.key, start, out)
            return
        names = disk_names(param)[start : start + out.shape[0]]
        for name, value in zip(names, out, strict=True):
            self.reader.rows_into(name, 0, value)


def open_source(reader: HfReader, spec: ModelSpec) -> HfSource:
    """Check that ``reader`` holds the text model of ``spec``, each tensor exactly once.

    Raises:
        CheckpointError: Something is missing, unexpected, of a wrong shape or dtype, a quantised
            weight has no scale, or a scale no weight; the name and its shard are told.
    """
    expected: dict[str, tuple[Param, tuple[int, ...]]] = {}
    for param in all_params(spec).values():
        for name in disk_names(param):
            expected[name] = (param, param.shape[1:] if param.row.expert else param.shape)
    entries = reader.entries
    _check_missing([n for n in expected if n not in entries], reader)
    skipped: Counter[str] = Counter()
    for name, shard in reader.index.weight_map.items():
        if reason := skip_reason(name, spec.num_hidden_layers):
            skipped[reason] += 1
            continue
        weight = name.removesuffix(SCALE_SUFFIX)
        if name not in expected and (name == weight or weight not in expected):
            raise CheckpointError(
                f"{name} in {reader.folder / shard} is not a tensor of glm5_next",
                "a GLM-5.3-Flash checkpoint",
            )
        if name not in expected and not reader.is_quantised(weight):
            raise CheckpointError(
                f"{name} in {reader.folder / shard} scales a weight that is not FP8",
                "F8_E4M3 blocks",
            )
    for name, (param, shape) in expected.items():
        _check_tensor(reader, name, param, shape)
    return HfSource(reader, spec, dict(skipped))


def _check_missing(missing: list[str], reader: HfReader) -> None:
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{reader.folder} lacks {', '.join(missing[:3])}{more}",
            "every tensor of the text model",
            "Check that the download is complete and that config.json belongs to it",
        )


def _check_tensor(reader: HfReader, name: str, param: Param, shape: tuple[int, ...]) -> None:
    entry = reader.entries[name]
    where = f"{name} in {entry.path}"
    if entry.shape != shape:
        raise CheckpointError(f"{where} has shape {entry.shape}", str(shape))
    if entry.dtype not in _ACCEPTED:
        raise CheckpointError(f"{where} has dtype {entry.dtype}", "BF16, F32, or F8_E4M3 blocks")
    first = reader.entries[disk_names(param)[0]] if param.row.expert else entry
    if _base_dtype(entry.dtype) is not _base_dtype(first.dtype):
        raise CheckpointError(f"{where} has dtype {entry.dtype}", f"{first.dtype} as expert 0")
    if entry.dtype is not torch.float8_e4m3fn:
        return
    if param.fp32 or len(shape) != 2:
        raise CheckpointError(f"{where} is FP8", "BF16 or F32 for this tensor")
    scale = reader.entries.get(name + SCALE_SUFFIX)
    if scale is None:
        raise CheckpointError(
            f"{where} is FP8 but {name}{SCALE_SUFFIX} is missing", "a scale for every FP8 weight"
        )
    if scale.shape != scale_shape(shape) or scale.dtype is not torch.float32:
        raise CheckpointError(
            f"{scale.name} in {scale.path} is {scale.dtype} {scale.shape}",
            f"F32 {scale_shape(shape)} (one per 128 x 128 block)",
        )


def _base_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype is torch.float8_e4m3fn else dtype


def from_memory(
    state: Mapping[str, torch.Tensor], params: Iterable[Param]
) -> dict[str, torch.Tensor]:
    """Canonical tensors from the state dict of a transformers model (views where possible).

    Fused parameters are cut apart: the convolution into q, k, v and each expert's gate_up into gate
    and up.
    """
    result: dict[str, torch.Tensor] = {}
    position: Counter[str] = Counter()
    for param in params:
        axis = 1 if param.row.expert else 0
        size = param.shape[axis]
        whole = state[param.memory_name]
        result[param.key] = whole.narrow(axis, position[param.memory_name], size)
        position[param.memory_name] += size
    return result
