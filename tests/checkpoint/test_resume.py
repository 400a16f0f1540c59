"""Interrupted, killed and shared conversions end in the same base, or in none."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.synthetic_checkpoint import write_checkpoint
from glm_lora.checkpoint import base_writer
from glm_lora.checkpoint.base_build import PARTIAL, PLAN_FILE
from glm_lora.checkpoint.files import exclusive, new_partial
from glm_lora.checkpoint.manifest import check_base
from glm_lora.checkpoint.prepare import prepare
from glm_lora.checkpoint.progress import Progress
from glm_lora.checkpoint.torch_dist import RELEASE, TRACKER
from glm_lora.errors import CheckpointError
from tests.checkpoint.released_case import SMALL, case
from tests.conftest import ROOT

PARTS, CHUNKS = 150_000, 10_000
CHILD = f"""
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from glm_lora.checkpoint import base_writer
from glm_lora.checkpoint.prepare import prepare
from tests.checkpoint.released_case import case
base_writer.PART_BYTES, base_writer.CHUNK_BYTES = {PARTS}, {CHUNKS}
root = Path(sys.argv[1])
print("ready", flush=True)
report = lambda p: None
if len(sys.argv) > 2:
    import time
    report = lambda p: time.sleep(float(sys.argv[2]))
print(prepare(case(root, root / "hf", workers=2), report).fingerprint, flush=True)
"""


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_writer, "PART_BYTES", PARTS)
    monkeypatch.setattr(base_writer, "CHUNK_BYTES", CHUNKS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "hf", SMALL, fp8=True)
    return tmp_path


def stop_after(fraction: float):
    def report(progress: Progress) -> None:
        if progress.done > fraction * progress.total:
            raise KeyboardInterrupt

    return report


@pytest.mark.usefixtures("small_parts")
def test_finished_parts_are_not_written_again(root: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(case(root, root / "hf", workers=1), stop_after(0.6))
    partial = root / "base" / PARTIAL
    finished = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.distcp")}
    assert len(finished) >= 3 and not (root / "base" / TRACKER).exists()
    with pytest.raises(CheckpointError, match="unfinished"):
        check_base(root / "base", SMALL)
    seen: list[Progress] = []
    result = prepare(case(root, root / "hf", verify=True), seen.append)
    assert result.made == ("base",)
    assert seen[0].done > 0.3 * seen[0].total, "the bar starts where the work was left"
    assert seen[-1].done == seen[-1].total or seen[-1].step == "verifying"
    now = {p.name: p.stat().st_mtime_ns for p in (root / "base" / RELEASE).glob("*.distcp")}
    assert finished.items() <= now.items()
    assert not partial.exists() and not (root / "base" / RELEASE / PLAN_FILE).exists()
    fresh = prepare(case(root / "other", root / "hf"))
    assert fresh.fingerprint == result.fingerprint


@pytest.mark.usefixtures("small_parts")
def test_parts_of_another_source_are_dropped(root: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(case(root, root / "hf", workers=1), stop_after(0.6))
    write_checkpoint(root / "hf", SMALL, fp8=True, seed=5)
    result = prepare(case(root, root / "hf", verify=True))
    assert result.fingerprint == prepare(case(root / "other", root / "hf")).fingerprint


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("damage", ["short file", "no sidecar", "broken sidecar"])
def test_a_part_is_finished_only_with_its_sidecar(root: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(case(root, root / "hf", workers=1), stop_after(0.6))
    sidecar = sorted((root / "base" / PARTIAL).glob("__*_0.json"))[0]
    if damage == "short file":
        os.truncate(sidecar.with_suffix(".distcp"), 100)
    elif damage == "no sidecar":
        sidecar.unlink()
    else:
        sidecar.write_text("{")
    prepare(case(root, root / "hf", verify=True))
    check_base(root / "base", SMALL)


@pytest.mark.usefixtures("small_parts")
def test_a_crash_before_the_tracker_is_no_base(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm_lora.checkpoint import base_build

    write = base_build.write_atomic

    def die_at_tracker(path: Path, data: str) -> None:
        if path.name == TRACKER:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(base_build, "write_atomic", die_at_tracker)
    with pytest.raises(KeyboardInterrupt):
        prepare(case(root, root / "hf"))
    with pytest.raises(CheckpointError, match="unfinished"):
        check_base(root / "base", SMALL)
    monkeypatch.undo()
    assert prepare(case(root, root / "hf", verify=True)).made == ("base",)


def test_two_at_once(root: Path) -> None:
    (root / "base").mkdir()
    with exclusive(root / "base"), pytest.raises(CheckpointError, match="another process"):
        prepare(case(root, root / "hf"))
    assert prepare(case(root, root / "hf")).made == ("base",)


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead, alive = tmp_path / f"x.partial{child.pid}", tmp_path / f"x.partial{os.getppid()}"
    other = tmp_path / "x.partial-mine"
    for folder in (dead, alive, other):
        folder.mkdir()
    made = new_partial(tmp_path / "x")
    assert made.is_dir() and alive.exists() and other.exists() and not dead.exists()


def run_child(root: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), *arguments],
        cwd=ROOT, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_killed_at_random_points(root: Path) -> None:
    expected = prepare(case(root / "reference", root / "hf")).fingerprint
    rng = random.Random(0)
    kills = 0
    for _ in range(6):
        child = run_child(root, "0.005")
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.05, 1.0))
        child.send_signal(signal.SIGKILL)
        if child.wait() == -signal.SIGKILL:
            kills += 1
            if (root / "base" / TRACKER).exists():
                check_base(root / "base", SMALL)
            else:
                with pytest.raises(CheckpointError):
                    check_base(root / "base", SMALL)
    assert kills >= 3
    result = prepare(case(root, root / "hf", verify=True))
    assert result.fingerprint == expected


@pytest.mark.slow
def test_several_ranks_make_the_same_base(root: Path) -> None:
    expected = prepare(case(root / "reference", root / "hf")).fingerprint
    ranks = [
        run_child(
            root, WORLD_SIZE="3", RANK=str(rank), MASTER_ADDR="localhost", MASTER_PORT="29653"
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert outputs == [["ready", expected]] * 3
    check_base(root / "base", SMALL)
