"""One safetensors file: its identity, and rows of its tensors, read without the rest."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from glm_lora.arch.safetensors_header import damaged, read_header
from glm_lora.checkpoint.files import umask
from glm_lora.errors import CheckpointError, first_line

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
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


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
    """Open a safetensors file by its header; CheckpointError as ``read_header``."""
    header = read_header(path)
    entries = {
        e.name: TensorEntry(e.name, path, DTYPES[e.dtype], e.shape, e.offset, e.nbytes)
        for e in header.entries.values()
    }
    return SafetensorsFile(path, entries, header.size, header.data_start, header.sha256)


def write_file(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a new safetensors file that others may read as far as the umask lets them.

    The safetensors library makes it for its owner only; a server may run as another user.

    Raises:
        OSError: It cannot be written.
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata=dict(metadata))
    except SafetensorError as error:  # what the operating system said is in its text only
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise OSError(errno.EIO, first_line(error), str(path)) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(0o666 & ~umask())


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
                    raise damaged(entry.path, f"it ends inside {entry.name!r}")
                done += count
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{entry.path} cannot be read: {error}") from error
