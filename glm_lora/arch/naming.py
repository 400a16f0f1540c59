"""The three spellings of a projection's name, and the way from each to the others.

* ``transformers``: the module in transformers' memory (and in PEFT). Routed experts have no module
  of their own there and keep their disk name.
* ``disk``: the checkpoint, and every adapter that leaves the trainer.
* ``sglang``: the module in SGLang. Several projections can share one; the part is then written in
  brackets, ``model.layers.0.self_attn.qkv_proj[k_proj]``, so that no name is lost on the way.

Everything is derived from the facts table: all projections have a name in every spelling, and
translating there and back gives the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache

from glm_lora.arch.projections import (
    DENSE_ROWS,
    DSA_ROWS,
    KDA_ROWS,
    LAYERS_PREFIX,
    MOE_ROWS,
    SGLANG_LAYERS_PREFIX,
    Site,
    Status,
)
from glm_lora.errors import ModelError


class Spelling(StrEnum):
    """Where a name is used."""

    TRANSFORMERS = "transformers"
    DISK = "disk"
    SGLANG = "sglang"


_PREFIXES: Mapping[Spelling, str] = {
    Spelling.TRANSFORMERS: LAYERS_PREFIX,
    Spelling.DISK: LAYERS_PREFIX,
    Spelling.SGLANG: SGLANG_LAYERS_PREFIX,
}
_EXPERT = "#"
"""Stands for an expert's number in the tables below."""


def spell(site: Site, spelling: Spelling) -> str:
    """The unique name of ``site`` in a spelling."""
    if spelling is Spelling.SGLANG:
        part = f"[{site.sglang_part}]" if site.sglang_part else ""
        return site.sglang_name + part
    return site.disk_name if spelling is Spelling.DISK else site.name


def translate(name: str, source: Spelling, target: Spelling) -> str:
    """The name in ``target`` spelling of the projection called ``name`` in ``source`` spelling.

    Raises:
        ModelError: ``name`` is no projection's name in that spelling.
    """
    layer, path, expert = _split(name, source)
    translated = _paths(source, target).get(path)
    if translated is None:
        raise ModelError(
            f"{name!r} is no projection's name", f"a module name in {source.value} spelling"
        )
    return f"{_PREFIXES[target]}{layer}.{translated.replace(_EXPERT, expert)}"


def _split(name: str, spelling: Spelling) -> tuple[str, str, str]:
    found = re.fullmatch(re.escape(_PREFIXES[spelling]) + r"(0|[1-9][0-9]*)\.(.+)", name)
    if found is None:
        return "", name, ""
    expert = re.search(r"(?<=[.\[])(0|[1-9][0-9]*)(?=\.)", found[2])
    if expert is None:
        return found[1], found[2], ""
    path = found[2][: expert.start()] + _EXPERT + found[2][expert.end() :]
    return found[1], path, expert[0]


@lru_cache(maxsize=16)
def _paths(source: Spelling, target: Spelling) -> Mapping[str, str]:
    table: dict[str, str] = {}
    for row in (*KDA_ROWS, *DSA_ROWS, *DENSE_ROWS, *MOE_ROWS):
        if row.status is Status.NOT_A_TARGET:
            continue
        disk = row.path
        part = row.leaf
        if row.expert:
            part = f"{_EXPERT}.{row.leaf}"
            disk = row.expert_path(_EXPERT)
        names = {
            Spelling.DISK: disk,
            Spelling.TRANSFORMERS: disk if row.expert else row.memory,
            Spelling.SGLANG: f"{row.sglang}[{part}]" if row.sglang_path else row.sglang,
        }
        table[names[source]] = names[target]
    return table
