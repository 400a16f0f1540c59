"""Triton's interpreter for tests: when there is one, and what its kernels may touch."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest
import torch


def needs_interpreter() -> None:
    """Skip a test module unless ``make test-kernels`` runs it; there Triton has to be usable.

    Triton decides at its import whether kernels are interpreted, so one process has either those
    or the compiled ones.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1: make test-kernels", allow_module_level=True)
    knobs = importlib.import_module("triton.knobs")
    assert knobs.runtime.interpret


class GuardedMemory:
    """The interpreter's access to memory, with every address checked.

    Without it a read beyond a tensor finds whatever lies there, mostly without consequence.

    Args:
        access: What the interpreter loads and stores with.
    """

    def __init__(self, access: Any) -> None:
        self._access = access
        self._spans: list[tuple[int, int]] = []

    def allow(self, tensors: list[Any]) -> None:
        """From now on only the elements of ``tensors`` (others in the list are ignored)."""
        found = [x for x in tensors if isinstance(x, torch.Tensor)]
        assert all(x.is_contiguous() for x in found), "a kernel was given a tensor with gaps"
        sizes = [x.numel() * x.element_size() for x in found]
        self._spans = [(x.data_ptr(), x.data_ptr() + n) for x, n in zip(found, sizes, strict=True)]

    def load(self, places: np.ndarray, mask: np.ndarray, other: np.ndarray, kind: Any) -> Any:
        """Load after the check."""
        self._check(places, mask, "read")
        return self._access.load(places, mask, other, kind)

    def store(self, places: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        """Store after the check."""
        self._check(places, mask, "write")
        return self._access.store(places, value, mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._access, name)

    def _check(self, places: np.ndarray, mask: np.ndarray, what: str) -> None:
        used = np.broadcast_to(places, mask.shape)[mask.astype(bool)]
        inside = np.zeros(used.shape, dtype=bool)
        for start, end in self._spans:
            inside |= (used >= start) & (used < end)
        assert inside.all(), f"{what} outside of the kernel's tensors"
