"""PEFT's adapter format: transformers' names, read by ``PeftModel.from_pretrained`` as it is.

``target_modules`` is one anchored regular expression that matches the selected modules and nothing
else: PEFT takes a list by suffix, where ``b_proj`` would also match ``f_b_proj`` or a vision block.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_lora.arch.projections import LAYERS_PREFIX
from glm_lora.export.adapter_folder import write_adapter
from glm_lora.lora.serving import adapter_config, padded_tensors
from glm_lora.protocols import AdapterState
from glm_lora.sync.verify import check_state
from glm_lora.targets.selection import Selection

if TYPE_CHECKING:
    import torch

KEY_PREFIX = "base_model.model."
"""PEFT's prefix of every tensor name."""


def target_pattern(selection: Selection) -> str:
    """A regular expression whose full matches are exactly the selection's modules in memory."""
    layers_of: dict[str, list[int]] = {}
    for adapter in selection.adapters:
        site = adapter.site
        path = site.name.removeprefix(f"{LAYERS_PREFIX}{site.layer}.")
        layers_of.setdefault(path, []).append(site.layer)
    paths_of: dict[tuple[int, ...], list[str]] = {}
    for path, layers in layers_of.items():
        paths_of.setdefault(tuple(layers), []).append(path)
    branches = [
        f"(?:{'|'.join(map(str, layers))})\\.(?:{'|'.join(re.escape(p) for p in paths)})"
        for layers, paths in paths_of.items()
    ]
    return re.escape(LAYERS_PREFIX) + f"(?:{'|'.join(branches)})"


def peft_config(selection: Selection, base_model: str) -> dict[str, Any]:
    """``adapter_config.json`` as PEFT reads it."""
    return {
        **adapter_config(selection, base_model, target_pattern(selection)),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def peft_tensors(state: AdapterState) -> dict[str, torch.Tensor]:
    """The tensors of ``state`` under PEFT's names, every rank padded to the largest."""
    padded = padded_tensors(state)
    renamed: dict[str, torch.Tensor] = {}
    for adapter in state.selection.adapters:
        prefix = KEY_PREFIX + adapter.site.name
        renamed[f"{prefix}.lora_A.weight"] = padded[adapter.a_key]
        renamed[f"{prefix}.lora_B.weight"] = padded[adapter.b_key]
    return renamed


def export_peft(
    state: AdapterState,
    output: Path,
    base_model: str,
    files: dict[str, str] | None = None,
    *,
    over: bool = False,
) -> Path:
    """Write ``state`` as a PEFT adapter folder (see ``write_adapter``) for ``base_model``.

    Raises:
        SyncError: ``state`` does not hold what its selection says.
        ConfigError, ExportError: See ``write_adapter``.
    """
    check_state(state)
    config = peft_config(state.selection, base_model)
    return write_adapter(state, output, config, peft_tensors(state), files, over=over)
