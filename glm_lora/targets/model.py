"""Which model a selection is for: built in, or read from a checkpoint folder, or both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glm_lora.arch.agreement import first_layers_as
from glm_lora.arch.checkpoint_index import CheckpointIndex, read_index, verify_sites
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
        spec = first_layers_as(BUILTIN[name], whole, name, f"{hf_checkpoint}/config.json")
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
