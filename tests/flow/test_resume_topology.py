"""A checkpoint of one rank continues on others: loaded bit for bit, then the same three steps."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from glm_lora.checkpoint.train_state import LocalTensor, load_train_state, read_extra
from glm_lora.config import TrainConfig, from_toml, to_toml
from glm_lora.protocols import AdapterRef, TrainBatch, TrainSample
from tests.conftest import ROOT
from tests.tiny_runs import train

SCRIPT = Path(__file__).parent / "resume_worker.py"
SHAPES = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "dp2": (2, {}),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def saved(tiny_root, tmp_path_factory) -> Path:
    """A run of three rollouts on one rank; its moments are not zero."""
    run = tmp_path_factory.mktemp("saved") / "run"
    assert train(tiny_root, run, "--num-rollout", "3") == 0
    return run


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> Path:
    """Three recorded rollouts of random tokens with random advantages."""
    dice = np.random.default_rng(5)

    def sample(step: int) -> TrainSample:
        count = int(dice.integers(1, 6))
        return TrainSample(
            prompt_ids=tuple(dice.integers(2, 18, int(dice.integers(2, 6))).tolist()),
            response_ids=tuple(dice.integers(2, 18, count).tolist()),
            rollout_logprobs=tuple(dice.normal(-2.0, 0.1, count).tolist()),
            loss_mask=(1,) * count,
            advantage=float(dice.normal()),
            adapter=AdapterRef("policy", step),
        )

    made = [TrainBatch(tuple(sample(step) for _ in range(12)), step) for step in (3, 4, 5)]
    path = tmp_path_factory.mktemp("batches") / "batches.pkl"
    path.write_bytes(pickle.dumps(made))
    return path


def resumed(saved: Path, batches: Path, output: Path, name: str) -> dict[str, torch.Tensor]:
    ranks, shape = SHAPES[name]
    config = from_toml(TrainConfig, saved / "config.toml")
    parallel = config.parallel.model_copy(update=shape)
    config = config.model_copy(update={"parallel": parallel, "num_gpus_per_node": ranks})
    output.mkdir()
    (output / "config.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(SCRIPT)]
    command += [str(output / "config.toml"), str(saved / "checkpoints" / "iter_0000003")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(batches), str(output)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(output / "adapter.pt")


@pytest.fixture(scope="module")
def one_rank(saved, batches, tmp_path_factory) -> dict[str, torch.Tensor]:
    return resumed(saved, batches, tmp_path_factory.mktemp("one") / "out", "one")


@pytest.mark.parametrize("name", [n for n in SHAPES if n != "one"])
def test_another_topology_continues_from_the_same_state(saved, batches, tmp_path, one_rank, name):
    many = resumed(saved, batches, tmp_path / "out", name)
    folders = saved / "checkpoints" / "iter_0000003", tmp_path / "out" / "iter_0000003"
    assert read_extra(folders[0])["driver"] == read_extra(folders[1])["driver"]
    assert read_extra(folders[0])["applied_steps"] == read_extra(folders[1])["applied_steps"] == 3
    held = []
    for folder in folders:
        held.append(
            {
                key + suffix: LocalTensor(torch.empty(tensor.shape))
                for key, tensor in one_rank.items()
                for suffix in ("", ".exp_avg", ".exp_avg_sq")
            }
        )
        load_train_state(folder, held[-1])
    for key, piece in held[0].items():
        assert torch.equal(piece.tensor, held[1][key].tensor), key
    assert any(piece.tensor.any() for key, piece in held[0].items() if key.endswith("_sq"))
    assert many.keys() == one_rank.keys()
    for key, tensor in one_rank.items():
        gap = (many[key] - tensor).norm() / tensor.norm()
        # fp32 sums in another order; Adam divides by the root of their squares.
        assert gap <= 1e-4, f"{key}: {gap:.3g} relative after three steps"
