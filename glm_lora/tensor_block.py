"""Many tensors as one block of bytes: how an adapter travels between processes.

A pickled tensor brings its whole storage and half a millisecond of bookkeeping; the full model's
adapter has 970 of them. No torch import at module level.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from glm_lora.fingerprint import tensor_bytes

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

Table: TypeAlias = "tuple[tuple[str, str, tuple[int, ...]], ...]"
"""Key, dtype (``float32``, ``bfloat16``, ...) and shape of each tensor, in the block's order."""

_ALIGN = 16
"""Every tensor begins at a multiple of this many bytes, whatever lies before it."""


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[Table, memoryview]:
    """The tensors' row-major bytes behind each other, copied once.

    Args:
        tensors: On any device.
    """
    parts = {key: tensor_bytes(tensor) for key, tensor in tensors.items()}
    starts = _starts([part.nbytes for part in parts.values()])
    block = np.zeros(starts[-1], np.uint8)
    for start, part in zip(starts, parts.values(), strict=False):
        block[start : start + part.nbytes] = part
    table = tuple(
        (key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for key, tensor in tensors.items()
    )
    return table, block.data


def unpack(table: Table, block: Buffer) -> dict[str, torch.Tensor]:
    """The tensors of ``pack``, each in memory of its own."""
    import torch

    with warnings.catch_warnings():
        # Shared memory is read-only, which torch does not know; it is only copied from.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(block, dtype=torch.uint8) if table else torch.empty(0)
    dtypes = [getattr(torch, name) for _, name, _ in table]
    sizes = [
        int(np.prod(shape)) * dtype.itemsize
        for (_, _, shape), dtype in zip(table, dtypes, strict=True)
    ]
    return {
        key: flat[start : start + size].clone().view(dtype).view(shape)
        for (key, _, shape), dtype, start, size in zip(
            table, dtypes, _starts(sizes), sizes, strict=False
        )
    }


def _starts(sizes: list[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    return [0, *itertools.accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]
