"""The tutorial, executed as it stands: every console line, then the Python block."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "tutorial.md").read_text()
EXPECTED = {
    "glm-lora doctor": r"ok +torch",
    "glm-lora prepare": r"made +checkpoint, base",
    "glm-lora targets --model-name tiny": r"43 sites|kv_b_proj",
    "glm-lora train": r"rollout +59 .*reward 0\.[89]",
    "glm-lora report": r"report +runs/first/report\.html",
    "glm-lora eval": r"eval/raw_reward",
    "glm-lora export --run runs/first --format peft": r"stock PEFT uses all 86 tensors",
    "glm-lora export --run runs/first --format sglang": r"written to first-sglang",
}


def run(command: str, folder: Path) -> str:
    binaries = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "HOME": str(folder),
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial(tmp_path):
    blocks = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert len(lines) == 9
    for line in lines:
        printed = run(line, tmp_path)
        (expected,) = [v for k, v in EXPECTED.items() if line.startswith(k)]
        assert re.search(expected, printed), f"{line}\n{printed}"
    (script,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "serve.py").write_text(script)
    printed = run("python serve.py", tmp_path)
    base, adapter = printed.splitlines()[-2:]
    assert len(set(re.findall(r"'(\d)'", base))) > 1, "the base mixes its answers"
    assert adapter.count("'7'") >= 6, "0.95 of the adapter's answers are right"
