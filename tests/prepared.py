"""The tiny model, prepared once per test session (about 15 seconds)."""

from __future__ import annotations

from pathlib import Path

from glm_lora.config import PrepareConfig


def tiny_config(root: Path, **changes: object) -> PrepareConfig:
    """What ``prepare --model-name tiny`` does below ``root``."""
    values: dict[str, object] = {
        "model_name": "tiny",
        "hf_checkpoint": root / "models" / "tiny",
        "ref_load": root / "ckpt" / "tiny_torch_dist",
        "data_dir": root / "data",
    }
    return PrepareConfig.model_validate({**values, **changes})


def folders(root: Path) -> list[str]:
    """The options that make ``train`` find it."""
    return [
        "--model-dir", str(root / "models"),
        "--ckpt-dir", str(root / "ckpt"),
        "--data-dir", str(root / "data"),
    ]  # fmt: skip
