"""Ending a run on a signal, whatever it is doing: sampling, an update, or still starting."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm_lora.checkpoint.train_state import latest_checkpoint
from glm_lora.errors import Interrupted
from glm_lora.report.console import Listener
from glm_lora.train.job import StopRequest

STOP_LIMIT = 45.0
"""Seconds after a signal in which an update and its checkpoint must be done."""


@contextlib.contextmanager
def stop_on_signal(listener: Listener) -> Iterator[StopRequest]:
    """SIGINT and SIGTERM ask the loop to save and stop; a second one stops at once.

    Sampling and starting are given up on the spot. An update gets ``STOP_LIMIT`` seconds to finish;
    then the run ends without it, and the last checkpoint stands.

    Args:
        listener: Told that the run is stopping.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def asked(number: int, frame: Any) -> None:
        if request.requested:
            raise KeyboardInterrupt
        request.requested = True
        request.deadline = time.monotonic() + STOP_LIMIT
        # What is saved is known, and said, at the end.
        listener.note("stopping (again to stop at once, without saving)")
        if not request.polled:
            signal.setitimer(signal.ITIMER_REAL, STOP_LIMIT + 0.1)
            request.check()

    def overdue(number: int, frame: Any) -> None:
        request.check()

    handlers = {signal.SIGINT: asked, signal.SIGTERM: asked, signal.SIGALRM: overdue}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield request
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stoppable_start(stop: StopRequest, folder: Path | None) -> Iterator[None]:
    """A wish to stop ends the block, in which nothing is trained yet, wherever it waits.

    Args:
        stop: The run's request.
        folder: The run folder; None before it is made.

    Raises:
        Interrupted: Says what stands.
    """
    stop.sampling = True
    try:
        stop.check()
        yield
        stop.check()
    except Interrupted as error:
        last = latest_checkpoint(folder) if folder else None
        stands = f"{last} stands" if last else "nothing was trained, so nothing is saved"
        raise Interrupted(f"stopped while starting; {stands}") from error
    finally:
        stop.sampling = False
