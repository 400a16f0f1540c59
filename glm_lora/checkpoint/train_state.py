"""Training state on disk: adapters, Adam moments and counters, whole or not at all.

One checkpoint is one torch_dist folder (``iter_0000012``): full tensors under serving keys, cut
over tensor-parallel ranks as they lie in memory, so that any topology reads it, and a small
``state.json``. It is written beside its final name and renamed when everything is on disk, so a
crash leaves the checkpoint before it valid and the newest finished one easy to find.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from glm_lora.checkpoint.files import (
    PARTIAL,
    free_bytes,
    make_folder,
    replace_folder,
    write_atomic,
    write_errors,
)
from glm_lora.checkpoint.torch_dist import (
    load_tensors,
    save_state_tensors,
    save_tensors,
    sharded_tensor,
)
from glm_lora.errors import CheckpointError
from glm_lora.model.parallel import ParallelContext

STATE_FILE = "state.json"
SCHEMA = 1
_FULL = 2**20
"""A disk with fewer free bytes counts as full."""


@dataclass(frozen=True)
class LocalTensor:
    """This rank's piece of one state tensor."""

    tensor: torch.Tensor
    tp_axis: int | None = None
    """The axis that tensor parallelism cuts; None when every rank holds the whole."""


def iteration_folder(run_dir: Path, iteration: int) -> Path:
    """Where the checkpoint of one iteration lies: ``<run>/checkpoints/iter_0000012``."""
    return run_dir / "checkpoints" / f"iter_{iteration:07d}"


def save_train_state(
    folder: Path,
    tensors: Mapping[str, LocalTensor],
    extra: Mapping[str, Any],
    ctx: ParallelContext | None = None,
    group: Any = None,
) -> None:
    """Write one checkpoint; every rank calls this with its own pieces.

    Args:
        folder: Final folder of the checkpoint; replaced when it is there already.
        tensors: This rank's pieces by key; a pipeline stage passes its own layers only.
        extra: What JSON can hold: counters, generator states, hashes. Rank 0's is written.
        ctx: This rank's place; None for a single process.
        group: A gloo group of all ranks for a save beside the training; None takes the default
            group.

    Raises:
        CheckpointError: The folder cannot be written or the disk is full. Every rank raises, so
            that a run may go on; what was written is removed.
    """
    ctx = ctx or ParallelContext()
    partial = folder.with_name(folder.name + PARTIAL)

    size = _size(tensors, ctx, group)

    def begin() -> None:
        make_folder(folder.parent)
        if free_bytes(folder.parent) < size + _FULL:
            # Known before: a disk filled to the brim would hurt all that writes to it.
            raise OSError(errno.ENOSPC, "No space left on device")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()

    def finish() -> None:
        state = {"schema": SCHEMA, "extra": dict(extra)}
        write_atomic(partial / STATE_FILE, json.dumps(state))
        replace_folder(partial, folder)

    def write() -> None:
        sharded = _sharded(tensors, ctx)
        if group is None:
            save_tensors(partial, sharded, {})
        else:
            save_state_tensors(partial, sharded, group)

    try:
        _together(folder.parent, begin if ctx.rank == 0 else None, ctx, group)
        _together(folder.parent, write, ctx, group)
        _together(folder.parent, finish if ctx.rank == 0 else None, ctx, group)
    except CheckpointError:
        if ctx.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _together(
    folder: Path, work: Callable[[], None] | None, ctx: ParallelContext, group: Any
) -> None:
    """Do this rank's work and wait for the others; an error of any rank is raised on all."""
    error: CheckpointError | None = None
    try:
        with write_errors(folder):
            if work is not None:
                try:
                    work()
                except CheckpointException as failures:  # torch's own, from every rank that failed
                    raise _cause(folder, failures) from None
    except CheckpointError as own:
        error = own
    errors = [error]
    if ctx.world_size > 1:
        errors = [None] * ctx.world_size
        dist.all_gather_object(errors, error, group=group)
    for each in errors:
        if each is not None:
            raise each


def _size(tensors: Mapping[str, LocalTensor], ctx: ParallelContext, group: Any) -> int:
    """Bytes of the whole state: every piece once."""
    mine = sum(
        local.tensor.nbytes
        for local in tensors.values()
        if ctx.dp_rank == 0 and (local.tp_axis is not None or ctx.tp_rank == 0)
    )
    sizes = [mine]
    if ctx.world_size > 1:
        sizes = [0] * ctx.world_size
        dist.all_gather_object(sizes, mine, group=group)
    return sum(sizes)


