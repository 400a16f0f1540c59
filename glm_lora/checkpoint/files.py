"""Writing files and folders so that a crash never leaves something that looks finished."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from glm_lora.errors import CheckpointError

PARTIAL = ".partial"
OLD = ".old"
"""Ends the name of a folder that is being replaced."""
NOTES_FILE = "glm_lora.json"
"""What we note in a Hugging Face folder: how far a download is, or how the folder was made."""


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a small file: whole or not at all, on disk when this returns.

    Raises:
        OSError: It cannot be written; it names ``path``, and nothing is left behind.
    """
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    with errors_name(path):
        try:
            with temporary.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                temporary.unlink()
            raise
        sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file; half a line that a crash or a full disk left there goes first.

    Raises:
        OSError: It cannot be written; it names ``path``.
    """
    with errors_name(path), path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")


def umask() -> int:
    """The permissions that new files of this process lack; it can only be read by setting it."""
    current = os.umask(0)
    os.umask(current)
    return current


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Let an OSError of the block name ``path``: that of a full disk names no file at all."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written."""

    bytes: int
    sha256: str


def digest_of(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def record_file(path: Path) -> FileRecord:
    """Length and SHA-256 of a file; reads it once (about 1.4 GB/s on one core)."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def check_file(path: Path, record: FileRecord, *, contents: bool = True) -> None:
    """Check that a file is still what it was when ``record`` was taken.

    Args:
        path: The file.
        record: From ``record_file``.
        contents: Compare the digest, too; else only the length.

    Raises:
        CheckpointError: It is missing, cannot be read, or is another.
    """
    expected = "the file as it was written"
    try:
        size = path.stat().st_size
        if size != record.bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes, not {record.bytes}", expected
            )
        if contents and record_file(path) != record:
            raise CheckpointError(
                f"{path} is damaged: its contents changed since it was written", expected
            )
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", expected) from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", expected) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(finished: Path, target: Path, old: Path | None = None) -> None:
    """Put ``finished`` where ``target`` is; an existing target is removed only after the swap.

    Of a link only the link is replaced: what it names may be on another disk (``built_folder``
    builds there).

    Args:
        finished: The folder.
        target: Its place.
        old: What an existing target is called meanwhile; something of that name is removed. None
            for ``target`` with ``.old``, where all names are ours.
    """
    old = old or target.with_name(f"{target.name}{OLD}")
    _remove(old)
    if os.path.lexists(target):
        target.rename(old)
    try:
        finished.rename(target)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(target):
            old.rename(target)
        raise
    sync_folder(target.parent)
    with suppress(OSError):
        _remove(old)


def _real(path: Path) -> Path:
    """What a path names in the end, there or not (``Path.resolve`` would raise for a loop)."""
    return Path(os.path.realpath(path))


def _remove(path: Path) -> None:
    """Remove a folder, or the link in its place; nothing when it is not there."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def new_partial(target: Path) -> Path:
    """An empty folder beside ``target`` to build it in; those of dead processes are removed.

    A process that died while it replaced ``target`` may have left it under another name only: it
    is put back.
    """
    for left in target.parent.glob(f"{glob.escape(target.name)}{PARTIAL}*"):
        owner = left.name.removeprefix(f"{target.name}{PARTIAL}").removesuffix(OLD)
        if owner.isdigit() and (int(owner) == os.getpid() or not Path(f"/proc/{owner}").exists()):
            with suppress(OSError):
                if left.name.endswith(OLD) and left.is_dir() and not os.path.lexists(target):
                    left.rename(target)
                else:
                    _remove(left)
    partial = target.with_name(f"{target.name}{PARTIAL}{os.getpid()}")
    partial.mkdir()
    return partial


@contextmanager
def built_folder(target: Path) -> Iterator[Path]:
    """A folder that takes the name and place of ``target`` when the block ends well.

    Where ``target`` is a link it stays one, and what it names is replaced (or made).
    """
    target = _real(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = new_partial(target)
    try:
        yield partial
        replace_folder(partial, target, partial.with_name(f"{partial.name}{OLD}"))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder so that no other process prepares into it at the same time.

    Raises:
        CheckpointError: Another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            f"another process is writing {folder}", "one prepare at a time", "Wait for it to end"
        ) from None
    except OSError:
        # The file system has no locks; the check is then left out.
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder that can be written to.

    Raises:
        CheckpointError: A file is in the way, or there is no permission.
    """
    try:
        # Resolved, so that what a link names is made where it does not exist yet.
        _real(folder).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(f"{folder} is a file", "a folder") from None
    except OSError as error:
        raise _write_error(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} is not writable", "a folder you may write to")


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn operating-system errors of the block into a CheckpointError that names ``folder``."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise _write_error(folder, error) from error


def _write_error(folder: Path, error: OSError) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(
            f"the disk of {folder} is full",
            "more free space",
            "Free some space and run the same command again; finished parts are kept",
        )
    return CheckpointError(f"{folder} cannot be written: {error}", "a folder you may write to")


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that holds ``folder`` (or its nearest existing parent)."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """``folder``, or its nearest parent that exists."""
    folder = _real(folder)
    while not folder.exists():
        folder = folder.parent
    return folder


def size_text(nbytes: int) -> str:
    """A number of bytes in a unit that shows something: ``1.3 MB``, ``57.0 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} bytes"


def check_space(folder: Path, nbytes: int, what: str, next_step: str = "") -> None:
    """Refuse to write more than fits.

    Raises:
        CheckpointError: The disk of ``folder`` has less than ``nbytes`` free.
    """
    free = free_bytes(folder)
    if nbytes > free:
        raise CheckpointError(
            f"{what} needs {size_text(nbytes)} and the disk of {folder} has {size_text(free)} free",
            "enough free space",
            next_step,
        )


def check_empty(folder: Path) -> None:
    """Refuse an output folder that holds anything.

    Raises:
        CheckpointError: It is a file, or not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty", "a new or empty folder")
