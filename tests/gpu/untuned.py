"""flash-linear-attention without tuning, for checks of numbers rather than of speed.

It times every configuration of a kernel for every new head count and data type, minutes in all.
Its own configuration files skip that: here each kernel gets the first configuration it would try.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("fla.ops.kda", "fla.ops.common", "fla.ops.utils", "fla.modules")


def skip_tuning(folder: Path) -> list[str]:
    """Write configuration files for KDA's kernels into ``folder`` and have them used.

    Call it before anything imports flash-linear-attention.

    Returns:
        Names of the kernels.
    """
    assert "fla" not in sys.modules, "flash-linear-attention has read its settings already"
    os.environ["FLA_CACHE_MODE"] = "default"
    os.environ["FLA_CONFIG_DIR"] = str(folder)
    importlib.import_module("fla.ops.kda")
    kernels = _tuned_kernels()
    folder.mkdir(parents=True, exist_ok=True)
    for name, kernel in kernels.items():
        first = kernel.configs[0]
        config = {
            "kwargs": first.kwargs,
            "num_warps": first.num_warps,
            "num_stages": first.num_stages,
            "num_ctas": first.num_ctas,
        }
        text = json.dumps({"kernel_name": name, "default_config": config})
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return sorted(kernels)


def _tuned_kernels() -> dict[str, Any]:
    """Every kernel with configurations in the modules that KDA has loaded, by name."""
    tuner = importlib.import_module("fla.ops.utils.cache").CachedAutotuner
    found = {}
    for module in [m for name, m in sys.modules.items() if name.startswith(_PACKAGES)]:
        for value in vars(module).values():
            while hasattr(value, "fn") and not isinstance(value, tuner):
                value = value.fn  # heuristics lie around it
            if isinstance(value, tuner):
                found[value.kernel_name] = value
    return found
