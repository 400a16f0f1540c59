"""A shell with few open files: more are taken where that is allowed, else the run is refused."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prepared import folders
from tests.support import words
from tests.tiny_runs import LAUNCHER


def train(root: Path, run: Path, soft: int, hard: int) -> tuple[int, str]:
    command = [sys.executable, LAUNCHER, "train", "--model-name", "tiny", "--launcher", "inline"]
    command += ["--num-rollout", "1", "--run-dir", str(run), *folders(root)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    return done.returncode, words(done.stdout + done.stderr)


def test_too_few_are_refused_before_anything_is_written(tiny_root, tmp_path):
    code, said = train(tiny_root, tmp_path / "run", 64, 64)
    assert code == 2, said
    assert "this process may have 64 files open" in said and "ulimit -n" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_low_limit_that_may_be_raised_is_raised(tiny_root, tmp_path):
    code, said = train(tiny_root, tmp_path / "run", 24, 4096)
    assert code == 0, said


@pytest.mark.slow
def test_the_fewest_that_are_allowed_are_enough(tiny_root, tmp_path):
    code, said = train(tiny_root, tmp_path / "run", 256, 256)
    assert code == 0, said
