"""Waiting for calls on Ray actors: never without a limit, and a lost process is told apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError

from glm_lora.cluster.connections import is_broken_connection
from glm_lora.errors import GlmLoraError, ProcessLost, first_line


class MachineLost(ProcessLost):
    """The host is gone too: nothing can be started again in its place."""


_POLL = 0.5
"""Seconds between looks, so that signals and other threads are heard while waiting."""
_GRACE = 5.0
"""Seconds in which a second failure may explain the first: a peer's death shows up in all."""


def results(
    refs: Sequence[ray.ObjectRef],
    what: str,
    failure: type[GlmLoraError],
    limit: float,
    check: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Results in order; the first error of any process is raised without waiting for the others.

    Args:
        refs: One per process.
        what: What was asked for, for messages.
        failure: Class of errors that are none of ours.
        limit: Seconds all of them may take together.
        check: Called now and then; raises when waiting is to end.

    Raises:
        ProcessLost: A process is gone, silent for ``limit`` seconds, or lost its connection to
            another one.
        GlmLoraError: What a process raised.
    """
    waiting = list(refs)
    end = time.monotonic() + limit
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=_POLL)
        if not done:
            check()
            if time.monotonic() > end:
                raise ProcessLost(f"{what} did not finish within {limit:g} s")
            continue
        error = error_of(done[0], what, failure)
        if error is None:
            continue
        raise _explained(error, waiting, what, failure)
    return ray.get(list(refs))


def error_of(ref: ray.ObjectRef, what: str, failure: type[GlmLoraError]) -> GlmLoraError | None:
    """The error of a finished call as one of ours, or None."""
    try:
        ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, GlmLoraError):
            return cause
        if is_broken_connection(cause):
            return ProcessLost(f"{what}: a rank lost its connection to another:\n{error}")
        return failure(f"{what} failed:\n{error}")
    except (RayActorError, WorkerCrashedError) as error:
        return ProcessLost(f"{what}: a process is gone ({first_line(error)})")
    return None


def _explained(
    error: GlmLoraError, others: list[ray.ObjectRef], what: str, failure: type[GlmLoraError]
) -> GlmLoraError:
    """``error``, or what brought it about: a connection breaks because a peer died or failed."""
    if not isinstance(error, ProcessLost):
        return error
    end = time.monotonic() + _GRACE
    while others and (left := end - time.monotonic()) > 0:
        done, others = ray.wait(others, num_returns=1, timeout=left)
        for ref in done:
            other = error_of(ref, what, failure)
            if other is not None and not isinstance(other, ProcessLost):
                return other
            if other is not None and "is gone" in other.what:
                return ProcessLost(f"{other.what}\n{error.what}")
    return error
