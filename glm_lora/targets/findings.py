"""What a user should know about a selection that is valid: what it does not adapt.

A hybrid model makes half-selections easy: KDA and DSA layers share only ``o_proj``, so a list of
names written for softmax attention leaves most of one kind alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from glm_lora.arch.projections import DSA_ROWS, KDA_ROWS, Row, Status
from glm_lora.arch.spec import ModelSpec
from glm_lora.targets.selection import Selection
from glm_lora.targets.support import missing_parts

_ATTENTION: dict[str, tuple[Row, ...]] = {"KDA": KDA_ROWS, "DSA": DSA_ROWS}
_LOW_RANK_PAIRS = (("f_a_proj", "f_b_proj"), ("g_a_proj", "g_b_proj"))


def find_warnings(
    selection: Selection, spec: ModelSpec, includes: Sequence[str], layers: frozenset[int]
) -> Iterator[str]:
    """The warnings about ``selection``, most important first.

    Args:
        selection: A valid selection.
        spec: Its model.
        includes: The items it was made from.
        layers: The layers it was narrowed to.
    """
    yield from _uneven_attention(selection, spec, includes, layers)
    yield from _few_layers(selection, spec)
    yield from _half_pairs(selection)
    yield from _half_fused(selection)
    yield from _unequal_ranks(selection)


def _uneven_attention(
    selection: Selection, spec: ModelSpec, includes: Sequence[str], layers: frozenset[int]
) -> Iterator[str]:
    chosen = {kind: _attention_leaves(selection, kind) for kind in _ATTENTION}
    for kind, other in (("KDA", "DSA"), ("DSA", "KDA")):
        own_layers = [i for i in layers if spec.is_kda(i) is (kind == "KDA")]
        by_name = kind.lower() in includes or other.lower() in includes
        if not own_layers or by_name or not chosen[other]:
            continue
        own = [row.leaf for row in _ATTENTION[kind] if row.status is Status.TRAINABLE]
        if len(chosen[kind]) == len(own) or len(chosen[kind]) >= len(chosen[other]):
            continue
        got = "only " + ", ".join(chosen[kind]) if chosen[kind] else "no attention adapter"
        missing = [leaf for leaf in own if leaf not in chosen[kind]]
        count = len(own_layers)
        who = f"the {count} {kind} layers get" if count > 1 else f"the {kind} layer gets"
        yield f"{who} {got}: left out are {', '.join(missing)}"


def _attention_leaves(selection: Selection, kind: str) -> list[str]:
    group = kind.lower()
    return list(dict.fromkeys(a.site.leaf for a in selection.adapters if a.site.group == group))


def _few_layers(selection: Selection, spec: ModelSpec) -> Iterator[str]:
    covered = {a.site.layer for a in selection.adapters}
    if 2 * len(covered) < spec.num_hidden_layers:
        yield f"only {len(covered)} of {spec.num_hidden_layers} layers have an adapter"


def _half_pairs(selection: Selection) -> Iterator[str]:
    where: dict[str, set[int]] = {}
    for adapter in selection.adapters:
        where.setdefault(adapter.site.leaf, set()).add(adapter.site.layer)
    for first, second in _LOW_RANK_PAIRS:
        for one, other in ((first, second), (second, first)):
            alone = where.get(one, set()) - where.get(other, set())
            if alone:
                layers = "1 layer" if len(alone) == 1 else f"{len(alone)} layers"
                yield f"{one} is adapted without {other} in {layers}"


def _half_fused(selection: Selection) -> Iterator[str]:
    for (_, leaf), missing in missing_parts(selection).items():
        if missing:
            yield f"SGLang can serve {leaf} only together with {', '.join(missing)}"


def _unequal_ranks(selection: Selection) -> Iterator[str]:
    ranks = sorted({a.rank for a in selection.adapters})
    if len(ranks) > 1:
        listed = ", ".join(map(str, ranks))
        yield (
            f"ranks {listed}: engines know one rank, so adapters leave the trainer "
            f"padded with zeros to rank {selection.rank} with alpha {selection.alpha:g}; "
            f"alpha/rank stays {selection.adapters[0].scaling:g}"
        )
