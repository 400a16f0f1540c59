"""One entry for all formats, and conversion of one adapter folder into another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import ConfigError, did_you_mean
from glm_lora.export.card import CARD_FILE, CardFacts, model_card
from glm_lora.export.load import load_adapter
from glm_lora.export.merge import Fp8, merge_checkpoint
from glm_lora.export.peft import export_peft
from glm_lora.export.sglang import export_sglang
from glm_lora.protocols import AdapterState

FORMATS = ("peft", "sglang", "merged")


def export(
    state: AdapterState,
    output: Path,
    export_format: str,
    facts: CardFacts,
    *,
    hf_checkpoint: Path | None = None,
    fp8: str = "requantise",
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Write ``state`` to ``output`` in one of ``FORMATS``, with a model card.

    Args:
        state: The whole adapter.
        output: New or empty folder.
        export_format: ``peft``, ``sglang`` or ``merged``.
        facts: For the model card; its base name goes into ``adapter_config.json``.
        hf_checkpoint: The base's folder; needed by ``merged`` only.
        fp8: ``requantise`` or ``bf16``: what becomes of merged FP8 weights.
        wrote: Progress of ``merged``, in bytes.

    Raises:
        ConfigError: An unknown format or option, no base for ``merged``, or an unusable output.
        SyncError, CheckpointError, ExportError: See the formats' own functions.
    """
    if export_format not in FORMATS:
        raise ConfigError(
            f"--format {export_format}",
            "one of " + ", ".join(FORMATS),
            did_you_mean(export_format, FORMATS),
        )
    files = {CARD_FILE: model_card(state, facts, export_format)}
    if export_format == "peft":
        return export_peft(state, output, facts.base_model, files)
    if export_format == "sglang":
        return export_sglang(state, output, facts.base_model, files)
    if hf_checkpoint is None:
        raise ConfigError("--format merged has no base", "--hf-checkpoint with the base's folder")
    for option in get_args(Fp8):
        if fp8 == option:
            merge_checkpoint(state, hf_checkpoint, output, fp8=option, files=files, wrote=wrote)
            return output
    raise ConfigError(f"--fp8 {fp8}", "one of " + ", ".join(get_args(Fp8)))


def convert(
    source: Path,
    spec: ModelSpec,
    output: Path,
    export_format: str,
    facts: CardFacts,
    *,
    hf_checkpoint: Path | None = None,
    fp8: str = "requantise",
) -> AdapterState:
    """Read the adapter in ``source`` strictly and write it in another format.

    Returns:
        The adapter, as it was read.

    Raises:
        CheckpointError: ``source`` cannot be read exactly (see ``load_adapter``).
        ConfigError, SyncError, ExportError: See ``export``.
    """
    state = load_adapter(source, spec, model=facts.base_model)
    export(state, output, export_format, facts, hf_checkpoint=hf_checkpoint, fp8=fp8)
    return state
