"""From a ``SelectionConfig`` to one frozen ``Selection``, or to an error that says why not.

The order: every include must name projections of this model; ``--layers`` narrows their union;
every exclude takes its matches out; what is left must be trainable and not empty. The result does
not depend on the order of the items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from glm_lora.arch.projections import Site
from glm_lora.arch.spec import ModelSpec
from glm_lora.config import SelectionConfig
from glm_lora.errors import TargetError
from glm_lora.targets.findings import find_warnings
from glm_lora.targets.layers import parse_layers
from glm_lora.targets.matching import NO_HITS, Hits, cells, match, split_items
from glm_lora.targets.refusals import (
    frozen_reasons,
    known_somewhere,
    only_frozen,
    refused,
    trainable_part,
    unmatched,
)
from glm_lora.targets.selection import Selection, make_selection

INCLUDE = "--target-modules"
EXCLUDE = "--exclude-modules"
RANKS = "[rank]"


@dataclass(frozen=True)
class ItemCount:
    """What one item of an option did."""

    option: str
    item: str
    matched: int
    """Projections of this model that the item names, frozen ones included."""
    effective: int
    """Includes: those in the final selection. Excludes: those it took out of the includes."""


@dataclass(frozen=True)
class Resolution:
    """A selection and everything a user should know about it."""

    selection: Selection
    items: tuple[ItemCount, ...]
    layers: frozenset[int]
    """The layers it was narrowed to (all, when it was not)."""
    warnings: tuple[str, ...] = ()


def resolve(spec: ModelSpec, model_name: str, config: SelectionConfig) -> Resolution:
    """Resolve the patterns of ``config`` against the model ``spec``.

    Args:
        spec: The model's dimensions.
        model_name: What the model is called in the selection and in messages.
        config: Patterns, layers, rank, alpha and dropout.

    Raises:
        TargetError: An item that names nothing or nothing trainable, frozen projections left after
            the excludes, an empty result, layers out of range, or ranks that contradict.
    """
    includes = {
        item: _include(item, spec, model_name)
        for item in split_items(config.target_modules, INCLUDE)
    }
    excludes = {
        item: _exclude(item, spec, model_name)
        for item in (split_items(config.exclude_modules, EXCLUDE) if config.exclude_modules else ())
    }
    layers = parse_layers(config.layers, spec)
    wanted = _in_layers(_union(includes), layers, spec)
    left = wanted - _union(excludes)
    _refuse_bad_result(left, wanted, config, spec, excludes)
    sites = _sites(left, spec)
    selection = make_selection(
        model_name,
        spec,
        sites,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        ranks=_ranks(config.ranks, left, spec, model_name),
    )
    _refuse_above_full_rank(selection)
    items = (
        *(ItemCount(INCLUDE, i, h.count, (h & left).count) for i, h in includes.items()),
        *(ItemCount(EXCLUDE, i, h.count, (h & wanted).count) for i, h in excludes.items()),
    )
    warnings = [
        *find_warnings(selection, spec, tuple(includes), layers),
        *_item_warnings(includes, excludes, wanted, left, config),
    ]
    return Resolution(selection, items, layers, tuple(warnings))


def _refuse_above_full_rank(selection: Selection) -> None:
    full = max(min(a.site.shape) for a in selection.adapters)
    if selection.rank > full:
        raise TargetError(
            f"rank {selection.rank} of the adapter",
            f"at most {full}, the full rank of the largest selected projection",
            "An adapter of full rank can express every change of a projection already",
        )


def _include(item: str, spec: ModelSpec, model: str) -> Hits:
    hits = match(item, spec)
    if not hits:
        raise unmatched(item, INCLUDE, spec, model)
    if not trainable_part(hits, spec):
        raise only_frozen(f"{INCLUDE} {item!r}", hits, spec)
    return hits


def _exclude(item: str, spec: ModelSpec, model: str) -> Hits:
    hits = match(item, spec)
    if not hits and not known_somewhere(item, spec):
        raise unmatched(item, EXCLUDE, spec, model)
    return hits


def _union(items: Mapping[str, Hits]) -> Hits:
    total = NO_HITS
    for hits in items.values():
        total = total | hits
    return total


def _in_layers(hits: Hits, layers: frozenset[int], spec: ModelSpec) -> Hits:
    table = cells(spec)
    return Hits({p: m for p, m in hits.masks.items() if table[p].layer in layers})


def _refuse_bad_result(
    left: Hits, wanted: Hits, config: SelectionConfig, spec: ModelSpec, excludes: Iterable[str]
) -> None:
    if not wanted:
        raise TargetError(
            f"{INCLUDE} {config.target_modules!r} selects nothing in layers {config.layers}",
            "at least one trainable projection",
        )
    if frozen_reasons(left, spec):
        raise refused(f"{INCLUDE} {config.target_modules!r}", left, spec, excludes)
    if not left:
        raise TargetError(
            f"{EXCLUDE} {config.exclude_modules!r} takes out all that "
            f"{INCLUDE} {config.target_modules!r} selects",
            "at least one trainable projection left",
        )


def _sites(hits: Hits, spec: ModelSpec) -> list[Site]:
    table = cells(spec)
    return [site for p in sorted(hits.masks) if (site := table[p].site) is not None]


def _ranks(ranks: Mapping[str, int], left: Hits, spec: ModelSpec, model: str) -> dict[str, int]:
    """Own rank by disk name; two items that give one site different ranks contradict."""
    chosen: dict[str, tuple[int, str]] = {}
    for text, rank in ranks.items():
        items = split_items(text, RANKS)
        if len(items) != 1 or rank < 1:
            raise TargetError(
                f"{RANKS} {text!r} = {rank}",
                "one group, leaf name or glob, and a rank of 1 or more",
            )
        hits = match(items[0], spec)
        if not hits:
            raise unmatched(items[0], RANKS, spec, model)
        if not hits & left:
            raise TargetError(
                f"{RANKS} {items[0]!r} names no selected projection", "projections of the selection"
            )
        for site in _sites(hits & left, spec):
            other, other_text = chosen.setdefault(site.disk_name, (rank, text))
            if other != rank:
                raise TargetError(
                    f"{RANKS} gives {site.disk_name} two ranks: "
                    f"{other} by {other_text!r}, {rank} by {text!r}",
                    "patterns that do not overlap, or agree",
                )
    return {name: rank for name, (rank, _) in chosen.items()}


def _item_warnings(
    includes: Mapping[str, Hits],
    excludes: Mapping[str, Hits],
    wanted: Hits,
    left: Hits,
    config: SelectionConfig,
) -> Sequence[str]:
    found: list[str] = []
    for item, hits in includes.items():
        if not hits & wanted:
            found.append(f"{INCLUDE} {item!r} selects nothing in layers {config.layers}")
        elif not hits & left:
            found.append(f"all that {INCLUDE} {item!r} selects is taken out by {EXCLUDE}")
    for item, hits in excludes.items():
        if not hits & wanted:
            found.append(f"{EXCLUDE} {item!r} removes nothing from this selection")
    return found
