"""A selection in numbers: one line per projection, and the totals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import ModelSpec
from glm_lora.targets.resolve import Resolution
from glm_lora.targets.selection import Selection, SiteAdapter
from glm_lora.targets.support import PROJECTION_ROWS, SERVING, Step, Verdict, missing_parts, verdict

BF16_BYTES = 2


@dataclass(frozen=True)
class Projection:
    """All selected sites of one kind, shape and rank."""

    group: str
    leaf: str
    layers: tuple[int, ...]
    shape: tuple[int, int]
    kind: str
    rank: int
    parameters: int
    served: dict[Step, Verdict]

    @property
    def bytes_bf16(self) -> int:
        """Size of the adapters' A and B in bf16."""
        return self.parameters * BF16_BYTES


def projections(selection: Selection) -> list[Projection]:
    """The selected sites, grouped by projection, shape and rank, in model order."""
    kinds: dict[tuple[Any, ...], list[SiteAdapter]] = {}
    for adapter in selection.adapters:
        site = adapter.site
        kinds.setdefault((site.group, site.leaf, site.shape, adapter.rank), []).append(adapter)
    left_out = missing_parts(selection)
    found: list[Projection] = []
    for adapters in kinds.values():
        site = adapters[0].site
        row = PROJECTION_ROWS[site.group, site.leaf]
        missing = left_out[site.group, site.leaf]
        found.append(
            Projection(
                group=site.group,
                leaf=site.leaf,
                layers=tuple(a.site.layer for a in adapters),
                shape=site.shape,
                kind=site.kind.value,
                rank=adapters[0].rank,
                parameters=sum(a.site.parameters(a.rank) for a in adapters),
                served={step: verdict(row, step, missing) for step in SERVING},
            )
        )
    return found


def base_parameters(spec: ModelSpec) -> int:
    """Parameters of the frozen text model (vision tower and MTP layer not counted)."""
    return sum(p.numel for p in all_params(spec).values())


def as_ranges(layers: Iterable[int]) -> str:
    """Layers as ranges: ``0-2,4``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def layers_phrase(layers: Iterable[int], spec: ModelSpec) -> str:
    """Layers as words where they are all of one kind (``all DSA``), else as ranges."""
    chosen = frozenset(layers)
    every = range(spec.num_hidden_layers)
    for words, kind in (
        ("all", frozenset(every)),
        ("all KDA", frozenset(i for i in every if spec.is_kda(i))),
        ("all DSA", frozenset(i for i in every if not spec.is_kda(i))),
        ("all dense", frozenset(i for i in every if not spec.is_moe(i))),
        ("all MoE", frozenset(i for i in every if spec.is_moe(i))),
    ):
        if chosen == kind:
            return words
    return as_ranges(chosen)


def as_json_object(resolution: Resolution, spec: ModelSpec, source: str) -> dict[str, Any]:
    """The report for programs: one object, plain JSON types."""
    selection = resolution.selection
    base = base_parameters(spec)
    return {
        "model": selection.model,
        "source": source,
        "num_sites": selection.num_sites,
        "trainable_parameters": selection.trainable_parameters,
        "base_parameters": base,
        "share_of_base": selection.trainable_parameters / base,
        "bytes_bf16": selection.trainable_parameters * BF16_BYTES,
        "rank": selection.rank,
        "alpha": selection.alpha,
        "scaling": selection.adapters[0].scaling,
        "dropout": selection.dropout,
        "num_layers": spec.num_hidden_layers,
        "layers": sorted({a.site.layer for a in selection.adapters}),
        "selection_hash": selection.hash,
        "facts_hash": selection.facts,
        "items": [
            {"option": i.option, "item": i.item, "matched": i.matched, "effective": i.effective}
            for i in resolution.items
        ],
        "projections": [_projection_object(p) for p in projections(selection)],
        "sites": [_site_object(a) for a in selection.adapters],
        "warnings": list(resolution.warnings),
    }


def _projection_object(projection: Projection) -> dict[str, Any]:
    return {
        "projection": projection.leaf,
        "group": projection.group,
        "layers": list(projection.layers),
        "count": len(projection.layers),
        "shape": list(projection.shape),
        "rank": projection.rank,
        "parameters": projection.parameters,
        "bytes_bf16": projection.bytes_bf16,
        "kind": projection.kind,
        "served": {
            step.value: {"possible": v.possible, "reason": v.reason}
            for step, v in projection.served.items()
        },
    }


def _site_object(adapter: SiteAdapter) -> dict[str, Any]:
    site = adapter.site
    return {
        "name": site.name,
        "disk_name": site.disk_name,
        "sglang_name": site.sglang_name,
        "sglang_part": site.sglang_part,
        "layer": site.layer,
        "group": site.group,
        "shape": list(site.shape),
        "kind": site.kind.value,
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "parameters": site.parameters(adapter.rank),
    }
