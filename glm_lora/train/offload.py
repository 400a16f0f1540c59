"""Freeing and taking back the device memory of one trainer rank.

The base is frozen, so it is never copied back: one copy per machine (``host_copy``), made the first
time, is kept and the device storage is dropped. Only adapters and Adam moments, which change, are
copied to the host each time.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from glm_lora.lora.state import AdapterSet
from glm_lora.model.stage import Stage
from glm_lora.train.host_copy import HostCopy, host_copy, to_host
from glm_lora.train.optimizer import AdapterOptimizer


def peak_memory(device: torch.device) -> int:
    """Largest memory so far, in bytes: allocated on a GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


class DeviceMemory:
    """The tensors of one rank that can leave the device.

    Args:
        stage: Its parameters and buffers are the frozen base.
        adapters: Trainable tensors.
        optimizer: Owns the moments.
        folder: Keep the base in files there, mapped, instead of in host memory.
    """

    def __init__(
        self,
        stage: Stage,
        adapters: AdapterSet,
        optimizer: AdapterOptimizer,
        folder: Path | None = None,
    ) -> None:
        self._stage = stage
        self._adapters = adapters
        self._optimizer = optimizer
        self._folder = folder
        self._copy: HostCopy | None = None
        self._host_base: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._host_state: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._offloaded = False

    def state(self) -> dict[str, torch.Tensor]:
        """Adapters and moments by key, readable now: host copies while they are off the device."""
        if self._offloaded:
            return {key: host for key, (_, host) in self._host_state.items()}
        parameters = self._adapters.parameters()
        return {k: p.detach() for k, p in parameters.items()} | self._optimizer.moments()

    def offload(self) -> Mapping[str, float]:
        """Drop the device copies; every rank calls this.

        Returns:
            Seconds, bytes copied and freed by this rank, and the base's bytes on the host.
        """
        start = time.perf_counter()
        copied = freed = 0
        if not self._offloaded:
            copied += self._keep_base()
            self._host_state = {key: (t, to_host(t)) for key, t in self.state().items()}
            copied += sum(host.nbytes for _, host in self._host_state.values())
            self._stage.drop_fused()
            for storage, _ in self._host_base:
                freed += _emptied(storage)
            for tensor, _ in self._host_state.values():
                freed += _emptied(tensor.untyped_storage())
            self._offloaded = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {
            "time/offload": time.perf_counter() - start,
            "offload/bytes_to_host": float(copied),
            "offload/bytes_freed": float(freed),
            **(self._copy.metrics() if self._copy else {}),
        }

    def onload(self) -> Mapping[str, float]:
        """Bring everything back, bit-equal; metrics say seconds and bytes."""
        start = time.perf_counter()
        moved = 0
        if self._offloaded:
            for storage, host in self._host_base:
                _refilled(storage, host.nbytes)
                _bytes_of(storage).copy_(host, non_blocking=True)
                moved += host.nbytes
            for tensor, host in self._host_state.values():
                _refilled(tensor.untyped_storage(), host.nbytes)
                tensor.copy_(host, non_blocking=True)
                moved += host.nbytes
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._host_state = {}
            self._offloaded = False
        seconds = time.perf_counter() - start
        return {"time/onload": seconds, "offload/bytes_to_device": float(moved)}

    def host_copy_summary(self) -> str:
        """One line on the base's copy on the host; empty before the first ``offload``."""
        return self._copy.summary if self._copy else ""

    def close(self) -> None:
        """Unpin the host copy; the tensors are not used any more."""
        if self._copy is not None:
            self._copy.close()

    def _keep_base(self) -> int:
        """Make the copy of the base once; returns the bytes that this rank copied for it."""
        if self._copy is not None:
            return 0
        storages = self._stage.base_storages()
        self._copy = host_copy([_bytes_of(storage) for storage in storages], self._folder)
        self._host_base = list(zip(storages, self._copy.pieces, strict=True))
        return self._copy.written


def _emptied(storage: torch.UntypedStorage) -> int:
    """Free a storage; returns the bytes.

    On the CPU, a storage that numpy has looked at (a fingerprint does) can never be resized again;
    it stays, and there the host is the device anyway.
    """
    if not storage.resizable():
        return 0
    freed = storage.nbytes()
    storage.resize_(0)
    return freed


def _refilled(storage: torch.UntypedStorage, size: int) -> None:
    if storage.nbytes() != size:
        storage.resize_(size)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
