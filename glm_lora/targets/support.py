"""Who can train, carry and serve an adapter on each kind of projection, and why not.

The answers follow from the facts table and from a handful of facts about the engines, each written
once below. Those about stock SGLang are read in the source of 0.5.23: ``lora/utils.py`` (known
targets, one width per target unless the model says otherwise), ``lora/lora.py`` (fused projections)
and ``lora/lora_manager.py`` (routed experts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from glm_lora.arch.projections import (
    DENSE_ROWS,
    DSA_ROWS,
    KDA_ROWS,
    MOE_ROWS,
    Row,
    Status,
)
from glm_lora.targets.selection import Selection


class Step(StrEnum):
    """What has to be possible for an adapter to be of use."""

    TRAIN = "train"
    SYNC = "sync"
    EXPORT = "export"
    EMBEDDED = "embedded"
    SGLANG_STOCK = "SGLang stock"
    SGLANG_PLUGIN = "SGLang + plugin"
    PEFT = "PEFT"


SERVING = (Step.EMBEDDED, Step.SGLANG_STOCK, Step.SGLANG_PLUGIN, Step.PEFT)
"""The engines that can serve an adapter."""


@dataclass(frozen=True)
class Verdict:
    """Yes, or no with the reason; a yes may have a condition."""

    possible: bool
    reason: str = ""

    @property
    def word(self) -> str:
        """``yes`` or ``no``."""
        return "yes" if self.possible else "no"


_UNKNOWN_TARGET = "not among the targets that stock SGLang knows"
_ZERO_WIDTH = "stock SGLang takes the width from head_dim, which is not KDA's head size"
_ONE_WIDTH = "stock SGLang takes one o_proj width for all layers, but KDA and DSA differ"
_EXPERT_BUFFERS = "reserves buffers for all routed experts as well"
_STOCK_NO = {
    "self_attn.b_proj": _UNKNOWN_TARGET,
    "self_attn.f_a_proj": _UNKNOWN_TARGET,
    "self_attn.f_b_proj": _UNKNOWN_TARGET,
    "self_attn.g_a_proj": _UNKNOWN_TARGET,
    "self_attn.g_b_proj": _UNKNOWN_TARGET,
    "self_attn.q_proj": _ZERO_WIDTH,
    "self_attn.k_proj": _ZERO_WIDTH,
    "self_attn.v_proj": _ZERO_WIDTH,
    "self_attn.o_proj": _ONE_WIDTH,
}


def verdict(row: Row, step: Step, missing: Iterable[str] = ()) -> Verdict:
    """Whether ``step`` works for an adapter on the projections of ``row``.

    Args:
        row: A row of the facts table.
        step: What is asked.
        missing: Leaf names that the engine fuses with this row but the selection leaves out.
    """
    if row.status is not Status.TRAINABLE:
        return Verdict(False, row.reason)
    if step not in (Step.SGLANG_STOCK, Step.SGLANG_PLUGIN):
        return Verdict(True)
    if step is Step.SGLANG_STOCK and row.path in _STOCK_NO:
        return Verdict(False, _STOCK_NO[row.path])
    if left_out := list(missing):
        fused = row.sglang.rsplit(".", 1)[-1]
        return Verdict(False, f"SGLang holds it in {fused} together with {', '.join(left_out)}")
    if step is Step.SGLANG_STOCK and row.path.startswith("mlp."):
        return Verdict(True, _EXPERT_BUFFERS)
    return Verdict(True)


PROJECTION_ROWS: Mapping[tuple[str, str], Row] = {
    (row.group, row.leaf): row
    for row in (*KDA_ROWS, *DSA_ROWS, *DENSE_ROWS, *MOE_ROWS)
    if row.status is not Status.NOT_A_TARGET
}
"""The rows of all linear projections by (group, leaf)."""


def fused_rows(row: Row) -> tuple[Row, ...]:
    """The trainable projections that SGLang holds in the same module, ``row`` included."""
    return tuple(
        other
        for other in PROJECTION_ROWS.values()
        if (other.group, other.sglang) == (row.group, row.sglang)
        and other.status is Status.TRAINABLE
    )


def missing_parts(selection: Selection) -> dict[tuple[str, str], tuple[str, ...]]:
    """For each selected (group, leaf): parts of its fused SGLang module that are left out.

    A part counts as left out when one layer adapts this projection but not that part.
    """
    where: dict[tuple[str, str], set[int]] = {}
    for adapter in selection.adapters:
        site = adapter.site
        where.setdefault((site.group, site.leaf), set()).add(site.layer)
    return {
        (group, leaf): tuple(
            other.leaf
            for other in fused_rows(PROJECTION_ROWS[group, leaf])
            if layers - where.get((group, other.leaf), set())
        )
        for (group, leaf), layers in where.items()
    }
