"""All checks of the machine, in the order in which they matter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from glm_lora.doctor import hardware, software
from glm_lora.doctor.finding import Finding
from glm_lora.doctor.self_test import self_tests
from glm_lora.doctor.sglang_env import sglang


def examine(
    folders: Mapping[str, Path], sglang_python: Path | None, *, self_test: bool
) -> Iterator[Finding]:
    """Examine this machine; each finding comes as soon as it is known.

    Args:
        folders: Where models, bases, data and runs go, by the option that says so.
        sglang_python: Interpreter of SGLang's environment; None looks at its usual place.
        self_test: Take a training step on the CPU and on each GPU.
    """
    yield software.python()
    yield from software.packages()
    torch_works = _imports("torch")
    if torch_works:
        yield software.architecture()
        yield from hardware.cuda()
    yield from sglang(sglang_python)
    yield hardware.memory()
    yield from hardware.disks(folders)
    yield hardware.ports()
    yield hardware.hub()
    if self_test and torch_works:
        yield from self_tests(devices())


def devices() -> list[str]:
    """The CPU, and each visible GPU."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError):
        return False
    return True
