"""From an item of ``--target-modules`` to the projections it names.

An item is a group, a leaf name (whole leaves only) or a glob over full names in either spelling.
Globs mean what ``fnmatch2.fnmatchcase2`` says; names hold no ``/``, so ``*`` crosses dots.

A layer's routed experts are matched once per layer and leaf where the pattern cannot tell one
expert from another. The argument: take a pattern made of literals and ``*``. If no literal digit
can lie on the expert's number in the name, a ``*`` covers that number in every match, and a ``*``
covers any other number as well. A digit run of the pattern with literal text on both sides can lie
on the number only when that text continues as the name does, and then it is the whole number; so
the numbers written in such runs are tried one by one, and one more stands for all the others.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

from fnmatch2 import fnmatchcase2  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from glm_lora.arch.projections import (
    LAYERS_PREFIX,
    Row,
    Site,
    Status,
    dense_sites,
    layer_rows,
)
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import TargetError
from glm_lora.targets.groups import GROUP_NAMES, in_group

glob_matches = cast("Callable[[str, str], bool]", fnmatchcase2)
"""``glob_matches(name, pattern)``: what a glob means, everywhere."""

MAX_ITEM_LENGTH = 256
"""Longer than any name in the model; a longer item is a mistake (a file's content, a loop)."""

_WILDCARDS = frozenset("*?[")
_NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.\-]")


def split_items(text: str, option: str) -> tuple[str, ...]:
    """The items of a comma-separated option, checked, without repetitions.

    Blanks around items do not count; case does.

    Args:
        text: The option's value; several values joined by commas.
        option: The option's name, for the messages.

    Raises:
        TargetError: No item at all, or an item that can name nothing.
    """
    items = [part.strip(" \t") for part in text.split(",")]
    items = [item for item in items if item]
    if not items:
        raise TargetError(
            f"{option} {text!r} names nothing",
            "groups (" + ", ".join(GROUP_NAMES) + "), leaf names or globs, separated by commas",
        )
    for item in items:
        _check_item(item, option)
    return tuple(dict.fromkeys(items))


def _check_item(item: str, option: str) -> None:
    if len(item) > MAX_ITEM_LENGTH:
        raise TargetError(
            f"an item of {option} has {len(item)} characters ({item[:40]!r}...)",
            f"at most {MAX_ITEM_LENGTH}",
        )
    for character in item:
        _check_character(character, item, option)
    _check_brackets(item, option)


def _check_character(character: str, item: str, option: str) -> None:
    if _NAME_CHARACTERS.match(character) or character in "*?[]!":
        return
    if not character.isascii():
        name = unicodedata.name(character, "unnamed")
        raise TargetError(
            f"item {item!r} of {option} has the character {character!a} ({name})",
            "ASCII: the names have no other letters, however alike they look",
        )
    if character.isspace() or not character.isprintable():
        raise TargetError(
            f"item {item!r} of {option} has {character!r} inside",
            "no blanks or control characters in a name",
            "Separate items with commas",
        )
    raise TargetError(
        f"item {item!r} of {option} has the character {character!r}",
        "dotted module names, where * ? [..] are the only wildcards (not regular expressions)",
    )


def _check_brackets(item: str, option: str) -> None:
    position = 0
    while position < len(item):
        if item[position] == "]":
            break
        if item[position] == "[":
            # As in fnmatch, a ']' directly after '[' or '[!' is a member and does not close.
            first = position + (2 if item[position + 1 : position + 2] == "!" else 1)
            closing = item.find("]", first + 1)
            if closing < 0:
                break
            position = closing
        position += 1
    else:
        return
    raise TargetError(
        f"item {item!r} of {option} has unbalanced brackets",
        "[abc] or [!abc] with both brackets (a comma always separates items)",
    )


def is_glob(item: str) -> bool:
    """Whether ``item`` is matched against full names (else it is a group or a leaf name)."""
    return "." in item or not _WILDCARDS.isdisjoint(item)


class Cell(NamedTuple):
    """What is matched at once: one projection, or one projection of all routed experts."""

    layer: int
    row: Row
    size: int
    """1, or the number of routed experts."""
    names: tuple[str, ...]
    """Full names in both spellings; for experts the text before and after the expert's number."""
    site: Site | None
    """The site; None for experts."""

    @property
    def full(self) -> int:
        """The mask that selects every member."""
        return (1 << self.size) - 1

    @property
    def trainable(self) -> bool:
        """Whether LoRA may adapt it."""
        return self.row.status is Status.TRAINABLE

    def member_name(self, mask: int) -> str:
        """Disk name of the first member in ``mask``."""
        if self.site is not None:
            return self.site.disk_name
        before, after = self.names
        return f"{before}{(mask & -mask).bit_length() - 1}{after}"


