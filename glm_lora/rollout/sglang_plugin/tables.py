"""Widen SGLang's tables of LoRA names: command-line choices, known targets, replicated linears."""

from __future__ import annotations

import sys
import typing
from typing import Any

from glm_lora.rollout.sglang_plugin.widths import MODULES, REPLICATED, TARGETS


def widen() -> None:
    """Add what is missing; a second call changes nothing.

    Raises:
        PluginError: SGLang has no such table, or it has another type.
    """
    import sglang.srt.lora.utils as lora_utils  # pyright: ignore[reportMissingImports]
    import sglang.srt.utils.common as common  # pyright: ignore[reportMissingImports]

    choices = table(common, "SUPPORTED_LORA_TARGET_MODULES", list)
    replicated = table(lora_utils, "REPLICATED_LINEAR_LORA_NAMES", list)
    known = table(lora_utils, "_KNOWN_LORA_TARGET_MODULES", frozenset)
    # Other modules imported these two lists by name, so they must stay the same objects.
    choices.extend(name for name in TARGETS if name not in choices)
    replicated.extend(name for name in REPLICATED if name not in replicated)
    lora_utils._KNOWN_LORA_TARGET_MODULES = known | set(MODULES)
    # The command line's choices were copied when the arguments' module was imported.
    for name in ("sglang.srt.server_args", "sglang.srt.arg_groups.fields.lora"):
        if name in sys.modules:
            _widen_choices(sys.modules[name])


def _widen_choices(module: Any) -> None:
    from glm_lora.rollout.sglang_plugin import PluginError

    owner = getattr(module, "ServerArgs", None) or getattr(module, "Lora", None)
    hint = typing.get_type_hints(owner, include_extras=True).get("lora_target_modules")
    found = [m for m in getattr(hint, "__metadata__", ()) if isinstance(_choices(m), list)]
    if not found:
        raise PluginError(f"{module.__name__} has no choices for lora_target_modules")
    for argument in found:
        argument.choices.extend(n for n in TARGETS if n not in argument.choices)


def _choices(argument: Any) -> Any:
    return getattr(argument, "choices", None)


def table(module: Any, name: str, kind: type) -> Any:
    """Attribute ``name`` of ``module``; PluginError unless it is a ``kind``."""
    from glm_lora.rollout.sglang_plugin import PluginError

    value = getattr(module, name, None)
    if not isinstance(value, kind):
        raise PluginError(
            f"{module.__name__}.{name} is {type(value).__name__}; expected {kind.__name__}"
        )
    return value
