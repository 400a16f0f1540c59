"""Merge an adapter into a Hugging Face checkpoint: ``W + alpha / r B A`` in fp32, rounded once.

Only shards that hold an adapted weight are written; the others are hard links to the base's (or
copies, on another file system). FP8 weights are dequantised in fp32, merged, and either quantised
again in their blocks or written as bfloat16.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from glm_lora.arch.checkpoint_index import BLOCK, INDEX_FILE, SCALE_SUFFIX, scale_shape
from glm_lora.checkpoint.hf_reader import HfReader
from glm_lora.checkpoint.hf_writer import PlannedTensor, write_shard
from glm_lora.checkpoint.safetensors_file import SafetensorsFile, TensorEntry, read_rows
from glm_lora.errors import ExportError
from glm_lora.export.folder import new_folder
from glm_lora.protocols import AdapterState
from glm_lora.sync.verify import check_state, some
from glm_lora.targets.selection import SiteAdapter

Fp8 = Literal["requantise", "bf16"]
FP8_MAX = 448.0
"""Largest finite value of e4m3."""


@dataclass
class MergeReport:
    """What was written."""

    merged: int = 0
    """Adapted weights that were rewritten."""
    requantised: int = 0
    """Those of them that were quantised again."""
    written: list[str] = field(default_factory=list)
    """Shards that were written anew."""
    linked: list[str] = field(default_factory=list)
    """Shards that are hard links to the base's."""
    copied: list[str] = field(default_factory=list)
    """Shards that had to be copied."""


