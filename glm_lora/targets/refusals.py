"""Why an item is refused: what it names instead, or which names are near.

Only called once a selection has failed, so it may look at everything that has a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from glm_lora.arch.foreign import NonTarget, non_targets
from glm_lora.arch.projections import LAYERS_PREFIX, SGLANG_LAYERS_PREFIX, Row, dense_sites
from glm_lora.arch.spec import FULL, ModelSpec
from glm_lora.errors import TargetError, did_you_mean, nearest
from glm_lora.targets.groups import GROUP_NAMES, fixing_exclude
from glm_lora.targets.matching import Hits, cells, glob_matches, is_glob, match

LIST_THEM = "List them: glm-lora targets --list"


def unmatched(item: str, option: str, spec: ModelSpec, model: str) -> TargetError:
    """The error for an ``item`` that names no projection of ``spec``."""
    what = f"{option} {item!r}"
    if others := _non_targets_named(item, spec):
        names = ", ".join(list(others)[:2]) + (", ..." if len(others) > 2 else "")
        return TargetError(
            f"{what} names no target of LoRA but {names}: "
            + "; ".join(dict.fromkeys(others.values())),
            "linear projections of the text layers",
            LIST_THEM,
        )
    if is_glob(item) and (hits := match("*." + item, spec)):
        if not trainable_part(hits, spec):
            return only_frozen(f"{what} (as '*.{item}')", hits, spec)
        return TargetError(
            f"{what} matches no full name of {model}",
            "a glob over full names",
            f"Did you mean '*.{item}'?",
        )
    if parts := _fused_parts(item):
        return TargetError(
            f"{what} is a fused module of the engine, no projection of its own",
            "its parts: " + ",".join(parts),
        )
    if hits := match(item, FULL) or (is_glob(item) and match("*." + item, FULL)):
        last = spec.num_hidden_layers - 1
        return TargetError(
            f"{what} matches no projection of {model}",
            f"names of this model (layers 0 to {last})",
            f"It names {hits.count} in GLM-5.3-Flash",
        )
    hint = _suggestion(item, spec)
    return TargetError(
        f"{what} matches no projection of {model}",
        "a group (" + ", ".join(GROUP_NAMES) + "), a leaf name or a glob over full names",
        f"{hint} {LIST_THEM}".strip(),
    )


def known_somewhere(item: str, spec: ModelSpec) -> bool:
    """Whether ``item`` names anything in ``spec`` or in the full model, targets or not."""
    return any(
        match(item, s) or any(name_of(item, other) for other in non_targets(s))
        for s in (spec, FULL)
    )


def only_frozen(what: str, hits: Hits, spec: ModelSpec) -> TargetError:
    """The error for an item that names nothing but frozen projections: it can never be trained."""
    return TargetError(
        f"{what} names frozen projections only: {_told(hits, spec)}",
        "trainable projections",
        f"Leave it out. {LIST_THEM}",
    )


def refused(what: str, hits: Hits, spec: ModelSpec, excludes: Iterable[str]) -> TargetError:
    """The error for frozen projections left in a selection, with the excludes that fix it."""
    fixes = [fixing_exclude(row) for row in frozen_reasons(hits, spec)]
    value = ",".join(dict.fromkeys([*excludes, *fixes]))
    return TargetError(
        f"{what} selects frozen projections: {_told(hits, spec)}",
        "trainable projections only",
        f'Take them out: --exclude-modules "{value}"',
    )


def _told(hits: Hits, spec: ModelSpec) -> str:
    return "; ".join(
        f"{example}" + (f" and {count - 1} more" if count > 1 else "") + f": {row.reason}"
        for row, (count, example) in frozen_reasons(hits, spec).items()
    )


def frozen_reasons(hits: Hits, spec: ModelSpec) -> dict[Row, tuple[int, str]]:
    """For each kind of frozen projection in ``hits``: how many there are, and the first name."""
    table = cells(spec)
    kinds: dict[str, tuple[Row, int, str]] = {}
    for position, mask in hits.masks.items():
        cell = table[position]
        if not cell.trainable:
            row, count, example = kinds.get(cell.row.reason, (cell.row, 0, cell.member_name(mask)))
            kinds[cell.row.reason] = (row, count + mask.bit_count(), example)
    return {row: (count, example) for row, count, example in kinds.values()}


def trainable_part(hits: Hits, spec: ModelSpec) -> Hits:
    """The trainable projections of ``hits``."""
    table = cells(spec)
    return Hits({p: m for p, m in hits.masks.items() if table[p].trainable})


def name_of(item: str, other: NonTarget) -> str:
    """The name by which ``item`` means ``other``, or the empty string."""
    if is_glob(item):
        return next((name for name in other.names if glob_matches(name, item)), "")
    return next((name for name in other.names if name.rsplit(".", 1)[-1] == item), "")


def _non_targets_named(item: str, spec: ModelSpec) -> dict[str, str]:
    """Names and reasons; of the first part of the model (text, vision, MTP) that has any."""
    patterns = [item]
    if is_glob(item) and not match("*." + item, spec):
        patterns.append("*." + item)
    for pattern in patterns:
        found = [(n, other) for other in non_targets(spec) if (n := name_of(pattern, other))]
        if found:
            part = found[0][1].part
            return {name: other.reason for name, other in found if other.part == part}
    return {}


def _fused_parts(item: str) -> list[str]:
    leaf = item.rsplit(".", 1)[-1]
    return list(
        dict.fromkeys(
            s.leaf
            for s in dense_sites(FULL)
            if s.sglang_part and s.sglang_name.rsplit(".", 1)[-1] == leaf
        )
    )


def _suggestion(item: str, spec: ModelSpec) -> str:
    leaves = sorted({c.row.leaf for c in cells(spec)})
    if not is_glob(item):
        return did_you_mean(item, [*GROUP_NAMES, *leaves])
    near = next((c for c in _near_globs(item, spec) if c != item and match(c, spec)), "")
    return f"Did you mean '{near}'?" if near else ""


def _near_globs(item: str, spec: ModelSpec) -> Iterator[str]:
    """The item as a module name in one of the two spellings, then with words mended."""
    module = item.removeprefix("base_model.model.").removesuffix(".weight")
    if module.startswith(SGLANG_LAYERS_PREFIX):
        module = LAYERS_PREFIX + module.removeprefix(SGLANG_LAYERS_PREFIX)
    mended = _mend(module, _words(spec))
    yield from (module, mended, f"*.{mended}")


def _words(spec: ModelSpec) -> frozenset[str]:
    names = (name for s in dense_sites(spec) for name in (s.name, s.disk_name))
    words = {word for name in names for word in name.removeprefix(LAYERS_PREFIX).split(".")}
    return frozenset(words) | set(LAYERS_PREFIX.strip(".").split(".")) | {"experts"}


def _mend(pattern: str, words: Iterable[str]) -> str:
    """The pattern with each misspelt plain component replaced by the nearest known one."""
    known = set(words)
    mended: list[str] = []
    for part in pattern.split("."):
        near = nearest(part, known, 1)
        plain = part.isidentifier()
        mended.append(near[0] if plain and part not in known and near else part)
    return ".".join(mended)
