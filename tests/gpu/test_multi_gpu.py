"""The parallel trainer on two GPUs or more: ``multi_gpu.py`` with every GPU of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("multi_gpu.py")
GPUS = next((n for n in (8, 4, 2) if torch.cuda.device_count() >= n), 0)


@pytest.mark.multi_gpu
@pytest.mark.timeout(1500)
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_parallel_training_on_gpus(tmp_path):
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(GPUS)]
    command += ["--max-restarts", "9", str(SCRIPT), "--json", str(out), "--budget", "1200"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    parts = json.loads(out.read_text())["parts"]
    assert parts
    assert {name: p["detail"] for name, p in parts.items() if p["status"] != "passed"} == {}
