"""The tiny model, prepared once per test session (about 15 seconds)."""

from __future__ import annotations

from pathlib import Path

from glm_lora.config import PrepareConfig, TrainConfig
from glm_lora.settings import resolve_train


def tiny_config(root: Path, **changes: object) -> PrepareConfig:
    """What ``prepare --model-name tiny`` does below ``root``."""
    values: dict[str, object] = {
        "model_name": "tiny",
        "hf_checkpoint": root / "models" / "tiny",
        "ref_load": root / "ckpt" / "tiny_torch_dist",
        "data_dir": root / "data",
    }
    return PrepareConfig.model_validate({**values, **changes})


def tiny_train_config(root: Path, run_dir: Path, **values: object) -> TrainConfig:
    """A resolved run in one process, with what was prepared below ``root``."""
    given = {"model_name": "tiny", "launcher": "inline", "run_dir": str(run_dir), **values}
    models, ckpts, data = (root / name for name in ("models", "ckpt", "data"))
    return resolve_train(given, models=models, ckpts=ckpts, data=data)


def folders(root: Path) -> list[str]:
    """The options that make ``train`` find it."""
    return [
        "--model-dir", str(root / "models"),
        "--ckpt-dir", str(root / "ckpt"),
        "--data-dir", str(root / "data"),
    ]  # fmt: skip
