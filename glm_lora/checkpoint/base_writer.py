"""Writing a base part by part: bounded memory, resumable, by any number of processes.

A base is written in parts, one data file each, that hold whole tensors (a tensor larger than
``PART_BYTES`` has a part of its own). A tensor is written in chunks of rows of at most
``CHUNK_BYTES``, hashed on the way, so memory does not depend on the size of anything. A part
counts as finished when its sidecar (sizes and hashes) is there; ``.metadata``, the manifest and the
tracker file come last. The files are what ``torch.distributed.checkpoint`` writes: one
``torch.save`` record per chunk, and a pickled ``Metadata``.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options

from glm_lora.arch.projections import Param
from glm_lora.checkpoint.files import write_atomic
from glm_lora.errors import MAKE_AGAIN, CheckpointError
from glm_lora.fingerprint import TensorRecord, tensor_bytes

_CRC_OPTION = threading.Lock()
"""The option is one for the whole process."""
CHUNK_BYTES = 16 * 2**20
PART_BYTES = 512 * 2**20
READ_AHEAD = 2
"""Chunks that are read and dequantised while another one is hashed and written."""


class BaseSource(Protocol):
    """Where the values of a base come from."""

    def dtype(self, param: Param) -> torch.dtype:
        """The dtype in which ``param`` is stored in the base."""
        ...

    def fill(self, param: Param, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (contiguous, of that dtype) with indices ``start``... of axis 0."""
        ...


@dataclass(frozen=True)
class Part:
    """The tensors of one data file."""

    index: int
    keys: tuple[str, ...]
    nbytes: int

    @property
    def file_name(self) -> str:
        """Name of the data file (torch_dist's pattern)."""
        return f"__{self.index}_0.distcp"

    @property
    def sidecar_name(self) -> str:
        """Name of the file that says the part is finished."""
        return f"__{self.index}_0.json"


def plan_parts(
    params: Mapping[str, Param], source: BaseSource, limit: int | None = None
) -> list[Part]:
    """Group the parameters, in order, into parts of at most ``limit`` bytes or one tensor."""
    limit = PART_BYTES if limit is None else limit
    groups: list[tuple[list[str], int]] = []
    for key, param in params.items():
        nbytes = param.numel * source.dtype(param).itemsize
        if groups and groups[-1][1] + nbytes <= limit:
            groups[-1] = ([*groups[-1][0], key], groups[-1][1] + nbytes)
        else:
            groups.append(([key], nbytes))
    return [Part(i, tuple(keys), nbytes) for i, (keys, nbytes) in enumerate(groups)]


def write_part(
    folder: Path,
    part: Part,
    params: Mapping[str, Param],
    source: BaseSource,
    wrote: Callable[[int], None],
) -> None:
    """Write one data file and then its sidecar; ``wrote`` is told the bytes of each chunk."""
    path = folder / part.file_name
    temporary = path.with_name(path.name + ".tmp")
    tensors: list[dict[str, Any]] = []
    with temporary.open("wb") as file, ThreadPoolExecutor(READ_AHEAD + 1) as pool:
        for key in part.keys:
            param = params[key]
            digest, chunks = hashlib.sha256(), []
            for start, value in _chunks(param, source, pool):
                hashing = pool.submit(digest.update, tensor_bytes(value))
                offset = file.tell()
                before, behind = record_frame(value.dtype, tuple(value.shape))
                file.write(before)
                file.write(tensor_bytes(value))
                file.write(behind)
                chunks.append([start, list(value.shape), offset, file.tell() - offset])
                hashing.result()
                wrote(value.nbytes)
            dtype = str(source.dtype(param)).removeprefix("torch.")
            tensors.append(
                {
                    "key": key,
                    "dtype": dtype,
                    "shape": list(param.shape),
                    "sha256": digest.hexdigest(),
                    "chunks": chunks,
                }
            )
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    temporary.replace(path)
    sidecar = {"file": path.name, "size": size, "tensors": tensors}
    write_atomic(folder / part.sidecar_name, json.dumps(sidecar))


