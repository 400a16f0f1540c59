"""Content fingerprints of a base or an adapter, independent of ranks, files and topology.

The fingerprint is the sha256 over the sorted records ``(key, dtype, shape, sha256 of the row-major
bytes)``. Two sets of tensors have the same fingerprint exactly when they hold the same values
under the same names, however they were sharded or stored. No torch import at module level.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class TensorRecord(NamedTuple):
    """What the fingerprint knows of one tensor."""

    key: str
    dtype: str
    """Short dtype name: ``float32``, ``bfloat16``, ..."""
    shape: tuple[int, ...]
    sha256: str
    """Hex digest of the tensor's row-major bytes."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The row-major bytes of a tensor of any dtype (copied to the host when it lives elsewhere)."""
    import torch

    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def record_of(key: str, tensor: torch.Tensor) -> TensorRecord:
    """The record of one full (unsharded) tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
    return TensorRecord(key, dtype, tuple(tensor.shape), digest)


def fingerprint(records: Iterable[TensorRecord]) -> str:
    """The fingerprint of a set of records, as 64 hex digits. The order does not matter."""
    total = hashlib.sha256()
    for record in sorted(records):
        shape = ",".join(map(str, record.shape))
        total.update(f"{record.key}\0{record.dtype}\0{shape}\0{record.sha256}\n".encode())
    return total.hexdigest()


def fingerprint_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """The fingerprint of full tensors held in memory, by name."""
    return fingerprint(record_of(key, tensor) for key, tensor in tensors.items())
