"""Starting a local Ray, or joining one that is up; only what was started here is stopped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import ray

from glm_lora.cluster.placement import LOOPBACK
from glm_lora.errors import ConfigError, RunError


@contextlib.contextmanager
def ray_session(address: str, num_cpus: int, num_gpus: int) -> Iterator[None]:
    """A Ray runtime for the length of the block.

    Args:
        address: A running cluster (``auto`` or ``host:port``); empty starts a local one on the
            loopback interface, which is stopped at the end.
        num_cpus: Logical CPUs of the local runtime (one per actor).
        num_gpus: GPUs of the local runtime.

    Raises:
        ConfigError: No cluster answers at ``address``, or it runs other versions of Ray or Python.
        RunError: The local runtime did not start.
    """
    if ray.is_initialized():
        yield  # the embedding program's own session
        return
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
            )
    except ConnectionError as error:
        raise ConfigError(
            f"--ray-address {address}: no Ray cluster answers ({error})",
            "the address of a running cluster",
            "Start one with 'ray start --head', or leave the option out for a local one",
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_started(address, error) from error
    try:
        yield
    finally:
        # Leaves a cluster that was joined; ends the processes of one that was started here.
        ray.shutdown()


def _not_started(address: str, error: Exception) -> ConfigError | RunError:
    text = str(error)
    if address and "version mismatch" in text.lower():
        return ConfigError(
            f"--ray-address {address}: {text}",
            "the same versions of Ray and Python here and in the cluster",
            "Install the same wheel on every machine",
        )
    if address:
        return ConfigError(f"--ray-address {address} cannot be joined: {text}", "a running cluster")
    return RunError(f"Ray did not start: {text}", next_step="Try --launcher inline")
