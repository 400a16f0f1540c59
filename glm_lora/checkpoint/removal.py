"""Removing what a run wrote: all of it, or, where some of it cannot go, nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def remove_all(paths: Iterable[Path]) -> None:
    """Remove files, folders and links; of a link only the link goes, what it names stays.

    Args:
        paths: What to remove; those that do not exist are left out.

    Raises:
        OSError: Something cannot be removed, with its name; found out before anything is removed.
    """
    present = [path for path in paths if os.path.lexists(path)]
    for path in present:
        _check(path.parent)
        if _is_folder(path):
            for folder, _, _ in os.walk(path):
                _check(Path(folder))
                if os.path.ismount(folder):
                    raise _refused(errno.EBUSY, folder)
    for path in present:
        if _is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _check(folder: Path) -> None:
    """OSError when nothing in ``folder`` can be removed."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise _refused(errno.EACCES, str(folder))


def _refused(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
