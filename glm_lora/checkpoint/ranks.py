"""Several processes that prepare one model together: torchrun's ranks, or one process alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

_PATIENCE = timedelta(days=1)
"""Ranks wait for the first one while it downloads."""


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Rank and number of ranks; joins torchrun's group for the block when its variables are set.

    A group that is up already is used and left as it is.
    """
    if dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def wait() -> None:
    """Wait for all ranks; nothing when there is only this process."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def first_then_all(work: Callable[[], object] | None) -> None:
    """Run ``work`` (if there is any) on the first rank while the others wait for it.

    Every rank must call this the same number of times: what is to be done is decided by the first.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and work is not None:
        work()
    wait()
