"""Worker processes for verifiers: one call at a time each, with a time limit that is kept.

A call that takes too long, or whose process dies, costs that call only: the process is killed and
another one is started for the next call.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import glm_lora
from glm_lora.errors import DataError

START_LIMIT = 120.0
"""Seconds a worker may take to import its verifier."""
_PACKAGE = Path(glm_lora.__file__).resolve()
# Only the standard library may be found first: a random.py in the current folder, or beside the
# package, would take its module's place. So the package is loaded from where it is here.
_START = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("glm_lora", {str(_PACKAGE)!r})
sys.modules["glm_lora"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["glm_lora"])
sys.path += [{str(_PACKAGE.parent.parent)!r}, os.getcwd()]
from glm_lora.rl.worker_main import main
raise SystemExit(main(sys.argv[1:]))
"""


class _LostError(Exception):
    """Why a call has no reply; never leaves this module."""


class _Worker:
    """One process. Every method is used by one thread at a time."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""

    def start(self) -> None:
        """Start the process and wait for its verifier; _LostError when that cannot be loaded."""
        if self._process is not None:
            return
        self._pending = b""
        self._process = subprocess.Popen(
            # -P: the current folder does not come first.
            [sys.executable, "-P", "-c", _START, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A group of its own, so that what a verifier starts is ended with it.
            start_new_session=True,
        )
        hello = self._read(time.monotonic() + START_LIMIT, "it took too long to start")
        if "error" in hello:
            self.stop()
            raise _LostError(hello["error"])

    def ask(self, request: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """The reply to one request; _LostError when there is none within ``limit`` seconds."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        line = json.dumps({**request, "limit": limit}, default=str) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise _LostError(self._ended()) from None
        return self._read(time.monotonic() + limit, f"it took longer than {limit:g} s")

    def _read(self, deadline: float, late: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.stop()
                    raise _LostError(late)
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise _LostError(self._ended())
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _ended(self) -> str:
        """Take leave of a process that ended by itself; how it ended."""
        process = self._process
        if process is None:  # stopped from another thread while this one was waiting for it
            return "its process was stopped"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        code = process.returncode
        self.stop()
        return f"its process ended with exit code {code}"

    def stop(self) -> None:
        """Kill the process and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class WorkerPool:
    """Runs calls on several workers at once, results in order.

    Args:
        arguments: Command line of ``worker_main``: the kind of verifier and its file.
        limit: Seconds one call may take.
        workers: Processes; by default one per core, at most 8.

    Raises:
        DataError: The verifier cannot be loaded.
    """

    def __init__(self, arguments: Sequence[str], limit: float, workers: int | None = None) -> None:
        self._limit = limit
        count = workers or max(1, min(8, os.cpu_count() or 1))
        self._workers = [_Worker(arguments) for _ in range(count)]
        try:
            self._workers[0].start()
        except _LostError as error:
            raise DataError(
                f"the reward {' '.join(arguments)} cannot be loaded: {error}",
                "a verifier that imports without error",
            ) from None

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """One reply per request; a lost call gives ``{"value": None, "reason": ...}``."""
        replies: list[dict[str, Any]] = [{} for _ in requests]
        todo = iter(range(len(requests)))
        lock = threading.Lock()

        def indices() -> Iterator[int]:
            while True:
                with lock:
                    index = next(todo, None)
                if index is None:
                    return
                yield index

        def work(worker: _Worker) -> None:
            for index in indices():
                try:
                    replies[index] = worker.ask(requests[index], self._limit)
                except _LostError as error:
                    replies[index] = {"value": None, "reason": f"the verifier is lost: {error}"}

        busy = self._workers[: max(1, len(requests))]
        threads = [threading.Thread(target=work, args=(w,), daemon=True) for w in busy[1:]]
        for thread in threads:
            thread.start()
        work(busy[0])
        for thread in threads:
            thread.join()
        return replies

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.stop()
