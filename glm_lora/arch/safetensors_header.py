"""The header of a safetensors file, checked against the file's size (no torch, no weight is read).

Format (safetensors specification): 8 bytes with the header's length (little endian), the header as
JSON (name -> dtype, shape, begin and end of the data), then the data in row-major order, without
gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from glm_lora.errors import CheckpointError

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per value of safetensors' dtypes."""
MAX_HEADER = 100_000_000
"""Bytes of the largest header that safetensors allows."""
_DAMAGED = "Download this file again"


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor, as the header tells it."""

    name: str
    dtype: str
    """safetensors' name: ``BF16``, ``F32``, ``F8_E4M3``, ..."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A header that agrees with the size of its file."""

    entries: dict[str, HeaderEntry]
    size: int
    """Bytes of the whole file."""
    data_start: int
    sha256: str
    """Of the header's bytes."""


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a file that is not what its header says."""
    return CheckpointError(f"{path} is damaged: {why}", "a complete safetensors file", _DAMAGED)


def read_header(path: Path) -> Header:
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
                raise damaged(path, f"{size:,} bytes cannot hold a header of {length:,} bytes")
            raw = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "a safetensors file") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "a safetensors file") from error
    start = 8 + length
    entries = {name: _entry(path, name, item, start) for name, item in _parse(path, raw).items()}
    _check_layout(path, entries, start, size)
    return Header(entries, size, start, hashlib.sha256(raw).hexdigest())


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(n for n in names if names.count(n) > 1)
            raise damaged(path, f"{twice!r} is in the header twice")
        return table

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise damaged(path, "its header is not a JSON object")
    table = cast("dict[str, Any]", header)
    table.pop("__metadata__", None)
    return table


def _entry(path: Path, name: str, item: Any, data_start: int) -> HeaderEntry:
    try:
        dtype, shape = item["dtype"], tuple(item["shape"])
        begin, end = item["data_offsets"]
        whole = [n for n in (*shape, begin, end) if isinstance(n, int) and n >= 0]
        width = DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise damaged(path, f"the header entry of {name!r} is {item!r}") from None
    if len(whole) != len(shape) + 2:
        raise damaged(path, f"the header entry of {name!r} is {item!r}")
    if end - begin != math.prod(shape) * width:
        raise damaged(path, f"{name!r} {shape} {dtype} has {end - begin} bytes")
    return HeaderEntry(name, dtype, shape, data_start + begin, end - begin)


def _check_layout(path: Path, entries: dict[str, HeaderEntry], start: int, size: int) -> None:
    position = start
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != position:
            raise damaged(path, f"{entry.name!r} does not follow on the tensor before it")
        position += entry.nbytes
    if position != size:
        what = "truncated" if size < position else "longer than its header says"
        raise damaged(path, f"it is {what} ({size:,} bytes, {position:,} expected)")
