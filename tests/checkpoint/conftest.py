"""One prepared tiny model for the whole folder (it takes about 15 seconds)."""

from pathlib import Path

import pytest

from glm_lora.checkpoint.prepare import PrepareResult, prepare
from glm_lora.config import PrepareConfig


def tiny_config(root: Path, **changes: object) -> PrepareConfig:
    values: dict[str, object] = {
        "model_name": "tiny",
        "hf_checkpoint": root / "models" / "tiny",
        "ref_load": root / "ckpt" / "tiny_torch_dist",
        "data_dir": root / "data",
    }
    return PrepareConfig.model_validate({**values, **changes})


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PrepareResult:
    return prepare(tiny_config(tmp_path_factory.mktemp("prepared")))
