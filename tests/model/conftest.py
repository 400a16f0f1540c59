"""Fixtures of the tests that run Triton kernels in the interpreter."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.model.interpreter import GuardedMemory


@pytest.fixture
def guarded_memory(monkeypatch: pytest.MonkeyPatch):
    """Kernels touch only elements of their arguments, and new tensors hold NaN until written."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    memory = GuardedMemory(interpreter._interpreter)
    host = interpreter.GridExecutor._init_args_hst

    def arguments(self: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        args_host, kwargs_host = host(self, args, kwargs)
        memory.allow([*args_host, *kwargs_host.values()])
        return args_host, kwargs_host

    monkeypatch.setattr(interpreter, "_interpreter", memory)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", arguments)
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    yield memory
    torch.set_deterministic_debug_mode(before)
