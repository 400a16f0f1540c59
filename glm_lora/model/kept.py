"""What a layer keeps although it is run again in the backward pass.

Masked attention over many keys costs much to repeat and little to keep: its result is as wide as
the queries alone. The same holds for what the indexer chose. torch's selective checkpointing keeps
the results of single operators, but looks at every operator of the layer, which a short step feels;
here its two modes are switched on around the attention alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_aten = torch.ops.aten
_ATTENTION = [
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
# The backward pass of CUDA runs in a thread of its own.
_here = threading.local()


@dataclass(frozen=True)
class _Pass:
    """One of the two passes over a layer."""

    mode: AbstractContextManager[Any]
    """Stores or returns the results of attention operators."""
    values: list[Tensor]
    """Other results, in the order in which they were made."""
    repeats: bool


def first_pass_and_repeat() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

    What ``keeping`` and ``kept`` enclose is stored in the first pass and taken from there when it
    is repeated, in the same order, once.
    """
    store, take = create_selective_checkpoint_contexts(_ATTENTION)
    values: list[Tensor] = []
    return _within(_Pass(store, values, False)), _within(_Pass(take, values, True))


def keeping() -> AbstractContextManager[Any]:
    """Around an attention whose result is kept by an enclosing checkpoint, if there is one."""
    current = _current()
    return nullcontext() if current is None else current.mode


def kept(make: Callable[[], Tensor]) -> Tensor:
    """``make()``, which needs no gradient, or its result of the first pass."""
    current = _current()
    if current is None:
        return make()
    if not current.repeats:
        current.values.append(make())
        return current.values[-1]
    return current.values.pop(0)


def _current() -> _Pass | None:
    return getattr(_here, "current", None)


@contextmanager
def _within(which: _Pass) -> Iterator[None]:
    before = _current()
    _here.current = which
    try:
        yield
    finally:
        _here.current = before
