"""Whether a Ray cluster can be joined, tried in a process of its own that always ends.

``ray.init`` waits without a limit for an address that listens and is no reachable cluster, in code
that no signal or exception ends: so a child process joins first. ``python -P ray_probe.py ADDRESS
LIMIT`` prints one JSON object per step.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

JOIN_LIMIT = 60.0
"""Seconds in which a driver must have joined."""
_POLL = 0.5


@dataclass(frozen=True)
class Probe:
    """How far joining came."""

    answers: bool = False
    """The cluster's control store (GCS) answered."""
    token: bool = False
    """It wants a token, and this machine's was taken."""
    refused: bool = False
    """It wants a token, and there is none here or another one."""
    joined: bool = False
    error: str = ""
    """Ray's own words; empty when joined or when the time was over."""


def probe(address: str, check: Callable[[], None], limit: float = JOIN_LIMIT) -> Probe:
    """Join ``address`` in a child process and leave again.

    Args:
        address: ``auto`` or ``host:port``.
        check: Called while waiting; raises when waiting is to end.
        limit: Seconds after which the child is ended.
    """
    child = subprocess.Popen(
        # -P: the modules beside this file must not hide others of the same name.
        [sys.executable, "-P", __file__, address, str(limit)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Ray's raw retries
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is this process's business
    )
    try:
        while True:
            try:
                printed, _ = child.communicate(timeout=_POLL)
                break
            except subprocess.TimeoutExpired:
                check()
    finally:
        child.kill()
        child.wait()
    found = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return Probe(**found)


def use_token() -> bool:
    """Turn token authentication on in this process if a token is there and no mode is configured.

    ``ray start`` and ``ray.init(address="auto")`` do the same by themselves; an explicit address
    does not.
    """
    from ray._private.authentication import authentication_token_setup as setup

    setup.logger.setLevel(logging.ERROR)
    return setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def _join(address: str) -> None:
    import ray
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.exceptions import AuthenticationError

    if address == "auto":  # what Ray makes of it inside a submitted job
        address = os.environ.get("RAY_ADDRESS") or address
    if ":" in address and "/" not in address:
        try:
            GcsClient(address=address)
        except AuthenticationError as error:
            # Only now: a driver that insists on tokens cannot work in a cluster without them.
            configured = "RAY_AUTH_MODE" in os.environ
            if configured or not use_token():
                return _say(answers=True, refused=True, error=str(error))
            try:
                GcsClient(address=address)
            except AuthenticationError as second:
                return _say(answers=True, refused=True, error=str(second))
            _say(token=True)
        _say(answers=True)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    _say(answers=True, joined=True)
    ray.shutdown()


def _main(address: str, limit: float) -> None:
    # Not caught, so that it ends the process wherever that waits.
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        _join(address)
    except Exception as error:  # whatever Ray raises is what there is to say
        _say(error=str(error) or type(error).__name__)


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]))
