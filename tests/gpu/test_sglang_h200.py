"""glm5_next on a real SGLang with the plugin: the GPU script, shortened.

``GLM_LORA_SGLANG_BUNDLE`` names a bundle folder for machines where SGLang is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = Path(os.environ.get("GLM_LORA_SGLANG_BUNDLE", ROOT / ".sglang"))

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BUNDLE.is_dir(), reason="needs an SGLang bundle"),
]


def run(out: Path, *options: str) -> dict:
    done = subprocess.run(
        ["bash", "benchmarks/sglang_h200.sh", str(BUNDLE), "--syncs", "8", *options],
        cwd=ROOT,
        env={**os.environ, "OUT": str(out)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads((out / "sglang_h200.json").read_text())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_one_gpu(tmp_path):
    report = run(tmp_path, "--backends", "triton")
    assert report["sites"] == 43
    assert report["backends"]["triton"]["plugin"]["modules"] == 32


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    """f_a and g_a are replicated, everything else is cut: the deltas stay right."""
    run(tmp_path, "--backends", "triton", "--tp", "2")
