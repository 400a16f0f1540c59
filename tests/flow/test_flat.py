"""A long run holds what a short one holds: memory, descriptors, processes and ports stay flat."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.flow.processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SETTLED, LAST = 60, 160
"""Rollouts after which allocators and caches have what they need; 100 syncs later."""


def held(run: Run) -> dict[str, tuple[int, int, int, int]]:
    """Bytes, descriptors, listening ports and threads of driver, trainer and engine."""
    processes = {
        "driver": run.root,
        "trainer": run.named("RankActor")[0],
        "engine": run.named("EngineActor")[0],
    }
    found = {}
    for name, process in processes.items():
        ports = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        memory = process.memory_full_info().uss
        found[name] = (memory, process.num_fds(), len(ports), process.num_threads())
    return found


def test_a_hundred_syncs_leave_nothing_behind(tiny_root, tmp_path):
    more = ["--num-rollout", "500", "--save-interval", "20", "--no-tensorboard"]
    with Run(tiny_root, tmp_path / "run", *more) as run:
        run.until_rollout(SETTLED)
        before, shared = held(run), len(list(Path("/dev/shm").iterdir()))
        count = len(run.descendants())
        run.until_rollout(LAST)
        after = held(run)
        assert len(run.descendants()) <= count
        assert len(list(Path("/dev/shm").iterdir())) <= shared
    for name, (memory, descriptors, ports, threads) in before.items():
        now = after[name]
        assert now[0] <= memory * 1.02, f"{name}: {memory} bytes, then {now[0]}"
        assert now[1] <= descriptors + 2, f"{name}: {descriptors} descriptors, then {now[1]}"
        assert now[2] <= ports and now[3] <= threads + 2, name