def merge_checkpoint(
    state: AdapterState,
    hf_checkpoint: Path,
    output: Path,
    *,
    fp8: Fp8 = "requantise",
    files: dict[str, str] | None = None,
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> MergeReport:
    """Write the base with ``state`` merged into it.

    Args:
        state: The whole adapter.
        hf_checkpoint: The base, under disk names.
        output: New or empty folder, best on the base's file system (links instead of copies).
        fp8: What becomes of adapted weights that are stored as FP8.
        files: Further text files by name (a model card).
        wrote: Called with the bytes of every tensor that was written, for progress.

    Raises:
        SyncError: ``state`` does not hold what its selection says.
        CheckpointError: The base is incomplete or damaged.
        ExportError: The base lacks an adapted weight, or one has another shape or dtype; or
            writing failed. Nothing is left behind.
        ConfigError: ``output`` cannot be used.
    """
    check_state(state)
    reader = HfReader.open(hf_checkpoint)
    merger = _Merger(state, reader, fp8)
    merger.check(hf_checkpoint)
    report = MergeReport()
    sizes = {n: f.size for n, f in reader.files.items() if merger.touches(f)}
    with new_folder(output, sum(sizes.values())) as folder:
        _other_files(hf_checkpoint, folder, set(reader.files))
        for name, shard in reader.files.items():
            if name in sizes:
                write_shard(folder / name, merger.plan(shard), wrote)
                report.written.append(name)
            elif _link(shard.path, folder / name):
                report.linked.append(name)
            else:
                report.copied.append(name)
        merger.describe(folder)
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
    report.merged = len(merger.adapters)
    report.requantised = len(merger.quantised) if fp8 == "requantise" else 0
    return report


class _Merger:
    """The merged tensors of one checkpoint."""

    def __init__(self, state: AdapterState, reader: HfReader, fp8: Fp8) -> None:
        self.state, self.reader, self.fp8 = state, reader, fp8
        self.adapters = {f"{a.site.disk_name}.weight": a for a in state.selection.adapters}
        self.quantised: set[str] = set()

    def check(self, folder: Path) -> None:
        """ExportError unless every adapted weight is there, of its shape, and can be merged."""
        entries = self.reader.entries
        missing = [n for n in self.adapters if n not in entries]
        wrong = [
            f"{n} {list(entries[n].shape)} instead of {list(a.site.shape)}"
            for n, a in self.adapters.items()
            if n in entries and entries[n].shape != a.site.shape
        ]
        if missing or wrong:
            raise ExportError(
                f"{folder} does not fit the adapter: missing {some(missing) or 'none'}; "
                f"misshapen {some(wrong) or 'none'}",
                "the base that the adapter was trained on",
            )
        floats = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        odd = [n for n in self.adapters if entries[n].dtype not in floats]
        if odd:
            raise ExportError(f"{some(odd)} cannot be merged: {entries[odd[0]].dtype}")
        self.quantised = {n for n in self.adapters if self.reader.is_quantised(n)}
        unscaled = [n for n in self.quantised if n + SCALE_SUFFIX not in entries]
        if unscaled:
            raise ExportError(f"{some(unscaled)} have no scales beside them", "X.weight_scale_inv")

    def touches(self, shard: SafetensorsFile) -> bool:
        """Whether anything in ``shard`` changes."""
        return any(n in self.adapters or self._is_changed_scale(n) for n in shard.entries)

    def _is_changed_scale(self, name: str) -> bool:
        return name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self.quantised

    def plan(self, shard: SafetensorsFile) -> list[PlannedTensor]:
        """What to write in place of ``shard``; values are computed when their turn comes."""
        entries = sorted(shard.entries.values(), key=lambda e: e.offset)
        return [p for e in entries for p in self._planned(e)]

    def _planned(self, entry: TensorEntry) -> Iterable[PlannedTensor]:
        name = entry.name
        if self._is_changed_scale(name):
            if self.fp8 == "requantise":
                weight = name.removesuffix(SCALE_SUFFIX)
                shape = scale_shape(self.adapters[weight].site.shape)
                yield PlannedTensor(
                    name, torch.float32, shape, lambda: quantise(self.merged(weight))[1]
                )
        elif name in self.quantised:
            if self.fp8 == "requantise":
                dtype = torch.float8_e4m3fn
                yield PlannedTensor(
                    name, dtype, entry.shape, lambda: quantise(self.merged(name))[0]
                )
            else:
                dtype = torch.bfloat16
                yield PlannedTensor(name, dtype, entry.shape, lambda: self.merged(name).to(dtype))
        elif name in self.adapters:
            dtype = entry.dtype
            yield PlannedTensor(name, dtype, entry.shape, lambda: self.merged(name).to(dtype))
        else:
            yield PlannedTensor(name, entry.dtype, entry.shape, lambda: read_rows(entry))

    def merged(self, name: str) -> torch.Tensor:
        """One merged weight in fp32, ``[out, in]``."""
        weight = self._base(name)
        adapter: SiteAdapter = self.adapters[name]
        a = self.state.tensors[adapter.a_key].float()
        b = self.state.tensors[adapter.b_key].float()
        return weight.addmm_(b, a, alpha=adapter.scaling)

    def _base(self, name: str) -> torch.Tensor:
        weight = read_rows(self.reader.entries[name]).float()
        if name in self.quantised:
            scale = read_rows(self.reader.entries[name + SCALE_SUFFIX])
            weight.mul_(_spread(scale, weight.shape))
        return weight

    def describe(self, folder: Path) -> None:
        """Make index and configuration agree with what was written."""
        if self.fp8 == "requantise" or not self.quantised:
            return
        index = folder / INDEX_FILE
        if index.exists():
            data: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
            for name in self.quantised:
                data["weight_map"].pop(name + SCALE_SUFFIX, None)
            data.setdefault("metadata", {})["total_size"] = self._total_size()
            index.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        path = folder / "config.json"
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        quantisation = config.get("quantization_config")
        if quantisation is not None:
            plain = quantisation.setdefault("modules_to_not_convert", [])
            plain += sorted(n.removesuffix(".weight") for n in self.quantised)
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _total_size(self) -> int:
        total = sum(e.nbytes for e in self.reader.entries.values())
        for name in self.quantised:
            # One byte a value becomes two, and the scales go.
            entries = self.reader.entries
            total += entries[name].nbytes - entries[name + SCALE_SUFFIX].nbytes
        return total


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 e4m3 in 128 x 128 blocks: values, and fp32 scales that multiply them back.

    The scale of a block is its largest magnitude over 448, so the largest value is exact; a block
    of zeros has scale 1.
    """
    rows, columns = scale_shape(tuple(weight.shape))
    padded = weight.new_zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    values = (weight / _spread(scale, weight.shape)).clamp_(-FP8_MAX, FP8_MAX)
    return values.to(torch.float8_e4m3fn), scale


def _spread(scale: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    wide = scale.repeat_interleave(BLOCK, 0)[: shape[0]]
    return wide.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def _other_files(source: Path, folder: Path, shards: set[str]) -> None:
    for entry in source.iterdir():
        if entry.is_file() and entry.name not in shards and not entry.name.startswith("."):
            shutil.copy2(entry, folder / entry.name)


def _link(source: Path, target: Path) -> bool:
    """Hard-link ``source``; False when it had to be copied."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy2(source, target)
        return False
    return True
