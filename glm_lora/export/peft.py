"""PEFT's adapter format: transformers' names, read by ``PeftModel.from_pretrained`` as it is.

``target_modules`` is one anchored regular expression that matches the selected modules and nothing
else: PEFT takes a list by suffix, where ``b_proj`` would also match ``f_b_proj`` or a vision block.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_lora.arch.projections import LAYERS_PREFIX
from glm_lora.export.folder import new_folder
from glm_lora.lora.serving import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_config,
    padded_tensors,
    total_bytes,
)
from glm_lora.protocols import AdapterState
from glm_lora.sync.verify import check_state
from glm_lora.targets.selection import Selection

if TYPE_CHECKING:
    import torch

SELECTION_FILE = "selection.json"
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


def write_adapter(
    state: AdapterState,
    output: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    files: dict[str, str] | None = None,
) -> Path:
    """Write one adapter folder (configuration, weights, ``selection.json``, further text files).

    Raises:
        ConfigError: ``output`` is not a new or empty writable folder with enough space.
        ExportError: Writing failed; nothing is left behind.
    """
    from safetensors.torch import save_file

    texts = {
        CONFIG_FILE: json.dumps(config, indent=2) + "\n",
        SELECTION_FILE: state.selection.to_json(),
        **(files or {}),
    }
    with new_folder(output, total_bytes(tensors) + sum(map(len, texts.values()))) as folder:
        metadata = {"format": "pt", "digest": state.digest, "version": str(state.version)}
        contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(contiguous, folder / WEIGHTS_FILE, metadata=metadata)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return output


def export_peft(
    state: AdapterState, output: Path, base_model: str, files: dict[str, str] | None = None
) -> Path:
    """Write ``state`` as a PEFT adapter folder.

    Args:
        state: The whole adapter, fp32 or bf16.
        output: New or empty folder.
        base_model: Name or folder of the base, recorded in the configuration.
        files: Further text files by name (a model card).

    Raises:
        SyncError: ``state`` does not hold what its selection says.
        ConfigError, ExportError: See ``write_adapter``.
    """
    check_state(state)
    config = peft_config(state.selection, base_model)
    return write_adapter(state, output, config, peft_tensors(state), files)
