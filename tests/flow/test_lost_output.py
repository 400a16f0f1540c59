"""A run whose output nobody can read any more saves what it trained, ends, and says why.

The real thing each time: a pipe whose reader goes, a terminal that closes, a disk that is full.
"""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm_lora.checkpoint.train_state import latest_checkpoint
from glm_lora.report.run_data import METRICS, read_lines
from glm_lora.report.run_folder import EVENTS
from tests.conftest import ROOT
from tests.prepared import folders
from tests.tiny_runs import LAUNCHER, train


def command(root: Path, run: Path, *options: str) -> list[str]:
    made = [sys.executable, LAUNCHER, "train", "--model-name", "tiny", "--run-dir", str(run)]
    return [*made, "--num-rollout", "400", "--save-interval", "0", *folders(root), *options]


def check_saved(run: Path, root: Path) -> str:
    """All that was trained is in a checkpoint, from which the run goes on; how it ended."""
    done = len(list(read_lines(run / METRICS)))
    assert 0 < done < 400
    assert latest_checkpoint(run) == run / "checkpoints" / f"iter_{done:07d}"
    (ended,) = [e for e in read_lines(run / EVENTS) if e["event"] in ("stopped", "failed")]
    assert train(root, run, "--num-rollout", str(done + 1), "--resume") == 0
    return ended["text"]


@pytest.mark.parametrize(
    ("launcher", "log"), [("inline", "text"), ("inline", "json"), ("ray", "text")]
)
def test_a_reader_that_goes(tiny_root, tmp_path, launcher, log):
    run = tmp_path / "run"
    words = command(tiny_root, run, "--launcher", launcher, "--log-format", log)
    line = f"{shlex.join(words)} | head -n 12 > /dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert "nobody reads the output" in done.stderr and "saved in" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert "nobody reads the output" in check_saved(run, tiny_root)


def test_ctrl_c_with_a_reader_that_dies_of_it_too(tiny_root, tmp_path):
    """As ``train | tee log``: the terminal sends SIGINT to both."""
    run = tmp_path / "run"
    line = f"{shlex.join(command(tiny_root, run, '--launcher', 'inline'))} | cat"
    process = subprocess.Popen(
        ["bash", "-c", line],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_rollouts(process, run)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "saved in" in said and "Traceback" not in said, said
    check_saved(run, tiny_root)


def test_ctrl_c_with_a_reader_of_both_streams(tiny_root, tmp_path):
    """As ``train 2>&1 | tee log``: what stopped the run can be told nobody; its code stays."""
    run = tmp_path / "run"
    reader = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0
    )
    process = subprocess.Popen(
        command(tiny_root, run, "--launcher", "inline"),
        stdout=reader.stdin,
        stderr=subprocess.STDOUT,
        process_group=reader.pid,
    )
    assert reader.stdin
    reader.stdin.close()
    wait_for_rollouts(process, run)
    os.killpg(reader.pid, signal.SIGINT)
    assert (process.wait(60), reader.wait(60)) == (130, -signal.SIGINT)
    check_saved(run, tiny_root)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train", "--no-such-option"], 2),
        (["train", "--model-name", "no-such-model"], 2),
        (["report", "/no/such/run"], 2),
        (["targets", "--model-name", "tiny"], 0),
    ],
)
def test_errors_that_nobody_can_read_keep_their_code(words, code):
    reading, writing = os.pipe()
    os.close(reading)
    lost = [writing, *([os.open("/dev/full", os.O_WRONLY)] if Path("/dev/full").exists() else [])]
    for stream in lost:
        done = subprocess.run(
            [sys.executable, "-m", "glm_lora", *words],
            stdout=subprocess.PIPE,
            stderr=stream,
            cwd=ROOT,
            timeout=60,
        )
        os.close(stream)
        assert done.returncode == code
        assert bool(done.stdout) == (code == 0)


def test_a_terminal_that_closes(tiny_root, tmp_path):
    run = tmp_path / "run"
    pid, terminal = pty.fork()
    if pid == 0:
        words = command(tiny_root, run, "--launcher", "inline")
        os.execv(words[0], words)
    deadline = time.monotonic() + 120
    while not (run / METRICS).exists() or len(list(read_lines(run / METRICS))) < 2:
        assert time.monotonic() < deadline
        os.read(terminal, 65536)
    os.close(terminal)
    os.waitpid(pid, 0)
    assert "saved in" in check_saved(run, tiny_root)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_log_on_a_disk_that_is_full(tiny_root, tmp_path):
    """The first line cannot be written: nothing is trained, and the run says why."""
    words = command(tiny_root, tmp_path / "run", "--launcher", "inline")
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert "the output cannot be written: No space left on device" in done.stderr, done.stderr


def wait_for_rollouts(process: subprocess.Popen, run: Path) -> None:
    deadline = time.monotonic() + 120
    while not (run / METRICS).exists() or len(list(read_lines(run / METRICS))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline, "no rollout within two minutes"
        time.sleep(0.1)
