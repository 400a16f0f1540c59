"""glm-lora: LoRA adapters for GLM-5.3-Flash, trained with reinforcement learning.

The names below are what a notebook or a script needs; they are loaded when they are first used, so
``import glm_lora`` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm_lora.api import (
        evaluate,
        export,
        load_adapter,
        prepare,
        resolve_targets,
        train,
        write_report,
    )
    from glm_lora.errors import GlmLoraError
    from glm_lora.protocols import AdapterState
    from glm_lora.targets.selection import Selection

__version__ = "0.1.0"

__all__ = [
    "AdapterState",
    "GlmLoraError",
    "Selection",
    "evaluate",
    "export",
    "load_adapter",
    "prepare",
    "resolve_targets",
    "train",
    "write_report",
]

_ELSEWHERE = {
    "AdapterState": "glm_lora.protocols",
    "GlmLoraError": "glm_lora.errors",
    "Selection": "glm_lora.targets.selection",
}


class _Package(types.ModuleType):
    """``train`` and ``export`` are functions here and also packages.

    Importing ``glm_lora.train.worker`` would put the package in the function's place; whoever wants
    the package imports from it, which does not look here.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'glm_lora' has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, "glm_lora.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
