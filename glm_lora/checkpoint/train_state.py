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
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from glm_lora.checkpoint.files import (
    OLD,
    PARTIAL,
    FileRecord,
    check_file,
    digest_of,
    free_bytes,
    make_folder,
    record_file,
    replace_folder,
    write_atomic,
    write_errors,
)
from glm_lora.checkpoint.iterations import is_iteration, iteration_of, iterations, leftovers
from glm_lora.checkpoint.torch_dist import (
    load_tensors,
    save_state_tensors,
    save_tensors,
    sharded_tensor,
)
from glm_lora.errors import CheckpointError
from glm_lora.model.parallel import ParallelContext

T = TypeVar("T")
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

    def write() -> dict[str, FileRecord]:
        sharded = _sharded(tensors, ctx)
        if group is None:
            save_tensors(partial, sharded, {})
        else:
            save_state_tensors(partial, sharded, group)
        # Read back here, where each rank finds its own files in the machine's cache.
        return {p.name: record_file(p) for p in partial.glob(f"__{ctx.rank}_*.distcp")}

    def finish() -> None:
        rest = [path for path in partial.iterdir() if path.name not in records]
        records.update((path.name, record_file(path)) for path in rest)
        state = {
            "schema": SCHEMA,
            "extra": dict(extra),
            "extra_sha256": digest_of(json.dumps(dict(extra))),
            "files": {name: asdict(record) for name, record in sorted(records.items())},
        }
        write_atomic(partial / STATE_FILE, json.dumps(state))
        replace_folder(partial, folder)

    try:
        _together(folder.parent, begin if ctx.rank == 0 else None, ctx, group)
        written = _together(folder.parent, write, ctx, group)
        records = {name: record for each in written if each for name, record in each.items()}
        _together(folder.parent, finish if ctx.rank == 0 else None, ctx, group)
    except CheckpointError:
        if ctx.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _together(
    folder: Path, work: Callable[[], T] | None, ctx: ParallelContext, group: Any
) -> list[T | None]:
    """Do this rank's work and wait for the others; an error of any rank is raised on all.

    Returns:
        What every rank's work returned, in rank order.
    """
    result: T | None = None
    error: CheckpointError | None = None
    try:
        with write_errors(folder):
            if work is not None:
                try:
                    result = work()
                except CheckpointException as failures:  # torch's own, from every rank that failed
                    raise _cause(folder, failures) from None
    except CheckpointError as own:
        error = own
    outcomes: list[Any] = [(error, result)]
    if ctx.world_size > 1:
        outcomes = [None] * ctx.world_size
        dist.all_gather_object(outcomes, (error, result), group=group)
    for failed, _ in outcomes:
        if failed is not None:
            raise failed
    return [each for _, each in outcomes]


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

    def check() -> dict[str, Any]:
        state = _read_state(folder)
        # Every rank a share of the files: one machine's ranks read each only once.
        for name in sorted(state.files)[ctx.rank :: ctx.world_size]:
            check_file(folder / name, state.files[name])
        return state.extra

    try:
        extra = _together(folder, check, ctx, None)[ctx.rank]
        load_tensors(folder, _sharded(tensors, ctx))
    except CheckpointError as error:
        raise CheckpointError(error.what, error.expected, _way_out(folder)) from error
    assert extra is not None
    return extra


def _way_out(folder: Path) -> str:
    """What can be done when the checkpoint ``folder`` of a run cannot be loaded."""
    if not is_iteration(folder):
        return ""
    if not folder.exists():
        there = [each.name for each in iterations(folder.parent) if not damage(each)]
        return f"In {folder.parent} there is: {', '.join(there) or 'no checkpoint'}"
    for candidate in reversed(iterations(folder.parent)):
        if iteration_of(candidate) < iteration_of(folder) and not damage(candidate, contents=True):
            return (
                f"{candidate} is whole: move {folder.name} away, then --resume continues from it "
                "(and export takes it)"
            )
    return "no checkpoint before it is whole: start anew with --force, or in another --run-dir"


def damage(folder: Path, *, contents: bool = False) -> str:
    """What is wrong with the files of a checkpoint, or nothing when it is whole.

    Args:
        folder: The checkpoint.
        contents: Read every file and compare its digest, too; else lengths only.
    """
    try:
        for name, record in _read_state(folder).files.items():
            check_file(folder / name, record, contents=contents)
        stored = FileSystemReader(folder).read_metadata().storage_data
        ends: dict[str, int] = {}
        for piece in stored.values():
            end = piece.offset + piece.length
            ends[piece.relative_path] = max(end, ends.get(piece.relative_path, 0))
        short = [name for name, end in ends.items() if (folder / name).stat().st_size < end]
        return f"{folder / short[0]} is shorter than the index says" if short else ""
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except CheckpointError as error:
        return error.what
    except (OSError, EOFError, ValueError, AttributeError, UnpicklingError) as error:
        return f"{folder} cannot be read: {error!r}"


