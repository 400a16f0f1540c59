"""Fixtures of the tests that run Triton kernels in the interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.model.interpreter import GuardedMemory


@pytest.fixture
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels touch only elements of their arguments."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    memory = GuardedMemory(interpreter._interpreter)
    host = interpreter.GridExecutor._init_args_hst

    def arguments(self: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        args_host, kwargs_host = host(self, args, kwargs)
        memory.allow([*args_host, *kwargs_host.values()])
        return args_host, kwargs_host

    monkeypatch.setattr(interpreter, "_interpreter", memory)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", arguments)


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """What ``torch.empty`` gives holds NaN until it is written."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture
def last_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every grid only the last program runs, with the largest offsets; none may overflow."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    call, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder
    set_sizes, set_place = builder.set_grid_dim, builder.set_grid_idx

    def run_last(self: Any, *args: Any, **kwargs: Any) -> None:
        sizes = (*self.grid, 1, 1)[:3]
        place = [n - 1 for n in sizes]
        self.grid = (1, 1, 1)
        monkeypatch.setattr(builder, "set_grid_dim", lambda *_: set_sizes(*sizes))
        monkeypatch.setattr(builder, "set_grid_idx", lambda *_: set_place(*place))
        call(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_last)
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))
