from pathlib import Path

import pytest

from glm_lora.cluster.plan import plan
from glm_lora.train.worker import build_worker, init_process_group
from tests.prepared import tiny_train_config


@pytest.fixture
def make_worker(tiny_root: Path, tmp_path: Path):
    """Builds a trainer of one rank; keywords are sections of the configuration."""

    def make(**sections):
        checked = plan(tiny_train_config(tiny_root, tmp_path, **sections))
        init_process_group(checked.config, 0, 1, None)
        return build_worker(checked.config, checked.selection)

    return make
