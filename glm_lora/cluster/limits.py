"""How many files a process may have open, which Ray, gloo and a base's many shards all use."""

from __future__ import annotations

import resource

from glm_lora.errors import ConfigError

FEWEST_OPEN_FILES = 256
"""A run of one process has about a hundred open; Ray multiplies that by its own connections."""

ENOUGH_OPEN_FILES = 65_536
"""What Ray asks for. No more is taken: some programs walk through every number that is allowed."""


def allow_open_files() -> None:
    """Raise this process's limit, and that of what it starts, as far as is useful and allowed.

    Raises:
        ConfigError: It stays below what a run needs.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY:
        return
    allowed = ENOUGH_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, ENOUGH_OPEN_FILES)
    if allowed > now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    if max(allowed, now) < FEWEST_OPEN_FILES:
        raise ConfigError(
            f"this process may have {max(allowed, now)} files open",
            f"at least {FEWEST_OPEN_FILES}; {ENOUGH_OPEN_FILES:,} where Ray runs",
            "Raise the limit (ulimit -n) in the shell that starts the run",
        )
