"""Load an exported adapter with stock PEFT on transformers and compare it with the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import ExportError, SyncError
from glm_lora.export.load import load_adapter
from glm_lora.export.peft import peft_tensors
from glm_lora.model.hf_hooks import mend_kda
from glm_lora.protocols import AdapterState, RolloutEngine
from glm_lora.sync.push import SyncReport, push_and_verify, record_probe
from glm_lora.sync.verify import some

if TYPE_CHECKING:
    import torch
    from torch import nn

LOGPROB_LIMIT = 1e-4
"""Largest |trainer - reloaded| in fp32; the two are independent implementations of one model."""


@dataclass(frozen=True)
class Reference:
    """One sequence and what the trainer says of it under the adapter."""

    tokens: tuple[int, ...]
    logprobs: np.ndarray
    """Log-probability of tokens 1.. at temperature 1."""


@dataclass(frozen=True)
class CheckReport:
    """What the reloaded adapter did."""

    num_sites: int
    num_tensors: int
    max_difference: float
    """Largest |reference - reloaded| log-probability, in nats (0 without references)."""
    effect: float
    """Largest |adapter - base| log-probability: how much the adapter does."""


def check_peft(
    folder: Path,
    hf_checkpoint: Path,
    state: AdapterState,
    references: Sequence[Reference] = (),
    limit: float = LOGPROB_LIMIT,
) -> CheckReport:
    """Load ``folder`` with stock ``PeftModel`` on the base in ``hf_checkpoint``, in fp32.

    Args:
        folder: An adapter written by ``export_peft``.
        hf_checkpoint: The base as a Hugging Face checkpoint.
        state: What was exported.
        references: Sequences with the trainer's log-probabilities under ``state``.
        limit: Largest absolute difference allowed.

    Raises:
        ExportError: PEFT adapts other modules than the selection, holds other values than
            ``state``, or the log-probabilities differ.
    """
    import torch
    from peft import PeftModel
    from transformers import Glm5NextForConditionalGeneration

    base = Glm5NextForConditionalGeneration.from_pretrained(hf_checkpoint, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(folder)).eval()
    mend_kda(model)
    count = check_loaded(model, state)
    gaps, effects = [0.0], [0.0]
    for reference in references:
        adapted = _logprobs(model, reference.tokens)
        with model.disable_adapter():
            plain = _logprobs(model, reference.tokens)
        gaps.append(np.abs(adapted - reference.logprobs).max())
        effects.append(np.abs(adapted - plain).max())
    # np.max keeps a NaN, which Python's max may drop.
    worst, effect = float(np.max(gaps)), float(np.max(effects))
    if not worst <= limit:
        raise ExportError(
            f"the reloaded adapter differs from the trainer by {worst:.3g} in log-probability",
            f"at most {limit:.3g}",
        )
    return CheckReport(state.selection.num_sites, count, worst, effect)


def check_served(
    folder: Path,
    spec: ModelSpec,
    engine: RolloutEngine,
    references: Sequence[Reference],
    limit: float | None = None,
) -> list[SyncReport]:
    """Read ``folder`` strictly, serve it on ``engine``, and compare every reference.

    Args:
        folder: An adapter in either format.
        spec: The base's dimensions.
        engine: Where to serve it (SGLang, or the embedded engine).
        references: Sequences with the trainer's log-probabilities under the adapter.
        limit: Largest mean difference, in nats; default by the engine's dtype.

    Raises:
        CheckpointError: The folder cannot be read exactly.
        ExportError: The engine does not take it, or its log-probabilities differ.
    """
    state = load_adapter(folder, spec)
    reports = []
    for number, reference in enumerate(references):
        probe = record_probe(engine, reference.tokens)
        try:
            report = push_and_verify(
                state,
                engine,
                probe,
                lambda _, expected=reference.logprobs: expected,
                name=f"export-check-{number}",
                limit=limit,
            )
        except SyncError as error:
            raise ExportError(f"{folder} is not served as it was exported: {error}") from error
        reports.append(report)
    return reports


def check_loaded(model: nn.Module, state: AdapterState) -> int:
    """Check that PEFT adapts exactly the selection's modules with exactly these values.

    Returns:
        The number of adapter tensors found in ``model``.

    Raises:
        ExportError: Names the modules or tensors that differ.
    """
    expected = peft_tensors(state)
    actual: dict[str, torch.Tensor] = {
        name.replace(".default.weight", ".weight"): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    missing = [n for n in expected if n not in actual]
    extra = [n for n in actual if n not in expected]
    if missing or extra:
        raise ExportError(
            f"PEFT loaded {len(actual)} adapter tensors; missing: {some(missing) or 'none'}; "
            f"not selected: {some(extra) or 'none'}",
            f"the {len(expected)} tensors of {state.selection.num_sites} sites",
        )
    differing = [
        name for name, t in expected.items() if not bool((actual[name] == t.to(actual[name])).all())
    ]
    if differing:
        raise ExportError(
            f"PEFT holds other values than were exported in {some(differing)}",
            "the exported values bit for bit",
        )
    return len(actual)


def _logprobs(model: Any, tokens: Sequence[int]) -> np.ndarray:
    import torch

    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])
    return chosen[:, 0].double().numpy()