@lru_cache(maxsize=8)
def cells(spec: ModelSpec) -> tuple[Cell, ...]:
    """Every linear projection of ``spec`` in model order, routed experts folded."""
    sites = {s.disk_name: s for s in dense_sites(spec)}
    table: list[Cell] = []
    for layer in range(spec.num_hidden_layers):
        for row in layer_rows(spec, layer):
            path = f"{LAYERS_PREFIX}{layer}.{row.path}"
            if row.expert:
                parts = (path.removesuffix(row.leaf), "." + row.leaf)
                table.append(Cell(layer, row, spec.n_routed_experts, parts, None))
            elif row.status is not Status.NOT_A_TARGET:
                site = sites[path]
                names = tuple(dict.fromkeys((site.name, site.disk_name)))
                table.append(Cell(layer, row, 1, names, site))
    return tuple(table)


@dataclass(frozen=True)
class Hits:
    """Which members of which cells are meant: cell position to a mask of its members."""

    masks: Mapping[int, int]

    def __or__(self, other: Hits) -> Hits:
        masks = dict(self.masks)
        for position, mask in other.masks.items():
            masks[position] = masks.get(position, 0) | mask
        return Hits(masks)

    def __and__(self, other: Hits) -> Hits:
        both = ((p, m & other.masks.get(p, 0)) for p, m in self.masks.items())
        return Hits({p: m for p, m in both if m})

    def __sub__(self, other: Hits) -> Hits:
        rest = ((p, m & ~other.masks.get(p, 0)) for p, m in self.masks.items())
        return Hits({p: m for p, m in rest if m})

    def __bool__(self) -> bool:
        return bool(self.masks)

    @property
    def count(self) -> int:
        """Number of projections."""
        return sum(mask.bit_count() for mask in self.masks.values())


NO_HITS = Hits({})


def match(item: str, spec: ModelSpec) -> Hits:
    """The projections of ``spec`` that ``item`` names, frozen ones included; maybe none."""
    table = cells(spec)
    if item in GROUP_NAMES:
        chosen = (p for p, c in enumerate(table) if in_group(c.row.group, c.row.status, item))
        return Hits({p: table[p].full for p in chosen})
    if not is_glob(item):
        return Hits({p: c.full for p, c in enumerate(table) if c.row.leaf == item})
    found = ((p, _match_cell(item, c)) for p, c in enumerate(table))
    return Hits({p: mask for p, mask in found if mask})


def names_site(item: str, site: Site) -> bool:
    """Whether ``item`` names this one projection: what ``match`` means, for a single site."""
    if item in GROUP_NAMES:
        return in_group(site.group, site.status, item)
    if not is_glob(item):
        return site.leaf == item
    return glob_matches(site.name, item) or glob_matches(site.disk_name, item)


def _match_cell(pattern: str, cell: Cell) -> int:
    if cell.site is not None:
        return int(any(glob_matches(name, pattern) for name in cell.names))
    before, after = cell.names
    if any(text not in before and text not in after for text in _plain_texts(pattern)):
        return 0
    told_apart = _numbers_told_apart(pattern, before, after)
    if told_apart is None:
        numbers, others = range(cell.size), None
    else:
        numbers = sorted(n for n in told_apart if n < cell.size)
        others = next((n for n in range(cell.size) if n not in told_apart), None)
    mask = 0
    if others is not None and glob_matches(f"{before}{others}{after}", pattern):
        mask = cell.full
    for number in numbers:
        bit = 1 << number
        mask &= ~bit
        if glob_matches(f"{before}{number}{after}", pattern):
            mask |= bit
    return mask


def _numbers_told_apart(pattern: str, before: str, after: str) -> frozenset[int] | None:
    """Expert numbers the pattern may treat in their own way; None when that may be all of them."""
    if "?" in pattern or "[" in pattern:
        return None
    numbers: set[int] = set()
    for left, digits, right in _digit_runs(pattern):
        if (left and not before.endswith(left)) or (right and not after.startswith(right)):
            continue
        if not left or not right:
            return None
        if str(int(digits)) == digits:
            numbers.add(int(digits))
    return frozenset(numbers)


@lru_cache(maxsize=64)
def _plain_texts(pattern: str) -> tuple[str, ...]:
    """Literal pieces without digits: none can lie on an expert's number, or reach across it."""
    pieces = re.split(r"\*|\?|\[!?\]?[^\]]*\]", pattern)
    return tuple(p for p in pieces if p and not any("0" <= c <= "9" for c in p))


@lru_cache(maxsize=64)
def _digit_runs(pattern: str) -> tuple[tuple[str, str, str], ...]:
    return tuple(_iter_digit_runs(pattern))


def _iter_digit_runs(pattern: str) -> Iterator[tuple[str, str, str]]:
    for literal in pattern.split("*"):
        for run in re.finditer(r"[0-9]+", literal):
            yield literal[: run.start()], run.group(), literal[run.end() :]
