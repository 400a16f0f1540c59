"""Requests that load an adapter into SGLang: plain bytes, checksums, one copy per rank."""

from __future__ import annotations

import binascii
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_lora.fingerprint import record_of
from glm_lora.lora.serving import CONFIG_FILE, WEIGHTS_FILE, total_bytes

if TYPE_CHECKING:
    import torch


TENSORS_ROUTE = "/load_lora_adapter_from_tensors"
FOLDER_ROUTE = "/load_lora_adapter"
STREAM_ROUTE = "/update_weights_from_tensor"


@dataclass(frozen=True)
class LoadRequest:
    """A prepared request that loads one adapter; sent to any number of servers as it is."""

    path: str
    """Route."""
    name: str
    """Adapter name the server will know it by."""
    chunks: tuple[bytes, ...]
    """Body, in pieces (repeated pieces are the same object)."""
    num_tensors: int
    tensor_bytes: int
    """Bytes of the adapter's tensors, once."""

    @property
    def num_bytes(self) -> int:
        """Length of the body."""
        return sum(map(len, self.chunks))


def request_with_bytes(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    copies: int = 1,
    checksums: bool = False,
) -> LoadRequest:
    """The tensors in the body: base64 of a pickle, one copy per tensor-parallel rank.

    The copies are one piece of memory here, but travel separately: SGLang hands each rank its own.

    Args:
        name: Adapter name.
        tensors: Padded tensors by serving key, on the CPU.
        config: ``serving_config`` and anything the plugin checks.
        copies: The server's tensor-parallel size.
        checksums: Send sha256 of every tensor. Stock SGLang compares them on every rank and ends
            the server when one differs, which is still better than serving something else.
    """
    fields: dict[str, Any] = {"lora_name": name, "config_dict": dict(config)}
    if checksums:
        fields["expected_checksums"] = tensor_checksums(tensors)
    chunks = _with_copies(fields, dict(tensors), copies)
    return LoadRequest(TENSORS_ROUTE, name, chunks, len(tensors), total_bytes(tensors))


def stream_request(
    name: str, tensors: Mapping[str, torch.Tensor], *, copies: int = 1
) -> LoadRequest:
    """The tensors for a weight-update session: pairs of ``name:key`` and tensor, one copy per rank.

    Args:
        name: Registered adapter name; must not contain a colon.
        tensors: Padded tensors by serving key, on the CPU.
        copies: The server's tensor-parallel size.
    """
    pairs = [(f"{name}:{key}", tensor) for key, tensor in tensors.items()]
    # A new adapter has a name of its own: nothing cached is out of date.
    chunks = _with_copies({"flush_cache": False}, pairs, copies)
    return LoadRequest(STREAM_ROUTE, name, chunks, len(tensors), total_bytes(tensors))


def tensor_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The sha256 of every tensor's bytes, by serving key."""
    return {key: record_of(key, tensor).sha256 for key, tensor in tensors.items()}


def _with_copies(fields: Mapping[str, Any], value: object, copies: int) -> tuple[bytes, ...]:
    encoded = _Base64Writer()
    pickle.Pickler(encoded, protocol=5).dump(value)
    pieces = encoded.finish()
    body = [json.dumps(fields).encode()[:-1] + b',"serialized_named_tensors":["', *pieces]
    for _ in range(copies - 1):
        body += [b'","', *pieces]
    return (*body, b'"]}')


class _Base64Writer:
    """A file that keeps what is written as base64, in pieces that fit the processor's cache."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._rest = b""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Encode ``data``; up to two bytes wait for the next call, so that nothing is padded."""
        view = memoryview(data).cast("B")
        if self._rest:
            take = -len(self._rest) % 3
            self._rest += bytes(view[:take])
            if len(self._rest) % 3:
                return len(data)
            self._encode(self._rest)
            view = view[take:]
        whole = len(view) - len(view) % 3
        self._encode(view[:whole])
        self._rest = bytes(view[whole:])
        return len(data)

    def _encode(self, data: bytes | memoryview) -> None:
        if data:
            self._pieces.append(binascii.b2a_base64(data, newline=False))

    def finish(self) -> list[bytes]:
        """Everything written, as base64 in pieces."""
        self._encode(self._rest)
        self._rest = b""
        return self._pieces


def request_with_folder(
    name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path
) -> LoadRequest:
    """The tensors in a folder that all ranks of a server on this machine read: no copies.

    Args:
        name: Adapter name.
        tensors: Padded tensors by serving key.
        config: ``serving_config`` and anything the plugin checks.
        folder: New folder, best in shared memory (``/dev/shm``). SGLang remembers paths, so every
            version needs its own; remove it after the load.
    """
    from glm_lora.checkpoint.safetensors_file import write_file

    folder.mkdir(parents=True)
    write_file(folder / WEIGHTS_FILE, tensors, {"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(dict(config)), encoding="utf-8")
    body = json.dumps({"lora_name": name, "lora_path": str(folder)}).encode()
    return LoadRequest(FOLDER_ROUTE, name, (body,), len(tensors), total_bytes(tensors))