class _Object(dict[str, Any]):
    """A JSON object of a state file; a missing entry is an error of that file."""

    folder = Path()

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(
            f"{self.folder / STATE_FILE} has no {key!r}",
            "the file as the run wrote it",
            _way_out(self.folder),
        )


@dataclass(frozen=True)
class _State:
    extra: dict[str, Any]
    files: dict[str, FileRecord]
    """Length and digest of the other files; empty in a checkpoint written before they were."""


def read_extra(folder: Path) -> dict[str, Any]:
    """The small state of a checkpoint, without its tensors.

    Returns:
        What was given to ``save_train_state``; asking it for an entry that the file lacks is a
        CheckpointError.

    Raises:
        CheckpointError: There is no finished checkpoint in ``folder``.
    """
    return _read_state(folder).extra


def _read_state(folder: Path) -> _State:
    path = folder / STATE_FILE

    def entries(pairs: dict[str, Any]) -> _Object:
        result = _Object(pairs)
        result.folder = folder
        return result

    try:
        state = json.loads(path.read_text(encoding="utf-8"), object_hook=entries)
        schema, extra = state["schema"], state["extra"]
        files = {name: FileRecord(**each) for name, each in state.get("files", {}).items()}
    except FileNotFoundError:
        if not folder.exists():
            raise CheckpointError(f"{folder} does not exist", "a checkpoint") from None
        raise CheckpointError(
            f"{folder} holds no finished checkpoint ({STATE_FILE} is missing)",
            "a checkpoint that was written to its end",
        ) from None
    except (OSError, UnicodeDecodeError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error!r}") from error
    if schema != SCHEMA:
        raise CheckpointError(f"{path} has schema version {schema!r}", str(SCHEMA))
    if files and state.get("extra_sha256") != digest_of(json.dumps(extra)):
        raise CheckpointError(f"{path} is damaged: it is not as it was written", "its own digest")
    return _State(extra, files)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The finished checkpoint of a run with the highest iteration, or None.

    A crash between the two renames of a checkpoint that was being rewritten left it under its
    ``.old`` name; it is put back.
    """
    for old in leftovers(run_dir / "checkpoints"):
        if old.suffix == OLD and not old.with_suffix("").exists():
            old.rename(old.with_suffix(""))
    folders = [f for f in iterations(run_dir / "checkpoints") if _is_finished(f)]
    return folders[-1] if folders else None


def passed_over(run_dir: Path) -> list[str]:
    """Folders newer than ``latest_checkpoint`` that are no finished checkpoints, each with why."""
    latest = latest_checkpoint(run_dir)
    folders = iterations(run_dir / "checkpoints")
    newer = folders[folders.index(latest) + 1 :] if latest else folders
    return [f"{folder.name} is no finished checkpoint: {damage(folder)}" for folder in newer]


def _is_finished(folder: Path) -> bool:
    return (folder / STATE_FILE).exists() and (folder / ".metadata").exists()


def prune_checkpoints(run_dir: Path, keep: int, every: int = 0) -> None:
    """Remove all but the newest ``keep`` whole checkpoints, and what crashes left behind.

    A damaged one does not count, so that ``keep`` can be loaded; it goes with those of its age.
    Folders with other names are not the run's and stay (``iter_0000003.backup``).

    Args:
        run_dir: Run folder.
        keep: Newest checkpoints to keep, at least 1.
        every: Keep those whose iteration is a multiple of this, too; 0 keeps none.
    """
    folder = run_dir / "checkpoints"
    present = iterations(folder)
    oldest = _oldest_kept(present, keep)  # once: it reads the index of every checkpoint it counts
    older = [path for path in present if iteration_of(path) < oldest]
    older = [path for path in older if not every or iteration_of(path) % every]
    for path in [*older, *leftovers(folder)]:
        shutil.rmtree(path, ignore_errors=True)


def _oldest_kept(present: list[Path], keep: int) -> int:
    """The number of the ``keep``-th newest whole checkpoint, or of the oldest; 0 without any."""
    whole = (iteration_of(path) for path in reversed(present) if not damage(path))
    return min(islice(whole, keep), default=0)


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
