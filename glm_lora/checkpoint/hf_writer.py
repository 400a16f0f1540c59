"""Writing a Hugging Face checkpoint folder: safetensors shards under disk names and their index."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from glm_lora.arch.checkpoint_index import INDEX_FILE, SINGLE_FILE
from glm_lora.checkpoint.files import write_atomic
from glm_lora.checkpoint.safetensors_file import DTYPES
from glm_lora.fingerprint import tensor_bytes

SHARD_BYTES = 4 * 10**9
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written; its values are asked for when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def planned(tensors: Mapping[str, torch.Tensor]) -> list[PlannedTensor]:
    """Plans for tensors that are in memory."""
    return [PlannedTensor(n, t.dtype, tuple(t.shape), lambda t=t: t) for n, t in tensors.items()]


def plan_shards(
    tensors: Iterable[PlannedTensor], shard_bytes: int = SHARD_BYTES
) -> dict[str, list[PlannedTensor]]:
    """Which tensors go into which file: one ``model.safetensors``, or numbered shards."""
    groups: list[list[PlannedTensor]] = []
    filled = 0
    for tensor in tensors:
        if not groups or filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups)
    }


def write_tensors(
    folder: Path,
    tensors: Iterable[PlannedTensor],
    shard_bytes: int = SHARD_BYTES,
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> list[Path]:
    """Write tensors in order into shards of about ``shard_bytes``, one in memory at a time.

    Returns:
        The shards; with more than one there is an index file too.
    """
    shards = plan_shards(tensors, shard_bytes)
    for name, group in shards.items():
        write_shard(folder / name, group, wrote)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for g in shards.values() for t in g)},
            "weight_map": {t.name: name for name, group in shards.items() for t in group},
        }
        write_atomic(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    return [folder / name for name in shards]


def write_shard(
    path: Path,
    tensors: Sequence[PlannedTensor],
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write one safetensors file, durable when this returns."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = tensor.read()
            assert value.dtype is tensor.dtype and tuple(value.shape) == tensor.shape, tensor.name
            file.write(tensor_bytes(value))
            wrote(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())
