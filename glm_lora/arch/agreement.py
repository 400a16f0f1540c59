"""Whether a configuration describes the model it is taken for."""

from __future__ import annotations

from dataclasses import fields

from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import ModelError

NOT_SHAPE = ("pad_token_id", "eos_token_ids")
"""Fields that do not change a single weight."""


def differences(found: ModelSpec, wanted: ModelSpec) -> list[str]:
    """The fields in which two models differ, token ids aside."""
    return [
        f"{f.name} {getattr(found, f.name)!r} instead of {getattr(wanted, f.name)!r}"
        for f in fields(ModelSpec)
        if f.name not in NOT_SHAPE and getattr(found, f.name) != getattr(wanted, f.name)
    ]


def first_layers_as(known: ModelSpec, found: ModelSpec, name: str, source: str) -> ModelSpec:
    """``found``, cut to the layers of ``known``, when these have the same parameters.

    Args:
        known: The model called ``name``.
        found: What a ``config.json`` describes: that model, or a longer one that starts with it.
        name: For messages.
        source: The ``config.json``, for messages.

    Raises:
        ModelError: Fewer layers, or parameters of other shapes; names the fields that differ.
    """
    longer = found.num_hidden_layers > known.num_hidden_layers
    start = found.first_layers(known.num_hidden_layers) if longer else found
    if _shapes(start) != _shapes(known):
        raise ModelError(
            f"{source} is not {name}: " + "; ".join(differences(start, known)[:4]),
            f"the configuration of {name}",
            "Name the right folder with --hf-checkpoint, or the right model with --model-name",
        )
    return start


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {key: param.shape for key, param in all_params(spec).items()}