def _cause(folder: Path, failures: CheckpointException) -> OSError:
    causes = [failure[0] for failure in failures.failures.values()]
    for cause in causes:
        if isinstance(cause, OSError):
            return cause
    if free_bytes(folder) < _FULL:
        # torch's writer says only that a file is not as long as it should be.
        return OSError(errno.ENOSPC, "No space left on device")
    return OSError(f"{causes[0]!r}")


def load_train_state(
    folder: Path, tensors: Mapping[str, LocalTensor], ctx: ParallelContext | None = None
) -> dict[str, Any]:
    """Fill ``tensors`` in place from a checkpoint, at any topology; returns ``extra``.

    Args:
        folder: A finished checkpoint.
        tensors: This rank's pieces of every tensor that it needs; all must be there, equally large.
        ctx: This rank's place; None for a single process.

    Raises:
        CheckpointError: Missing, unfinished, damaged, or of another selection or rank; the next
            step names the newest whole checkpoint before it.
    """
    ctx = ctx or ParallelContext()
    try:
        extra = read_extra(folder)
        load_tensors(folder, _sharded(tensors, ctx))
    except CheckpointError as error:
        raise CheckpointError(error.what, error.expected, _way_out(folder)) from error
    return extra


def _way_out(folder: Path) -> str:
    """What can be done when the checkpoint ``folder`` of a run cannot be loaded."""
    if not _is_iteration(folder):
        return ""
    finished = sorted(filter(_is_iteration, folder.parent.glob("iter_*")), key=_number)
    for candidate in reversed(finished):
        if _number(candidate) < _number(folder) and _is_whole(candidate):
            return (
                f"{candidate} is whole: move {folder.name} away, then --resume continues from it "
                "(and export takes it)"
            )
    return "no checkpoint before it is whole: start anew with --force, or in another --run-dir"


def _is_whole(folder: Path) -> bool:
    """Whether a checkpoint's files are there and as long as its index says."""
    try:
        read_extra(folder)
        stored = FileSystemReader(folder).read_metadata().storage_data
        ends: dict[str, int] = {}
        for piece in stored.values():
            end = piece.offset + piece.length
            ends[piece.relative_path] = max(end, ends.get(piece.relative_path, 0))
        return all((folder / name).stat().st_size >= end for name, end in ends.items())
    except (CheckpointError, OSError, EOFError, ValueError, AttributeError, UnpicklingError):
        return False


def read_extra(folder: Path) -> dict[str, Any]:
    """The small state of a checkpoint, without its tensors.

    Raises:
        CheckpointError: There is no finished checkpoint in ``folder``.
    """
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        schema, extra = state["schema"], state["extra"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no finished checkpoint", f"a folder with {STATE_FILE}"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error!r}") from error
    if schema != SCHEMA:
        raise CheckpointError(f"{path} has schema version {schema!r}", str(SCHEMA))
    return extra


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The finished checkpoint of a run with the highest iteration, or None.

    A crash between the two renames of a checkpoint that was being rewritten left it under its
    ``.old`` name; it is put back.
    """
    for old in (run_dir / "checkpoints").glob("iter_*.old"):
        if not old.with_suffix("").exists():
            old.rename(old.with_suffix(""))
    finished = [path.parent for path in (run_dir / "checkpoints").glob(f"iter_*/{STATE_FILE}")]
    folders = [f for f in finished if _is_iteration(f) and (f / ".metadata").exists()]
    return max(folders, key=_number, default=None)


def _is_iteration(folder: Path) -> bool:
    return folder.name.startswith("iter_") and folder.name.removeprefix("iter_").isdigit()


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


def prune_checkpoints(run_dir: Path, keep: int, every: int = 0) -> None:
    """Remove all but the newest ``keep`` finished checkpoints, and what crashes left behind.

    Args:
        run_dir: Run folder.
        keep: Newest checkpoints to keep.
        every: Keep those whose iteration is a multiple of this, too; 0 keeps none.
    """
    folder = run_dir / "checkpoints"
    finished = sorted(filter(_is_iteration, folder.glob("iter_*")), key=_number)
    leftovers = [p for p in folder.glob("iter_*") if p not in finished]
    older = [path for path in finished[:-keep] if not every or _number(path) % every]
    for path in [*older, *leftovers]:
        shutil.rmtree(path, ignore_errors=True)


def _sharded(tensors: Mapping[str, LocalTensor], ctx: ParallelContext) -> dict[str, Any]:
    return {
        key: sharded_tensor(
            key,
            local.tensor,
            local.tp_axis,
            ctx.tp_rank,
            ctx.tp_size,
            (ctx.tp_rank if local.tp_axis is None else 0, ctx.dp_rank),
        )
        for key, local in tensors.items()
    }
