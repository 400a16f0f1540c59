"""Engine and trainer on the same devices: what the run says of the base's copy on the host.

The engine is a fake that can release its memory. Where its log-probabilities are no model's, the
first check of an adapter ends the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from glm_lora.arch.spec import TINY
from glm_lora.errors import TrainingError
from glm_lora.report.run_data import read_lines
from glm_lora.train.worker import TrainWorker
from tests.flow.serving_model import ModelSglang
from tests.flow.test_train_tiny import LAUNCHER
from tests.prepared import folders
from tests.rollout.fake_sglang import FakeSglang, running
from tests.support import words
from tests.tiny_runs import train

COLOCATED = ["--rollout-engine", "sglang", "--sglang-colocated"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}


@pytest.fixture
def server():
    fake = FakeSglang(TINY)
    fake.flags = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    with running(fake) as url:
        yield fake, url


def start(root: Path, folder: Path, url: str, launcher: str, *options: str) -> list[str]:
    """The command that trains tiny with the server at ``url``."""
    starter = [sys.executable]
    if launcher == "torchrun":
        starter += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*starter, LAUNCHER, "train", "--model-name", "tiny", "--launcher", launcher]
    command += ["--run-dir", str(folder / "run"), "--rollout-engine-urls", url, *COLOCATED]
    return [*command, *folders(root), *options]


def run(root: Path, folder: Path, url: str, launcher: str, *options: str) -> str:
    command = start(root, folder, url, launcher, "--num-rollout", "1", *options)
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
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


@pytest.mark.usefixtures("wide_errors")
@pytest.mark.parametrize("dies", [False, True], ids=["alive", "dead"])
def test_a_failure_of_the_trainer_leaves_the_server_its_memory(
    server, tiny_root, tmp_path, monkeypatch, capsys, dies
):
    """The server is not ours: the next run finds it as this one did."""
    fake, url = server

    def fail(self: TrainWorker, dtype: str = "") -> None:
        assert fake.released
        fake.dead = dies
        raise TrainingError("a rank has a fault")

    monkeypatch.setattr(TrainWorker, "adapter", fail)
    options = ["--rollout-engine-urls", url, *COLOCATED, "--num-rollout", "1"]
    assert train(tiny_root, tmp_path / "run", *options) == 1
    printed = capsys.readouterr()
    said = words(printed.out + printed.err)
    assert "a rank has a fault" in said, said
    assert fake.released == dies
    assert ("the engine did not take its memory back" in said) == dies, said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["inline", "torchrun", "ray"])
def test_the_reward_rises_with_sglangs_protocol(tiny_root, tmp_path, launcher):
    """The whole job: released for every training, taken back, synced, probed, sampled from."""
    fake = ModelSglang(tiny_root / "models" / "tiny", rank=8, alpha=16.0)
    rollouts = 30 if launcher == "inline" else 4
    with running(fake) as url:
        command = start(tiny_root, tmp_path, url, launcher, "--num-rollout", str(rollouts))
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    rewards = [r["rollout/raw_reward"] for r in records]
    assert len(rewards) == rollouts
    if rollouts == 30:
        assert np.mean(rewards[:5]) <= 0.40
        assert np.mean(rewards[-5:]) >= 0.50
    # bf16 travels, so the engine's adapter is rounded; both sides compute in fp32 from it.
    assert max(r["train/train_rollout_logprob_abs_diff"] for r in records) <= 1e-4
    paths = [path for path, _ in fake.requests]
    assert paths.count("/release_memory_occupation") == paths.count("/resume_memory_occupation")
    assert paths.count("/release_memory_occupation") >= rollouts
    # 16 prompts, 8 samples each and a probe with the newest adapter; the last is only probed.
    named = [count for name, count in fake.served.items() if name is not None]
    assert named == [129] * rollouts + [1]
    assert fake.most_loaded <= 2
