"""Back from a base to a Hugging Face checkpoint: the same values under disk names.

Tensors keep the dtype in which the base holds them (FP8 sources have become bfloat16). The vision
tower and the tokenizer are carried over from the checkpoint the base was made from; the
multi-token-prediction layer is not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from glm_lora.arch.checkpoint_index import read_index
from glm_lora.arch.foreign import VISION_PREFIX
from glm_lora.arch.projections import Param, all_params
from glm_lora.arch.spec import ModelSpec
from glm_lora.checkpoint.base_writer import read_chunk
from glm_lora.checkpoint.convert import disk_names
from glm_lora.checkpoint.files import (
    NOTES_FILE,
    built_folder,
    check_empty,
    check_space,
    make_folder,
    write_atomic,
)
from glm_lora.checkpoint.hf_config import SMALL_FILES, cut_config, text_config, vision_config
from glm_lora.checkpoint.hf_reader import HfReader
from glm_lora.checkpoint.hf_writer import PlannedTensor, planned, write_tensors
from glm_lora.checkpoint.manifest import BaseManifest
from glm_lora.checkpoint.progress import Progress, Report, silent
from glm_lora.checkpoint.torch_dist import read_metadata, release_folder


def write_hf(
    ref_load: Path,
    manifest: BaseManifest,
    source: Path | None,
    target: Path,
    report: Report = silent,
) -> None:
    """Write the base in ``ref_load`` as a Hugging Face checkpoint.

    Args:
        ref_load: A finished base.
        manifest: Its manifest.
        source: Folder whose config, tokenizer and vision tower are carried over; None makes a
            config of its own and a small random vision tower, and no tokenizer.
        target: Folder to write; must not exist or be empty.
        report: Told the bytes written.

    Raises:
        CheckpointError: The target is not empty, or the disk is too small.
    """
    check_empty(target)
    tensors = [*_text_tensors(ref_load, manifest), *_vision(source, manifest.spec)]
    total = sum(t.nbytes for t in tensors)
    check_space(target, total, "the checkpoint")
    make_folder(target.parent)
    done = 0

    def wrote(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(Progress("writing", done, total, "bytes"))

    with built_folder(target) as partial:
        write_tensors(partial, tensors, wrote=wrote)
        config = _config(source, manifest.spec)
        write_atomic(partial / "config.json", json.dumps(config, indent=2) + "\n")
        for path in _carried_over(source):
            shutil.copyfile(path, partial / path.name)


def _text_tensors(ref_load: Path, manifest: BaseManifest) -> list[PlannedTensor]:
    release = release_folder(ref_load)
    metadata = read_metadata(release, [record.key for record in manifest.tensors])
    dtypes = {record.key: getattr(torch, record.dtype) for record in manifest.tensors}
    result = []
    for param in all_params(manifest.spec).values():
        rows = _StoredRows(release, metadata, param)
        names = disk_names(param)
        shape = param.shape[1:] if param.row.expert else param.shape
        for i, name in enumerate(names):
            result.append(PlannedTensor(name, dtypes[param.key], shape, rows.reader(i)))
    return result


class _StoredRows:
    """Reads a stored tensor whole, or one expert of a stack, holding on to the last chunk."""

    def __init__(self, release: Path, metadata: Metadata, param: Param) -> None:
        self._release, self._metadata, self._param = release, metadata, param
        stored = metadata.state_dict_metadata[param.key]
        assert isinstance(stored, TensorStorageMetadata)
        self._chunks = sorted(stored.chunks, key=lambda c: tuple(c.offsets))
        self._held: tuple[int, torch.Tensor] | None = None

    def reader(self, index: int) -> Callable[[], torch.Tensor]:
        return (lambda: self._expert(index)) if self._param.row.expert else self._whole

    def _whole(self) -> torch.Tensor:
        parts = [
            read_chunk(self._release, self._metadata, self._param.key, chunk.offsets)
            for chunk in self._chunks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _expert(self, index: int) -> torch.Tensor:
        number = next(
            i for i, c in enumerate(self._chunks) if 0 <= index - c.offsets[0] < c.sizes[0]
        )
        chunk = self._chunks[number]
        if self._held is None or self._held[0] != number:
            value = read_chunk(self._release, self._metadata, self._param.key, chunk.offsets)
            self._held = (number, value)
        value = self._held[1][index - chunk.offsets[0]]
        if index + 1 == chunk.offsets[0] + chunk.sizes[0]:
            self._held = None
        return value.clone()


def _vision(source: Path | None, spec: ModelSpec) -> list[PlannedTensor]:
    if source is None:
        return planned(random_vision(spec))
    index = read_index(source)
    names = None if index is None else (n for n in index.weight_map if n.startswith(VISION_PREFIX))
    reader = HfReader.open(source, None if names is None else frozenset(names))
    return [
        PlannedTensor(name, entry.dtype, entry.shape, lambda name=name: reader.rows(name))
        for name, entry in reader.entries.items()
        if name.startswith(VISION_PREFIX)
    ]


def random_vision(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """A small random vision tower under disk names, bfloat16."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextVisionConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextVisionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = Glm5NextVisionModel(Glm5NextVisionConfig(**vision_config(spec)))
    return {VISION_PREFIX + name: value for name, value in tower.bfloat16().state_dict().items()}


def _config(source: Path | None, spec: ModelSpec) -> dict[str, Any]:
    if source is None:
        return {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "dtype": "bfloat16",
            "language_model_only": True,
            "tie_word_embeddings": False,
            "text_config": {"model_type": "glm5_next_text", **text_config(spec)},
            "vision_config": {"model_type": "glm5_next_vision", **vision_config(spec)},
        }
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = cut_config(config, spec.num_hidden_layers)
    config.pop("quantization_config", None)
    return config


def _carried_over(source: Path | None) -> list[Path]:
    """Tokenizer and generation files; weights, index, config and our own notes are not."""
    if source is None:
        return []
    own = ("config.json", NOTES_FILE)
    return [
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.name.endswith(SMALL_FILES)
        and path.name not in own
        and "safetensors" not in path.name
    ]
