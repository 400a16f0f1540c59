"""``python -m glm_lora`` and ``glm-lora``: the command line, which Ctrl-C ends from the start.

What the command line imports takes the better part of a second, so it is imported in here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

LEAST_COLUMNS = 20
"""Narrower than this no box can be read."""
INTERRUPTED = 130
"""Exit code of what Ctrl-C ended (``errors.Interrupted``, which is not imported yet)."""


def main(argv: list[str] | None = None) -> int:
    """As ``glm_lora.cli.main``, with 130 and one line for a Ctrl-C before and after it, too."""
    _forget_no_width()
    try:
        with _interrupt_ends():
            from glm_lora import cli
        return cli.main(argv)
    except KeyboardInterrupt:
        _say_stopped()
        return INTERRUPTED


@contextlib.contextmanager
def _interrupt_ends() -> Iterator[None]:
    """SIGINT ends the process at once, unless it is ignored; for blocks that only import.

    A KeyboardInterrupt there may land in a callback of the import system, which drops it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        _say_stopped()
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _forget_no_width() -> None:
    """Some terminals say that they have no columns: rich would then print nothing at all."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) < LEAST_COLUMNS:
        del os.environ["COLUMNS"]


def _say_stopped() -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, b"stopped\n")


if __name__ == "__main__":
    sys.exit(main())
