"""Training runs of the tiny model, and what they leave."""

from __future__ import annotations

from pathlib import Path

from glm_lora.cli import main
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.report.run_data import METRICS, read_lines
from tests.conftest import ROOT
from tests.prepared import folders

LAUNCHER = str(ROOT / "launchers" / "run_glm5_3_flash_lora.py")


def train(root: Path, run: Path, *options: str, launcher: str = "inline") -> int:
    """``train`` in this process with what was prepared below ``root``; its exit code."""
    arguments = ["train", "--model-name", "tiny", "--launcher", launcher, "--run-dir", str(run)]
    return main([*arguments, *folders(root), *options])


def metric(run: Path, name: str) -> list[float]:
    """One metric of every rollout."""
    return [record[name] for record in read_lines(run / METRICS)]


def adapter(run: Path) -> str:
    """Fingerprint of the exported adapter: equal for bit-equal tensors."""
    from safetensors.torch import load_file

    return fingerprint_tensors(load_file(run / "adapter" / "adapter_model.safetensors"))
