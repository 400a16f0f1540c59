"""A Hugging Face checkpoint folder: its index, its shards, and its tensors under disk names.

Only headers are read when it is opened. Quantised weights (FP8 e4m3 in 128 x 128 blocks with fp32
scales, ``X.weight`` beside ``X.weight_scale_inv``) come out dequantised: value times scale in fp32,
then rounded to bfloat16.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from glm_lora.arch.checkpoint_index import (
    BLOCK,
    INDEX_FILE,
    SCALE_SUFFIX,
    SINGLE_FILE,
    CheckpointIndex,
    read_index,
)
from glm_lora.checkpoint.safetensors_file import (
    SafetensorsFile,
    TensorEntry,
    open_file,
    read_into,
    read_rows,
)
from glm_lora.errors import CheckpointError


@dataclass(frozen=True)
class HfReader:
    """The tensors of a checkpoint folder."""

    folder: Path
    files: dict[str, SafetensorsFile]
    """The shards that were opened, by name."""
    entries: dict[str, TensorEntry]
    """Every tensor of those shards, by disk name."""
    index: CheckpointIndex
    """Which shard holds which tensor; made up where a single file has no index."""

    @classmethod
    def open(cls, folder: Path, wanted: frozenset[str] | None = None) -> HfReader:
        """Open the shards of ``folder`` that hold tensors of ``wanted`` (None: all of them).

        Raises:
            CheckpointError: No safetensors there, a shard missing or damaged, an index that
                disagrees with the files, or a tensor that two shards hold.
        """
        index = read_index(folder)
        if index is None:
            raise CheckpointError(
                f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}",
                "a Hugging Face checkpoint with safetensors",
            )
        shards = index.shards if wanted is None else index.shards_of(wanted)
        missing = [s for s in shards if not (folder / s).exists()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(shards)} shards ({', '.join(missing[:3])})",
                "every shard that its index names",
                "Download the missing files",
            )
        files = {shard: open_file(folder / shard) for shard in shards}
        entries: dict[str, TensorEntry] = {}
        for shard, file in files.items():
            for name, entry in file.entries.items():
                if name in entries:
                    first = entries[name].path.name
                    raise CheckpointError(f"{name} is both in {first} and in {shard}")
                entries[name] = entry
        _check_index(folder, index, files)
        entries = {n: e for n, e in entries.items() if n in index.weight_map}
        return cls(folder, files, entries, index)

    def identity(self) -> str:
        """A digest that tells this checkpoint from another one (header, size and samples)."""
        digest = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            digest.update(f"{name}\0{file.identity()}\n".encode())
        return digest.hexdigest()

    def is_quantised(self, name: str) -> bool:
        """Whether the tensor is stored as FP8 blocks."""
        return self.entries[name].dtype is torch.float8_e4m3fn

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor, dequantised to bfloat16 when it is stored as FP8."""
        entry = self.entries[name]
        stop = entry.shape[0] if stop is None and entry.shape else stop
        shape = (stop - start, *entry.shape[1:]) if stop is not None else ()
        dtype = torch.bfloat16 if self.is_quantised(name) else entry.dtype
        out = torch.empty(shape, dtype=dtype)
        self.rows_into(name, start, out)
        return out

    def rows_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill the contiguous ``out`` with the rows from ``start`` on; as ``rows``."""
        entry = self.entries[name]
        if not self.is_quantised(name):
            read_into(entry, start, out)
            return
        stop = start + out.shape[0]
        first = start // BLOCK
        scale = read_rows(self.entries[name + SCALE_SUFFIX], first, -(-stop // BLOCK))
        weight = torch.empty(min(BLOCK, out.shape[0]), out.shape[1], dtype=torch.float8_e4m3fn)
        position = start
        # A block of rows at a time stays in the processor's cache.
        for block, scale_C in enumerate(scale, first):
            end = min(stop, (block + 1) * BLOCK)
            read_into(entry, position, weight[: end - position])
            dequantise_block(weight[: end - position], scale_C, out[position - start : end - start])
            position = end


def _check_index(folder: Path, index: CheckpointIndex, files: dict[str, SafetensorsFile]) -> None:
    weight_map = index.weight_map
    for name, shard in weight_map.items():
        if shard in files and name not in files[shard].entries:
            raise CheckpointError(
                f"the index of {folder} puts {name} into {shard}, which does not hold it",
                "an index that agrees with the shards",
            )
    for shard, file in files.items():
        for name in file.entries:
            if weight_map.get(name) != shard and not (index.is_cut and name not in weight_map):
                raise CheckpointError(
                    f"{shard} in {folder} holds {name}, which the index puts into "
                    f"{weight_map.get(name, 'no shard')}",
                    "an index that agrees with the shards",
                )


def dequantise_block(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantise the rows of one block row: value times scale in fp32, then rounded to ``out``.

    Args:
        weight: ``[R, C]`` float8_e4m3fn, at most 128 rows that share their scales.
        scale: ``[ceil(C / 128)]`` fp32.
        out: ``[R, C]`` of the wanted dtype.
    """
    raw = weight.view(torch.uint8)
    scale_C = scale.repeat_interleave(BLOCK)[: weight.shape[1]]
    if int(raw.bitwise_and(0x7F).max()) == 0x7F:  # NaN, which the shortcut below would not keep
        out.copy_(weight.float().mul_(scale_C))
        return
    # e4m3 is half precision without its lowest bits and with another exponent bias (7, not 15):
    # moved into place, every value is 2**8 too small, which the scale makes good exactly. This is
    # vectorised, which the direct conversion is not.
    half = raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out.copy_(half.view(torch.float16).float().mul_(scale_C * 256))
