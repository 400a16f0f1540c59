"""How many files a process may have open, which Ray, gloo and a base's many shards all use."""

from __future__ import annotations

import resource

from glm_lora.errors import ConfigError

FEWEST_OPEN_FILES = 256
"""A run of one process has about a hundred open; Ray multiplies that by its own connections."""


def allow_open_files() -> int:
    """Raise this process's limit, and that of what it starts, as far as the system lets it.

    Returns:
        The limit.

    Raises:
        ConfigError: It stays below what a run needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < FEWEST_OPEN_FILES:
        raise ConfigError(
            f"this process may have {hard} files open",
            f"at least {FEWEST_OPEN_FILES}; 65,536 where Ray runs",
            "Raise the limit (ulimit -n) in the shell that starts the run",
        )
    return hard
