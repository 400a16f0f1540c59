"""One safetensors file: its header, checked, and rows of its tensors, read without the rest.

Format (safetensors specification): 8 bytes with the header's length (little endian), the header as
JSON (name -> dtype, shape, begin and end of the data), then the data in row-major order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm_lora.arch.checkpoint_index import MAX_HEADER
from glm_lora.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SAMPLE = 2**20
_DAMAGED = "Download this file again"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of axis 0 (of everything for a scalar)."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header was read and agrees with its size."""

    path: Path
    entries: dict[str, TensorEntry]
    size: int
    data_start: int
    header_sha256: str

    def identity(self) -> str:
        """A digest that tells this file from another: header, size, first and last MiB of data."""
        digest = hashlib.sha256(f"{self.size}:{self.header_sha256}".encode())
        with self.path.open("rb") as file:
            for start in (self.data_start, max(self.data_start, self.size - _SAMPLE)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
        return digest.hexdigest()


def open_file(path: Path) -> SafetensorsFile:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: Missing, truncated, too long, or with a header that is damaged: not JSON, a
            name twice, an unknown dtype, or sizes that do not agree with shapes.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw_length = file.read(8)
            length = int.from_bytes(raw_length, "little")
            if len(raw_length) < 8 or size < 8 + length or length > MAX_HEADER:
                raise _damaged(path, f"{size:,} bytes cannot hold a header of {length:,} bytes")
            raw = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "a safetensors file") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    header = _parse(path, raw)
    entries = {name: _entry(path, name, item, 8 + length) for name, item in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return SafetensorsFile(path, entries, size, 8 + length, hashlib.sha256(raw).hexdigest())


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}", "a complete safetensors file", _DAMAGED)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(n for n in names if names.count(n) > 1)
            raise _damaged(path, f"{twice!r} is in the header twice")
        return table

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, item: Any, data_start: int) -> TensorEntry:
    try:
        dtype_name, shape = item["dtype"], tuple(item["shape"])
        begin, end = item["data_offsets"]
        whole = [n for n in (*shape, begin, end) if isinstance(n, int) and n >= 0]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"the header entry of {name!r} is {item!r}") from None
    if len(whole) != len(shape) + 2 or dtype_name not in DTYPES:
        raise _damaged(path, f"the header entry of {name!r} is {item!r}")
    dtype = DTYPES[dtype_name]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _damaged(path, f"{name!r} {shape} {dtype_name} has {end - begin} bytes")
    return TensorEntry(name, path, dtype, shape, data_start + begin, end - begin)


def _check_layout(path: Path, entries: dict[str, TensorEntry], start: int, size: int) -> None:
    position = start
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != position:
            raise _damaged(path, f"{entry.name!r} does not follow on the tensor before it")
        position += entry.nbytes
    if position != size:
        what = "truncated" if size < position else "longer than its header says"
        raise _damaged(path, f"it is {what} ({size:,} bytes, {position:,} expected)")


def read_rows(entry: TensorEntry, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Rows ``start`` to ``stop`` of axis 0 of a tensor (all of a scalar), as it is on disk.

    Raises:
        CheckpointError: The file ended early or cannot be read.
    """
    shape = entry.shape
    if shape:
        shape = ((entry.shape[0] if stop is None else stop) - start, *shape[1:])
    out = torch.empty(shape, dtype=entry.dtype)
    read_into(entry, start, out)
    return out


def read_into(entry: TensorEntry, start: int, out: torch.Tensor) -> None:
    """Fill the contiguous ``out`` with the rows from ``start`` on; as ``read_rows``."""
    flat = out.reshape(-1).view(torch.uint8)
    view = memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]
    done = 0
    try:
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset + start * entry.row_bytes)
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise _damaged(entry.path, f"it ends inside {entry.name!r}")
                done += count
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{entry.path} cannot be read: {error}") from error
