"""The API key of SGLang servers that others have started: from a file, and never shown.

Servers that are started here listen on the loopback interface alone. A server elsewhere takes
adapters and prompts over the network, so it must ask for a key, which is read from a file: what
stands on a command line or in a configuration ends up in ``ps``, in logs and in run folders.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from glm_lora.errors import ConfigError

OPTION = "--rollout-engine-key-file"


def read_key(path: Path | None) -> str:
    """The key in a file; empty without a file.

    Raises:
        ConfigError: The file cannot be read, or holds no single line of printable ASCII.
    """
    if path is None:
        return ""
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{OPTION} {path} is no regular file",
            "a file that can be read again, when an engine is restarted",
        )
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{OPTION} {path} cannot be read: {reason}", "a text file") from error
    if not key:
        raise ConfigError(f"{OPTION} {path} is empty", "a file with the key")
    if not (key.isascii() and key.isprintable() and " " not in key):
        # It goes into a header; what is in the file must not be shown.
        raise ConfigError(f"{OPTION} {path} holds more than a key", "one word of ASCII characters")
    return key


def check_key(urls: Sequence[str], path: Path | None) -> None:
    """Check that the key can be read, and that servers on other machines have one.

    Raises:
        ConfigError: The file is wrong, or it is missing and a server is not on this machine.
    """
    if read_key(path):
        return
    away = [url for url in urls if not _on_loopback(url)]
    if away:
        raise ConfigError(
            f"--rollout-engine-urls {away[0]} is not on this machine's loopback interface and "
            "has no key",
            f"{OPTION} with the API key of the servers",
            "Start them with a key (docs/security.md says how), or reach them through a tunnel",
        )


def _on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
