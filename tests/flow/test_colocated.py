"""Engine and trainer on the same devices: what the run says of the base's copy on the host.

The engine is a fake that can release its memory; its log-probabilities are no model's, so the first
check of an adapter ends the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_lora.arch.spec import TINY
from tests.flow.test_train_tiny import LAUNCHER
from tests.prepared import folders
from tests.rollout.fake_sglang import FakeSglang, running

COLOCATED = ["--rollout-engine", "sglang", "--sglang-colocated", "--num-rollout", "1"]


@pytest.fixture
def server():
    fake = FakeSglang(TINY)
    fake.flags = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    with running(fake) as url:
        yield fake, url


def run(root: Path, folder: Path, url: str, launcher: str, *options: str) -> str:
    starter = [sys.executable]
    if launcher == "torchrun":
        starter += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*starter, LAUNCHER, "train", "--model-name", "tiny", "--launcher", launcher]
    command += ["--run-dir", str(folder / "run"), "--rollout-engine-urls", url, *COLOCATED]
    done = subprocess.run(
        [*command, *folders(root), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
    )
    assert done.returncode == 1
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("inline", 1),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
        pytest.param("ray", 2, marks=pytest.mark.slow),
    ],
)
def test_a_line_says_how_the_base_is_held(server, tiny_root, tmp_path, launcher, ranks):
    fake, url = server
    options = ["--num-gpus-per-node", str(ranks)] if ranks > 1 else []
    said = run(tiny_root, tmp_path, url, launcher, *options)
    assert "log-probabilities of the probe prompt" in said, said
    line = next(line for line in said.splitlines() if "host copy of the base: " in line)
    assert f"{ranks} rank(s), 1 machine(s))" in line and "of its own" not in line
    asked = [path for path, _ in fake.requests]
    assert "/release_memory_occupation" in asked and not fake.released, "it got its memory back"
