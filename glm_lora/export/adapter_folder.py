"""The folder of an adapter, whatever names its format has for configuration and tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_lora.export.folder import new_folder
from glm_lora.lora.serving import CONFIG_FILE, WEIGHTS_FILE, total_bytes
from glm_lora.protocols import AdapterState

if TYPE_CHECKING:
    import torch

SELECTION_FILE = "selection.json"


def write_adapter(
    state: AdapterState,
    output: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    files: dict[str, str] | None = None,
    *,
    over: bool = False,
) -> Path:
    """Write one adapter folder: configuration, weights, selection and further text files.

    Args:
        state: The whole adapter, fp32 or bf16.
        output: New or empty folder; what a link names is filled.
        config: The configuration in the format's words.
        tensors: The tensors of ``state`` under the format's names.
        files: Further text files by name (a model card).
        over: ``output`` may hold an earlier adapter, whose files are replaced, and other files.

    Raises:
        ConfigError: ``output`` is not a new or empty writable folder with enough space.
        ExportError: Writing failed; nothing is left behind.
    """
    from glm_lora.checkpoint.safetensors_file import write_file

    texts = {
        CONFIG_FILE: json.dumps(config, indent=2) + "\n",
        SELECTION_FILE: state.selection.to_json(),
        **(files or {}),
    }
    size = total_bytes(tensors) + sum(map(len, texts.values()))
    with new_folder(output, size, over=over) as folder:
        metadata = {"format": "pt", "digest": state.digest, "version": str(state.version)}
        write_file(folder / WEIGHTS_FILE, tensors, metadata)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return output
