"""Layer ranges such as ``0-11,44``."""

from __future__ import annotations

import re

from glm_lora.arch.foreign import MTP_LAYER
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import TargetError

_RANGE = re.compile(r"([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?")


def parse_layers(text: str, spec: ModelSpec) -> frozenset[int]:
    """The layers that ``text`` names; the empty string means all.

    Raises:
        TargetError: Not a list of numbers and ranges, a range backwards, or a layer the model
            does not have.
    """
    count = spec.num_hidden_layers
    if not text:
        return frozenset(range(count))
    chosen: set[int] = set()
    for part in filter(None, (part.strip(" \t") for part in text.split(","))):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise TargetError(f"--layers has {part[:40]!r}", "numbers and ranges such as 0-11,44")
        first = int(found[1])
        last = int(found[2] or first)
        if last < first:
            raise TargetError(f"--layers has {part!r}", "ranges from low to high")
        if last >= count:
            mtp = f" ({MTP_LAYER} on disk is the MTP layer)" if last == count == MTP_LAYER else ""
            raise TargetError(f"--layers has {part!r}", f"layers 0 to {count - 1}{mtp}")
        chosen.update(range(first, last + 1))
    if not chosen:
        raise TargetError(f"--layers {text!r} names nothing", "numbers and ranges such as 0-11,44")
    return frozenset(chosen)
