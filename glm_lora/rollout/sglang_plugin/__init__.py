"""SGLang plugin: serve every LoRA site of GLM-5.3-Flash on stock SGLang.

Stock SGLang knows no LoRA targets ``b_proj``, ``f_a_proj``, ``f_b_proj``, ``g_a_proj`` and
``g_b_proj``, has one width per target for all layers (KDA and DSA differ), and allocates adapter
buffers for all routed experts as soon as ``gate/up/down`` are targets. The entry point group
``sglang.srt.plugins`` calls ``register`` in every SGLang process before the command line is parsed.

SGLang logs a plugin's exception and goes on without it, so nothing may rest on a start that went
well: ``/server_info`` carries what this plugin reports from inside the scheduler (``REPORT_KEY``),
and the client refuses to send anything before it has seen it.

This package imports SGLang and ``glm_lora.arch`` only; it is installed into SGLang's own
environment with ``--no-deps``.
"""

from __future__ import annotations

import logging
import sys
from importlib import metadata

from glm_lora import __version__
from glm_lora.rollout.sglang_plugin.widths import TARGETS

KNOWN_VERSIONS = ("0.5.23",)
"""SGLang versions whose internals this plugin was checked against."""
REPORT_KEY = "glm_lora_plugin"
"""Key under ``internal_states`` of ``/server_info``."""
DIGEST_KEY = "glm_lora_digest"
"""Key of an adapter's configuration: the fingerprint every rank compares with what it received."""
SCHEDULER = "sglang.srt.managers.scheduler"

logger = logging.getLogger(__name__)


class PluginError(RuntimeError):
    """SGLang is not the one this plugin knows."""


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``; runs once in every SGLang process.

    Raises:
        PluginError: An unknown SGLang version, or a place this plugin touches does not exist.
    """
    version = metadata.version("sglang")
    if version not in KNOWN_VERSIONS:
        raise PluginError(
            f"SGLang {version} is not one this plugin knows; expected one of "
            f"{', '.join(KNOWN_VERSIONS)}. Install a known version."
        )
    from glm_lora.rollout.sglang_plugin import hooks, tables

    tables.widen()
    # Only the scheduler builds a model; hooks elsewhere would import it for nothing.
    role = "scheduler" if SCHEDULER in sys.modules else "front"
    if role == "scheduler":
        hooks.install()
    logger.info(
        "glm-lora plugin %s is active in SGLang %s (%s process); LoRA targets: %s",
        __version__,
        version,
        role,
        ", ".join(TARGETS),
    )
