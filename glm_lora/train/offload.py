"""Freeing and taking back the device memory of one trainer rank.

The base is frozen, so it is never copied back: one host copy, made the first time, is kept and the
device storage is dropped. Only adapters and Adam moments, which change, are copied to the host.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping

import torch

from glm_lora.lora.state import AdapterSet
from glm_lora.model.stage import Stage
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
    """

    def __init__(self, stage: Stage, adapters: AdapterSet, optimizer: AdapterOptimizer) -> None:
        self._stage = stage
        self._adapters = adapters
        self._optimizer = optimizer
        self._host_base: dict[str, torch.Tensor] = {}
        self._host_state: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _base(self) -> dict[str, torch.Tensor]:
        trainable = {id(p) for p in self._adapters.parameters().values()}
        named = [*self._stage.named_parameters(), *self._stage.named_buffers()]
        return {k: t.data for k, t in named if id(t) not in trainable}

    def _changing(self) -> list[torch.Tensor]:
        parameters = [p.data for p in self._adapters.parameters().values()]
        return [*parameters, *self._optimizer.moments().values()]

    def offload(self) -> Mapping[str, float]:
        """Drop the device copies; metrics say seconds and bytes copied to the host."""
        start = time.perf_counter()
        copied = freed = 0
        for key, tensor in self._base().items():
            if key not in self._host_base:
                self._host_base[key] = _to_host(tensor)
                copied += tensor.nbytes
            freed += tensor.nbytes
            tensor.untyped_storage().resize_(0)
        for tensor in self._changing():
            self._host_state.append((tensor, _to_host(tensor)))
            copied += tensor.nbytes
            freed += tensor.nbytes
            tensor.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - start
        return {
            "time/offload": seconds,
            "offload/bytes_to_host": float(copied),
            "offload/bytes_freed": float(freed),
        }

    def onload(self) -> Mapping[str, float]:
        """Bring everything back, bit-equal; metrics say seconds and bytes."""
        start = time.perf_counter()
        moved = 0
        pairs = [(tensor, self._host_base[key]) for key, tensor in self._base().items()]
        for tensor, host in [*pairs, *self._host_state]:
            tensor.untyped_storage().resize_(host.nbytes)
            tensor.copy_(host, non_blocking=True)
            moved += host.nbytes
        self._host_state.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return {"time/onload": seconds, "offload/bytes_to_device": float(moved)}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return host.copy_(tensor)
