"""SGLang's adapter format: disk names and leaf names, the file that vLLM reads as well."""

from __future__ import annotations

from pathlib import Path

from glm_lora.export.adapter_folder import write_adapter
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.lora.serving import padded_tensors, serving_config
from glm_lora.protocols import AdapterState
from glm_lora.rollout.sglang_plugin import DIGEST_KEY
from glm_lora.sync.verify import check_fused, check_state


def export_sglang(
    state: AdapterState, output: Path, base_model: str, files: dict[str, str] | None = None
) -> Path:
    """Write ``state`` as a folder that SGLang serves with the plugin (``--lora-paths``).

    Raises:
        SyncError: ``state`` does not hold what its selection says, or adapts only a part of a
            projection that SGLang fuses.
        ConfigError, ExportError: See ``write_adapter``.
    """
    check_state(state)
    check_fused(state.selection)
    tensors = padded_tensors(state)
    config = serving_config(state.selection, base_model)
    # The plugin compares it with what every rank read.
    config[DIGEST_KEY] = fingerprint_tensors(tensors)
    return write_adapter(state, output, config, tensors, files)
