"""A training run as a process of its own, and finding and killing the processes below it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.prepared import folders
from tests.tiny_runs import LAUNCHER


class Run:
    """``train --model-name tiny`` in a process; leaving the ``with`` block leaves none behind."""

    def __init__(
        self,
        root: Path,
        run_dir: Path,
        *options: str,
        launcher: str = "ray",
        log: Path | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.dir = run_dir
        self.log = log or run_dir.with_suffix(".log")
        command = [sys.executable, LAUNCHER, "train", "--model-name", "tiny"]
        command += ["--run-dir", str(run_dir), "--launcher", launcher, *folders(root), *options]
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
            )
        self.root = psutil.Process(self.process.pid)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        children = self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for child in children:
            if child.is_running():
                child.kill()

    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def records(self) -> list[dict]:
        """Metric records so far."""
        path = self.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, ready: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        """Wait for a condition while the run is alive."""
        end = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < end, f"no {what} in {seconds} s:\n{self.text()}"
            time.sleep(0.02)

    def until_rollout(self, number: int) -> None:
        """Wait until rollout ``number`` (from 1) is recorded."""
        self.until(lambda: len(self.records()) >= number, f"rollout {number}")

    def wait(self, seconds: float = 180.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None

    def descendants(self) -> list[psutil.Process]:
        """Every process below the run's."""
        try:
            return self.root.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def named(self, name: str) -> list[psutil.Process]:
        """Descendants whose command line holds ``name``."""
        found = []
        for process in self.descendants():
            try:
                if name in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found
