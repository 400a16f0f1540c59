"""Ending a run on a signal or for want of an output, whatever it is doing."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from glm_lora.checkpoint.train_state import latest_checkpoint
from glm_lora.errors import Interrupted, RunError, StopNow
from glm_lora.report.console import Listener
from glm_lora.train.job import StopRequest

STOP_LIMIT = 45.0
"""Seconds after a signal in which an update and its checkpoint must be done."""

AGAIN = 0.05
"""Seconds after which what a handler raised, and Python dropped, is raised again."""


class HeardOrStopped:
    """Passes on what a run says; once that cannot be written, the run is to save and stop.

    A reader that has gone (``| head``), a terminal that is closed and a log on a full disk must
    not cost what was trained, nor may a long run go on where nobody sees it.

    Args:
        listener: What may fail.
        request: Set when it does.
    """

    def __init__(self, listener: Listener, request: StopRequest) -> None:
        self._listener = listener
        self._request = request
        self._lost = False

    def phase(self, name: str) -> None:
        """Pass on."""
        self._pass_on(lambda: self._listener.phase(name))

    def rollout(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on."""
        self._pass_on(lambda: self._listener.rollout(step, metrics))

    def note(self, text: str) -> None:
        """Pass on."""
        self._pass_on(lambda: self._listener.note(text))

    def _pass_on(self, say: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            say()
            return
        except Interrupted:  # by a signal that came meanwhile
            raise
        except (BrokenPipeError, SystemExit):  # rich ends the program where a pipe is broken
            why = "nobody reads the output any more"
        except RunError as error:
            why = error.what
        self._lost = True
        if not self._request.requested:
            self._request.requested, self._request.lost_output = True, why


@contextlib.contextmanager
def output_blamed(stop: StopRequest) -> Iterator[None]:
    """A run that stopped for want of an output failed; one that was asked to stop did not.

    Raises:
        RunError: Why the output is lost, and what was saved.
    """
    try:
        yield
    except Interrupted as error:
        if not stop.lost_output:
            raise
        raise RunError(f"{stop.lost_output}: {error.what}", next_step=error.next_step) from error


@contextlib.contextmanager
def stop_on_signal(request: StopRequest, listener: Listener) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP ask the loop to save and stop; a second one stops at once.

    SIGHUP is what a lost terminal sends. One that was ignored when the program began stays so:
    SIGHUP under ``nohup``, SIGINT in what a shell script puts in the background with ``&``.

    Sampling and starting are given up on the spot. An update gets ``STOP_LIMIT`` seconds to finish;
    then the run ends without it, and the last checkpoint stands.

    Args:
        request: Set by the first signal.
        listener: Told that the run is stopping.

    Raises:
        Interrupted: An update was given up, the signal came between two blocks that save, or
            there was a second one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _Signals(request, listener):
        try:
            yield
        except StopNow as error:
            raise Interrupted("stopped; what was saved before stands") from error
        except KeyboardInterrupt as error:
            raise Interrupted("stopped at once; what was saved before stands") from error


class _Signals:
    """Handlers of one run, and of what they raise where Python would drop it.

    A handler runs between two lines of whatever is executing. If that is a finalizer or a callback
    of C code, its exception goes to ``sys.unraisablehook`` and the program goes on as if nothing
    had been asked for: then it is raised again a moment later, somewhere else.
    """

    def __init__(self, request: StopRequest, listener: Listener) -> None:
        self._request = request
        self._listener = listener
        self._signalled = False
        self._at_once = False

    def __enter__(self) -> None:
        asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {**dict.fromkeys(heard, self._asked), signal.SIGALRM: self._due}
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
        if self._signalled:
            self._at_once = True
            raise KeyboardInterrupt
        self._signalled = request.requested = True
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
