"""Which model a selection is for: built in, or read from a checkpoint folder, or both."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from glm_lora.arch.checkpoint_index import CheckpointIndex, read_index, verify_sites
from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import BUILTIN, ModelSpec, builtin, spec_from_dir
from glm_lora.errors import ModelError


@dataclass(frozen=True)
class KnownModel:
    """A model's dimensions and where they come from."""

    name: str
    spec: ModelSpec
    source: str
    """A phrase for the report: what was read, and what was checked against it."""


def known_model(name: str, hf_checkpoint: Path | None = None) -> KnownModel:
    """The model called ``name``, checked against the checkpoint where one is given.

    Args:
        name: A built-in name; with ``hf_checkpoint`` any name.
        hf_checkpoint: Folder with a ``config.json`` and, perhaps, safetensors weights.

    Raises:
        ModelError: An unknown name, a configuration that is not glm5_next or not the model of that
            name, or a trainable site that is missing on disk or has another shape there.
        CheckpointError: An index or a shard that cannot be read or is missing.
    """
    if hf_checkpoint is None:
        return KnownModel(name, builtin(name), "built in")
    spec = whole = spec_from_dir(hf_checkpoint)
    source = "config.json"
    if name in BUILTIN:
        spec = _agreed(BUILTIN[name], whole, name, hf_checkpoint)
        source = "built in, as config.json says"
    index = read_index(hf_checkpoint)
    if index is not None:
        count = verify_sites(index, spec)
        _same_layers(index, whole)
        if spec.num_hidden_layers == whole.num_hidden_layers:
            index.require_files()  # the first layers of a longer model need only some of them
        source += f"; all {count} trainable sites are in {index.path.name} with their shapes"
    return KnownModel(name, spec, source)


def _same_layers(index: CheckpointIndex, spec: ModelSpec) -> None:
    """The index holds the configuration's layers and, at most, one MTP layer after them."""
    count = spec.num_hidden_layers
    beyond = [layer for layer in sorted(index.layers) if layer > count]
    if beyond:
        raise ModelError(
            f"{index.path} holds layer {beyond[-1]}, but config.json has {count} layers",
            f"layers 0 to {count - 1}, and {count} for the MTP layer",
        )


def _agreed(ours: ModelSpec, theirs: ModelSpec, name: str, folder: Path) -> ModelSpec:
    """``ours``, when the folder holds that model or a longer one that starts with it."""
    longer = theirs.num_hidden_layers > ours.num_hidden_layers
    start = theirs.first_layers(ours.num_hidden_layers) if longer else theirs
    if _shapes(start) == _shapes(ours):
        return ours
    differing = [
        f"{f.name} {getattr(start, f.name)} instead of {getattr(ours, f.name)}"
        for f in fields(ours)
        if f.name not in ("pad_token_id", "eos_token_ids")
        and getattr(start, f.name) != getattr(ours, f.name)
    ]
    raise ModelError(
        f"{folder}/config.json is not {name}: " + ", ".join(differing[:4]),
        f"a checkpoint of {name}",
        "Give the folder's own model another --model-name",
    )


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {key: param.shape for key, param in all_params(spec).items()}
