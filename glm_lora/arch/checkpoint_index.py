"""What lies in a checkpoint folder, read from its index and its shards' headers (no torch).

Reading the headers of a whole checkpoint takes a fraction of a second and reads no weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from glm_lora.arch.projections import LAYERS_PREFIX, Site, trainable_sites
from glm_lora.arch.safetensors_header import HeaderEntry, read_header
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import CheckpointError, ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CUT_KEY = "glm_lora_layers"
"""In the metadata of an index that lists only what a slice needs; its shards may hold more."""
FP8 = "F8_E4M3"
BLOCK = 128
"""Side of the square blocks of an FP8 weight that share one scale."""
SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class CheckpointIndex:
    """Which file of a checkpoint folder holds which tensor."""

    path: Path
    """The index, or the only safetensors file."""
    weight_map: Mapping[str, str]
    """Tensor name to file name."""
    is_cut: bool = False
    """Whether it leaves out tensors on purpose (``CUT_KEY``)."""

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the files, sorted."""
        return self.shards_of(self.weight_map)

    def shards_of(self, names: Container[str]) -> tuple[str, ...]:
        """The files that hold tensors of ``names``, sorted."""
        return tuple(sorted({s for name, s in self.weight_map.items() if name in names}))

    @property
    def layers(self) -> frozenset[int]:
        """Numbers of the text layers that have a tensor (the MTP layer included)."""
        rests = (n.removeprefix(LAYERS_PREFIX) for n in self.weight_map if _in_text_layer(n))
        return frozenset(int(r.split(".", 1)[0]) for r in rests)

    def require_files(self) -> None:
        """Raise CheckpointError when a file that the index names is not there."""
        for shard in self.shards:
            if not (self.path.parent / shard).is_file():
                raise self._missing(shard)

    def _missing(self, shard: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} names {shard}, which is not in {self.path.parent}",
            "the files of the index",
            "Download the missing file",
        )

    def headers(self, names: Iterable[str]) -> dict[str, HeaderEntry]:
        """Dtype and shape of the named tensors, read from the files that hold them.

        Raises:
            CheckpointError: A file is missing, truncated, or lacks a tensor the index puts there.
        """
        wanted = list(names)
        found: dict[str, HeaderEntry] = {}
        for shard in dict.fromkeys(self.weight_map[name] for name in wanted):
            if not (self.path.parent / shard).is_file():
                raise self._missing(shard)
            found.update(read_header(self.path.parent / shard).entries)
        for name in wanted:
            if name not in found:
                raise CheckpointError(
                    f"{self.path} puts {name} into {self.weight_map[name]}, which does not hold it",
                    "files that belong to the index",
                    "Copy the checkpoint again",
                )
        return {name: found[name] for name in wanted}


def _in_text_layer(name: str) -> bool:
    return re.match(re.escape(LAYERS_PREFIX) + r"[0-9]+\.", name) is not None


def read_index(folder: Path) -> CheckpointIndex | None:
    """The index of a checkpoint folder; None when it holds no safetensors weights at all.

    Raises:
        CheckpointError: The index is unreadable, not JSON, or not an index.
    """
    path = Path(folder) / INDEX_FILE
    if not path.exists():
        single = path.with_name(SINGLE_FILE)
        if not single.exists():
            return None
        return CheckpointIndex(single, dict.fromkeys(read_header(single).entries, SINGLE_FILE))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "a safetensors index") from error
    return parse_index(text, path)


def parse_index(text: str, path: Path, source: str = "") -> CheckpointIndex:
    """The index with this text.

    Args:
        text: The file's text.
        path: Where it lies, or will lie.
        source: What to call it in messages, where that is not the path.

    Raises:
        CheckpointError: Not JSON, not an index, or one that names files outside its folder.
    """
    source = source or str(path)
    try:
        data: object = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{source} is not valid JSON ({error})", "a complete safetensors index"
        ) from error
    values = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    found = values.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"{source} has no weight_map", "a safetensors index: {'weight_map': {tensor: file}}"
        )
    weight_map: dict[str, str] = {}
    for name, shard in cast("dict[str, object]", found).items():
        # A file elsewhere would let an index reach outside its folder.
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise CheckpointError(f"{source} maps {name} to {shard!r}", "a file name")
        weight_map[name] = shard
    metadata = values.get("metadata")
    return CheckpointIndex(path, weight_map, isinstance(metadata, dict) and CUT_KEY in metadata)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a quantised matrix: one per started block."""
    return tuple(-(-size // BLOCK) for size in shape)


def verify_sites(index: CheckpointIndex, spec: ModelSpec) -> int:
    """Check that every trainable site of ``spec`` is in the checkpoint with its shape.

    Returns:
        The number of sites checked.

    Raises:
        ModelError: The checkpoint is of another architecture, lacks a site, or holds it with
            another shape.
        CheckpointError: A file is missing, truncated, or does not hold what the index says.
    """
    _refuse_other_architecture(index)
    sites = trainable_sites(spec)
    missing = [s for s in sites if _weight(s) not in index.weight_map]
    if missing:
        raise ModelError(
            f"{index.path} lacks {_weight(missing[0])}"
            + (f" and {len(missing) - 1} more trainable sites" if len(missing) > 1 else ""),
            f"all {len(sites)} trainable sites of the model",
        )
    infos = index.headers(_weight(s) for s in sites)
    for site in sites:
        info = infos[_weight(site)]
        if info.shape != site.shape:
            raise ModelError(
                f"{_weight(site)} has shape {list(info.shape)} in {index.path.parent}",
                f"{list(site.shape)}, as config.json says",
            )
    _verify_scales(index, {s: infos[_weight(s)] for s in sites})
    return len(sites)


def _weight(site: Site) -> str:
    return site.disk_name + ".weight"


def _refuse_other_architecture(index: CheckpointIndex) -> None:
    if not any(name.startswith(LAYERS_PREFIX) for name in index.weight_map):
        raise ModelError(
            f"{index.path} holds no {LAYERS_PREFIX}* (its first tensor is "
            f"{min(index.weight_map, default='missing')})",
            "a glm5_next checkpoint",
        )


def _verify_scales(index: CheckpointIndex, infos: Mapping[Site, HeaderEntry]) -> None:
    quantised = [site for site, info in infos.items() if info.dtype == FP8]
    names = {site: _weight(site) + SCALE_SUFFIX for site in quantised}
    for site, name in names.items():
        if name not in index.weight_map:
            raise ModelError(f"{index.path} lacks {name}", f"a scale for {_weight(site)} (FP8)")
    scales = index.headers(names.values())
    for site, name in names.items():
        expected = scale_shape(site.shape)
        if scales[name].shape != expected:
            raise ModelError(f"{name} has shape {list(scales[name].shape)}", str(list(expected)))
