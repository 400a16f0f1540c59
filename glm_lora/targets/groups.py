"""Target groups: the names that stand for many projections at once."""

from __future__ import annotations

from collections.abc import Mapping

from glm_lora.arch.projections import Row, Status

ALL = "all"
"""Every trainable site of the model."""

GROUPS: Mapping[str, frozenset[str]] = {
    "attn": frozenset({"kda", "dsa", "kv_b"}),
    "mlp": frozenset({"dense_mlp", "shared_experts", "routed_experts"}),
    "kda": frozenset({"kda"}),
    "dsa": frozenset({"dsa"}),
    "dense_mlp": frozenset({"dense_mlp"}),
    "shared_experts": frozenset({"shared_experts"}),
}
"""Group name to the groups of the facts table it covers.

``attn`` and ``mlp`` are the words of the recipe: they cover the frozen projections too, so that
these must be taken out by name. The finer groups hold trainable sites only.
"""

GROUP_NAMES = (ALL, *GROUPS)


def in_group(row_group: str, status: Status, name: str) -> bool:
    """Whether a projection with the facts table's ``row_group`` belongs to group ``name``."""
    if name == ALL:
        return status is Status.TRAINABLE
    return row_group in GROUPS[name]


def fixing_exclude(row: Row) -> str:
    """The shortest glob that takes the projections of a frozen ``row`` out, and nothing else."""
    return f"*.{row.path.removesuffix('.' + row.leaf)}.*" if row.expert else f"*.{row.path}"