@lru_cache(maxsize=1024)
def record_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and behind the data of such a tensor.

    The record is an uncompressed zip archive whose other members depend on dtype and shape alone
    (the CRC fields are left zero: the manifest has a sha256 of every tensor). Writing the data
    between the two is the same file without a copy of the data inside Python.
    """
    stream = io.BytesIO()
    with _CRC_OPTION:
        checked = get_crc32_options()
        set_crc32_options(False)
        try:
            torch.save(torch.empty(shape, dtype=dtype), stream)
        finally:
            set_crc32_options(checked)
    raw = stream.getvalue()
    with zipfile.ZipFile(stream) as archive:
        (data,) = (i for i in archive.infolist() if i.filename.endswith("/data/0"))
    # A local file header has 30 fixed bytes, then the name and the padding, whose lengths end it.
    lengths = struct.unpack("<HH", raw[data.header_offset + 26 : data.header_offset + 30])
    start = data.header_offset + 30 + sum(lengths)
    return raw[:start], raw[start + data.file_size :]


def _chunks(
    param: Param, source: BaseSource, pool: ThreadPoolExecutor
) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of one parameter in order, read ahead; a chunk is valid until the next one."""
    dtype, count = source.dtype(param), param.shape[0]
    row_bytes = param.numel // count * dtype.itemsize
    step = min(count, max(1, CHUNK_BYTES // row_bytes))
    # Fresh memory costs more than the work on it, so a few buffers go round.
    buffers: list[torch.Tensor] = []

    def read(number: int) -> torch.Tensor:
        start = number * step
        rows = min(count, start + step) - start
        if rows < step:
            value = torch.empty((rows, *param.shape[1:]), dtype=dtype)
        else:
            value = buffers[number % len(buffers)]
        source.fill(param, start, value)
        return value

    number_of_chunks = -(-count // step)
    for _ in range(min(READ_AHEAD + 1, number_of_chunks)):
        buffers.append(torch.empty((step, *param.shape[1:]), dtype=dtype))
    ahead = [pool.submit(read, i) for i in range(min(READ_AHEAD, number_of_chunks))]
    for number in range(number_of_chunks):
        value = ahead.pop(0).result()
        if number + READ_AHEAD < number_of_chunks:
            ahead.append(pool.submit(read, number + READ_AHEAD))
        yield number * step, value


def read_sidecar(folder: Path, part: Part) -> dict[str, Any] | None:
    """The sidecar of a part, or None when the part is not finished."""
    try:
        sidecar = json.loads((folder / part.sidecar_name).read_text(encoding="utf-8"))
        size = (folder / part.file_name).stat().st_size
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    keys = tuple(tensor["key"] for tensor in sidecar["tensors"])
    return sidecar if sidecar["size"] == size and keys == part.keys else None


def write_metadata(folder: Path, sidecars: Sequence[Mapping[str, Any]]) -> list[TensorRecord]:
    """Write ``common.pt``, ``metadata.json`` and ``.metadata``; returns the tensors' records."""
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    records: list[TensorRecord] = []
    for sidecar in sidecars:
        for tensor in sidecar["tensors"]:
            key, shape = tensor["key"], tuple(tensor["shape"])
            records.append(TensorRecord(key, tensor["dtype"], shape, tensor["sha256"]))
            chunks = []
            for start, size, offset, length in tensor["chunks"]:
                offsets = torch.Size((start, *[0] * (len(shape) - 1)))
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(size)))
                index = MetadataIndex(key, offsets)
                storage[index] = _StorageInfo(sidecar["file"], offset, length)
            properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
            state[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    torch.save({}, folder / "common.pt")
    config = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    write_atomic(folder / "metadata.json", json.dumps(config))
    write_atomic(folder / ".metadata", pickle.dumps(Metadata(state, {}, storage)))
    return records


def stored_chunks(release: Path, metadata: Metadata, key: str) -> Iterator[torch.Tensor]:
    """The chunks of one stored tensor in row-major order, one at a time; as ``read_chunk``."""
    stored = metadata.state_dict_metadata[key]
    assert isinstance(stored, TensorStorageMetadata)
    for chunk in sorted(stored.chunks, key=lambda c: tuple(c.offsets)):
        yield read_chunk(release, metadata, key, chunk.offsets)


def read_chunk(release: Path, metadata: Metadata, key: str, offsets: torch.Size) -> torch.Tensor:
    """One stored chunk of a tensor.

    Raises:
        CheckpointError: The data file is truncated or damaged.
    """
    info = metadata.storage_data[MetadataIndex(key, offsets)]
    path = release / info.relative_path
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            return torch.load(_Window(file, info.offset, info.length), weights_only=True)  # pyright: ignore
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} is damaged at {key}: {error}",
            "a complete data file",
            MAKE_AGAIN,
        ) from error


class _Window:
    """A read-only file that shows ``length`` bytes of another one, from ``start``."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length

    def read(self, size: int = -1) -> bytes:
        left = self._length - self.tell()
        return self._file.read(left if size < 0 else min(size, left))

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        return self._file.readinto(view[: max(0, self._length - self.tell())])

    def readline(self) -> bytes:
        return self._file.readline(self._length - self.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._length}[whence]
        self._file.seek(self._start + base + offset)
        return self.tell()

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seekable(self) -> bool:
        return True
