"""Write a result into a folder: complete under its final name, or not there at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm_lora.checkpoint.files import existing, umask
from glm_lora.errors import ConfigError, ExportError


def check_output(output: Path, num_bytes: int = 0, *, over: bool = False) -> None:
    """Check, before any work, that ``output`` can be made and will fit.

    Args:
        output: Folder to be made; it may exist if it is empty.
        num_bytes: What will be written, in bytes.
        over: It may also hold files.

    Raises:
        ConfigError: It is a file or not empty, cannot be written, or the disk is too full.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file", "a new or empty folder")
    if output.is_dir() and not over and any(output.iterdir()):
        raise ConfigError(f"--output {output} is not empty", "a new or empty folder")
    parent = existing(output.absolute() if over else output.absolute().parent)
    try:
        # Tried, not asked for: permissions say nothing of file systems that take no files.
        os.rmdir(tempfile.mkdtemp(prefix=f".{output.name}.", dir=parent))
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be made in {parent} ({error.strerror})", "a writable folder"
        ) from error
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise ConfigError(
            f"--output {output} needs {num_bytes:,} bytes, {free:,} are free",
            "enough space on the disk",
        )


@contextmanager
def new_folder(output: Path, num_bytes: int = 0, *, over: bool = False) -> Iterator[Path]:
    """A working folder that takes the name ``output`` when the block ends well.

    Args:
        output: New or empty folder; where it is a link, what that names is filled.
        num_bytes: What will be written, in bytes.
        over: ``output`` may hold files. Then each new file takes the place of the one with its
            name, and the others stay; working folders of writers that were killed are removed (who
            calls makes sure that there is no other writer).

    Raises:
        ConfigError: See ``check_output``.
        ExportError: Writing failed, for example on a full disk; nothing is left behind.
    """
    output = output.resolve()
    check_output(output, num_bytes, over=over)
    over = over and output.is_dir()
    working: Path | None = None
    try:
        # Beside the files that are replaced: what is moved over them must be on their disk.
        parent = output if over else output.parent
        parent.mkdir(parents=True, exist_ok=True)
        for left in output.glob(f".{output.name}.*") if over else ():
            shutil.rmtree(left, ignore_errors=True)
        working = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=parent))
        working.chmod(0o777 & ~umask())
        yield working
        if over:
            for path in working.iterdir():
                path.replace(output / path.name)
        else:
            if output.is_dir():
                output.rmdir()
            working.rename(output)
    except OSError as error:
        raise ExportError(
            f"{output} cannot be written: {error.strerror or error}",
            "a writable folder with enough space",
        ) from error
    finally:
        if working is not None and working.exists():
            shutil.rmtree(working, ignore_errors=True)
