"""What a layer keeps although it is run again in the backward pass.

Masked attention over many keys is the one part that costs much to repeat and little to keep: its
result is as wide as the queries alone, and the keys do not enter. torch's selective checkpointing
does this for single operators, but looks at every operator of the layer, which a short step feels;
here its two modes are switched on around the attention alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_aten = torch.ops.aten
_KEPT = [
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
# The backward pass of CUDA runs in a thread of its own.
_here = threading.local()


def first_pass_and_repeat() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

    What ``keeping`` encloses is stored in the first pass and taken from there when it is repeated,
    in the same order, once.
    """
    store, take = create_selective_checkpoint_contexts(_KEPT)
    return _set(store), _set(take)


def keeping() -> AbstractContextManager[Any]:
    """Around an attention whose result is kept by an enclosing checkpoint, if there is one."""
    return getattr(_here, "mode", None) or nullcontext()


@contextmanager
def _set(mode: AbstractContextManager[Any]) -> Iterator[None]:
    before = getattr(_here, "mode", None)
    _here.mode = mode
    try:
        yield
    finally:
        _here.mode = before
