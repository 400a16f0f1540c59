"""A shell with few open files: more are taken where that is allowed, else the run is refused."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from glm_lora.cluster.limits import allow_open_files
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


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ((64, 4096), (4096, 4096)),
        ((1024, 10**9), (65_536, 10**9)),
        ((256, resource.RLIM_INFINITY), (65_536, resource.RLIM_INFINITY)),  # as on macOS
        ((10**6, 10**9), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        ((512, 512), None),
    ],
)
def test_the_limit_is_raised_to_what_ray_wants_and_never_lowered(monkeypatch, now, then):
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: now)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: made.append(limits))
    allow_open_files()
    assert made == ([then] if then else [])


@pytest.mark.slow
def test_a_low_limit_that_may_be_raised_is_raised(tiny_root, tmp_path):
    code, said = train(tiny_root, tmp_path / "run", 24, 4096)
    assert code == 0, said


@pytest.mark.slow
def test_the_fewest_that_are_allowed_are_enough(tiny_root, tmp_path):
    code, said = train(tiny_root, tmp_path / "run", 256, 256)
    assert code == 0, said
