"""An adapter as others read it: one rank for all sites, and ``adapter_config.json``.

Engines read ``r`` and ``lora_alpha`` only and serve every site with ``alpha / r``; ranks per site
are ignored silently. So every adapter leaves the trainer zero-padded to its largest rank, with the
alpha that keeps ``alpha / rank`` on every site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from glm_lora.protocols import AdapterState
from glm_lora.targets.selection import Selection

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def padded_tensors(state: AdapterState) -> dict[str, torch.Tensor]:
    """The tensors of ``state`` with every rank zero-padded to the selection's largest.

    Padding A with zero rows and B with zero columns leaves ``B A`` unchanged. Tensors that have
    the largest rank already are the same objects.

    Returns:
        Serving key to A ``[rank, in]`` or B ``[out, rank]``, in the selection's order.
    """
    from torch.nn.functional import pad

    rank = state.selection.rank
    padded: dict[str, torch.Tensor] = {}
    for adapter in state.selection.adapters:
        a, b = state.tensors[adapter.a_key], state.tensors[adapter.b_key]
        extra = rank - adapter.rank
        padded[adapter.a_key] = pad(a, (0, 0, 0, extra)) if extra else a
        padded[adapter.b_key] = pad(b, (0, extra)) if extra else b
    return padded


def adapter_config(
    selection: Selection, base_model: str, target_modules: str | list[str]
) -> dict[str, Any]:
    """``adapter_config.json`` of the padded adapter.

    Args:
        selection: What is adapted.
        base_model: Name or folder of the base.
        target_modules: The adapted modules as the reader spells them.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": selection.rank,
        "lora_alpha": plain_number(selection.alpha),
        "lora_dropout": selection.dropout,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "target_modules": target_modules,
    }


def serving_config(selection: Selection, base_model: str) -> dict[str, Any]:
    """``adapter_config.json`` for engines that read leaf names (SGLang, vLLM)."""
    return adapter_config(selection, base_model, sorted({a.site.leaf for a in selection.adapters}))


def plain_number(value: float) -> float | int:
    """``value`` as a whole number where it is one (readers of the file expect 32, not 32.0)."""
    return int(value) if float(value).is_integer() else value


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors.values())
