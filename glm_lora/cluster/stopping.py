"""Ending a run on a signal, whatever it is doing: sampling, an update, or still starting."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from glm_lora.checkpoint.train_state import latest_checkpoint
from glm_lora.errors import Interrupted, StopNow
from glm_lora.report.console import Listener
from glm_lora.train.job import StopRequest

STOP_LIMIT = 45.0
"""Seconds after a signal in which an update and its checkpoint must be done."""

AGAIN = 0.05
"""Seconds after which what a handler raised, and Python dropped, is raised again."""


@contextlib.contextmanager
def stop_on_signal(listener: Listener) -> Iterator[StopRequest]:
    """SIGINT, SIGTERM and SIGHUP ask the loop to save and stop; a second one stops at once.

    SIGHUP is what a lost terminal sends; under ``nohup`` it stays ignored.

    Sampling and starting are given up on the spot. An update gets ``STOP_LIMIT`` seconds to finish;
    then the run ends without it, and the last checkpoint stands.

    Args:
        listener: Told that the run is stopping.

    Raises:
        Interrupted: An update was given up, or the signal came between two blocks that save.
        KeyboardInterrupt: There was a second signal.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    with _Signals(request, listener):
        try:
            yield request
        except StopNow as error:
            raise Interrupted("stopped; what was saved before stands") from error


class _Signals:
    """Handlers of one run, and of what they raise where Python would drop it.

    A handler runs between two lines of whatever is executing. If that is a finalizer or a callback
    of C code, its exception goes to ``sys.unraisablehook`` and the program goes on as if nothing
    had been asked for: then it is raised again a moment later, somewhere else.
    """

    def __init__(self, request: StopRequest, listener: Listener) -> None:
        self._request = request
        self._listener = listener
        self._at_once = False

    def __enter__(self) -> None:
        handlers = {
            signal.SIGINT: self._asked,
            signal.SIGTERM: self._asked,
            signal.SIGALRM: self._due,
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._asked
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._dropped
        self._previous = {number: signal.signal(number, h) for number, h in handlers.items()}

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._hook

    def _asked(self, number: int, frame: FrameType | None) -> None:
        request = self._request
        if request.requested:
            self._at_once = True
            raise KeyboardInterrupt
        request.requested = True
        request.deadline = time.monotonic() + STOP_LIMIT
        # What is saved is known, and said, at the end. Where the signal came in the middle of a
        # write to the same stream, the line cannot be written.
        with contextlib.suppress(RuntimeError):
            self._listener.note("stopping (again to stop at once, without saving)")
        if not request.polled:
            self._wake_at(request.deadline)
            request.check()

    def _due(self, number: int, frame: FrameType | None) -> None:
        if self._at_once:
            raise KeyboardInterrupt
        self._wake_at(self._request.deadline)
        self._request.check()

    def _dropped(self, unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, StopNow | Interrupted | KeyboardInterrupt):
            self._hook(unraisable)
            return
        if isinstance(unraisable.exc_value, Interrupted):
            self._request.deadline = time.monotonic()  # as it was before it was raised
        self._wake_at(time.monotonic() + AGAIN)

    def _wake_at(self, moment: float) -> None:
        """Have ``_due`` called at ``moment`` (``time.monotonic``; infinity: never)."""
        if moment < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(moment - time.monotonic(), 0.0) + AGAIN)


@contextlib.contextmanager
def stoppable_start(stop: StopRequest, folder: Path | None) -> Iterator[None]:
    """A wish to stop ends the block, in which nothing is trained yet, wherever it waits.

    Args:
        stop: The run's request.
        folder: The run folder; None before it is made.

    Raises:
        Interrupted: Says what stands.
    """
    try:
        stop.sampling = True
        stop.check()
        yield
        stop.check()
    except StopNow as error:
        stop.sampling = False
        last = latest_checkpoint(folder) if folder else None
        stands = f"{last} stands" if last else "nothing was trained, so nothing is saved"
        raise Interrupted(f"stopped while starting; {stands}") from error
    finally:
        stop.sampling = False
