"""One of two ranks under torchrun has a fault: all stop in time, with its words, and say so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm_lora.checkpoint.train_state import latest_checkpoint
from tests.conftest import ROOT
from tests.prepared import folders
from tests.tiny_runs import metric

SCRIPT = Path(__file__).parent / "faulty_launcher.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def torchrun(
    root: Path, run: Path, fault: str, *options: str, sign: int = 0
) -> tuple[int, str, float]:
    """Exit code, everything printed, seconds from the third rollout (or the start) to the end.

    ``sign`` is sent after the third rollout.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(SCRIPT), fault]
    command += ["train", "--model-name", "tiny", "--run-dir", str(run), *folders(root), *options]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "400",
    }  # fmt: skip
    log = run.with_suffix(".log")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
    reached = 0.0
    end = time.monotonic() + 240
    while process.poll() is None:
        assert time.monotonic() < end, log.read_text()
        metrics = run / "metrics.jsonl"
        if not reached and metrics.exists() and len(metrics.read_text().splitlines()) == 3:
            reached = time.monotonic()
            if sign:
                process.send_signal(sign)
        time.sleep(0.05)
    return process.returncode, log.read_text(), time.monotonic() - reached


SAVING = ["--num-rollout", "8", "--save-interval", "1"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nan", "the update was not applied"),
        ("raise", "ZeroDivisionError: rank 1 has a fault"),
        ("die", "lost another rank in step"),
    ],
)
@pytest.mark.parametrize(
    "shape", [[], ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]]
)
def test_a_fault_in_one_rank_stops_all(tiny_root, tmp_path, fault, said, shape):
    run = tmp_path / "run"
    code, text, seconds = torchrun(tiny_root, run, fault, *SAVING, *shape)
    assert code != 0 and said in text, text
    assert seconds < 60, f"stopped after {seconds:.0f} s"
    assert metric(run, "rollout/step") == [0, 1, 2], "the faulty step does not count"
    saved = latest_checkpoint(run)
    # A checkpoint is written beside the training: a killed rank may take an unfinished one along.
    finished = {"iter_0000003"} | ({"iter_0000002"} if fault == "die" else set())
    assert saved is not None and saved.name in finished


@pytest.mark.parametrize(
    ("fault", "said"),
    [("selection", "another selection"), ("version", "torch 2.0.0 on rank 1"),
     ("seed", "another configuration")],
)  # fmt: skip
def test_ranks_that_differ_are_refused_at_the_start(tiny_root, tmp_path, fault, said):
    run = tmp_path / "run"
    shape = ["--tensor-model-parallel-size", "2"]
    code, text, _ = torchrun(tiny_root, run, fault, *SAVING, *shape)
    assert code != 0 and said in text, text
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_preemption_of_torchrun_saves(tiny_root, tmp_path, sign):
    run = tmp_path / "run"
    shape = ["--num-rollout", "500", "--tensor-model-parallel-size", "2"]
    code, text, seconds = torchrun(tiny_root, run, "none", *shape, sign=sign)
    assert code != 0 and seconds < 60, text
    saved = latest_checkpoint(run)
    done = len(metric(run, "rollout/step"))
    assert saved is not None and saved.name == f"iter_{done:07d}", text
