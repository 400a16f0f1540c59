"""Starting a local Ray, or joining one that is up; only what was started here is stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils

from glm_lora.cluster.placement import LOOPBACK
from glm_lora.cluster.ray_probe import JOIN_LIMIT, probe, use_token
from glm_lora.errors import ConfigError, RunError

_CONNECT_LIMIT = 10.0


@contextlib.contextmanager
def ray_session(
    address: str, num_cpus: int, num_gpus: int, check: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """A Ray runtime for the length of the block.

    Args:
        address: A running cluster (``auto`` or ``host:port``); empty starts a local one on the
            loopback interface, which is stopped at the end.
        num_cpus: Logical CPUs of the local runtime (one per actor).
        num_gpus: GPUs of the local runtime.
        check: Called while waiting and once Ray is up; raises when the run is to end.

    Raises:
        ConfigError: No cluster answers at ``address``, it wants another token or none of ours, it
            cannot be reached from here, or it runs other versions of Ray or Python.
        RunError: The local runtime did not start.
    """
    if ray.is_initialized():
        yield  # the embedding program's own session
        return
    if address:
        _check_listening(address)
        _check_joinable(address, check)
    with contextlib.nullcontext() if address else _loopback_only():
        with _own_handler_kept():
            _init(address, num_cpus, num_gpus)
        try:
            check()
            yield
        finally:
            # Leaves a cluster that was joined; ends the processes of one that was started here.
            ray.shutdown()


def _check_listening(address: str) -> None:
    """Find out at once that nothing listens: Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _check_joinable(address: str, check: Callable[[], None]) -> None:
    """Join in a child process first, and do here what that needed."""
    found = probe(address, check)
    if found.joined:
        if found.token:
            use_token()
        return
    if found.refused:
        raise _no_token(address, found.error)
    if found.error:
        raise _not_started(address, ConnectionError(found.error))
    if found.answers:
        raise ConfigError(
            f"--ray-address {address}: the cluster answers, but none of its nodes can be joined "
            f"from here within {JOIN_LIMIT:g} s",
            "a cluster whose nodes are reachable under the addresses that they tell each other",
            "Start a node on this machine with 'ray start --address', and the head with a "
            "--node-ip-address that the others reach",
        )
    raise ConfigError(
        f"--ray-address {address}: something listens there, but does not answer as Ray within "
        f"{JOIN_LIMIT:g} s",
        "the address of a running cluster",
        "'ray start --head' prints the address (port 6379 by default, not the dashboard's)",
    )


def _no_token(address: str, error: str) -> ConfigError:
    mode = os.environ.get("RAY_AUTH_MODE")
    here = f"RAY_AUTH_MODE is {mode}" if mode else "RAY_AUTH_MODE is not set"
    return ConfigError(
        f"--ray-address {address}: the cluster wants its authentication token ({here}): "
        f"{error.splitlines()[0].split('. Note')[0]}",
        "the token with which the cluster was started",
        "Copy the head's ~/.ray/auth_token to this machine (or name it with RAY_AUTH_TOKEN_PATH), "
        "and set RAY_AUTH_MODE=token",
    )


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"--ray-address {address}: no Ray cluster answers ({error})",
        "the address of a running cluster",
        "Start one with 'ray start --head', or leave the option out for a local one",
    )


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Ray started inside serves this machine alone.

    Ray replaces 127.0.0.1 by the address of the network and listens on every interface, unless it
    thinks of a machine that cannot be part of a cluster: this flag says so, to Ray's processes
    through the environment and to the modules that are imported already.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    kept = os.environ.get(name)
    os.environ[name] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if kept is None:
            del os.environ[name]
        else:
            os.environ[name] = kept


@contextlib.contextmanager
def _own_handler_kept() -> Iterator[None]:
    """A handler of SIGTERM that is there stays: Ray's own ends the process without a word."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    setter = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda ignored: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = setter
        # Ray's C++ part has put a handler below Python's that hands on the first signal only.
        signal.signal(signal.SIGTERM, handler)


def _init(address: str, num_cpus: int, num_gpus: int) -> None:
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                address="local",  # never another user's that happens to run on this machine
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_started(address, error) from error


def _not_started(address: str, error: Exception) -> ConfigError | RunError:
    text = str(error)
    if address and "version mismatch" in text.lower():
        return ConfigError(
            f"--ray-address {address}: {text}",
            "the same versions of Ray and Python here and in the cluster",
            "Install the same wheel on every machine",
        )
    if isinstance(error, ConnectionError):
        return _no_cluster(address, error)
    if address:
        return ConfigError(f"--ray-address {address} cannot be joined: {text}", "a running cluster")
    return RunError(f"Ray did not start: {text}", next_step="Try --launcher inline")
