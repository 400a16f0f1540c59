"""Signals while a run starts, and a second one: real Ray, real processes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.flow.processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LONG = ["--num-rollout", "500"]


def last_event(run: Path) -> dict:
    return json.loads((run / "events.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("launcher", ["ray", "inline"])
@pytest.mark.parametrize("delay", [0.3, 2.0, 6.0])
def test_a_signal_while_starting_ends_with_130_and_an_event(tiny_root, tmp_path, delay, launcher):
    with Run(tiny_root, tmp_path / "run", *LONG, launcher=launcher) as run:
        run.until(lambda: "first prompt" in run.text(), "the first prompt")
        time.sleep(delay)  # somewhere in Ray's start or the processes'
        below = run.descendants()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 130, run.text()
        _, left = psutil.wait_procs(below, timeout=30)
        assert not left, [p.cmdline() for p in left]
    event = last_event(run.dir)
    assert event["event"] == "stopped", event
    assert "stopped" in run.text() and "everything is saved" not in run.text()
    assert "Traceback" not in run.text()


def test_a_signal_while_the_cluster_is_busy(tiny_root, tmp_path):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        ray.init(address=cluster.address, log_to_driver=False)

        @ray.remote(num_cpus=2)
        class Other:
            def pid(self) -> int:
                return 1

        other = Other.remote()
        assert ray.get(other.pid.remote()) == 1
        with Run(tiny_root, tmp_path / "run", *LONG, "--ray-address", str(cluster.address)) as run:
            run.until(lambda: pending(), "waiting for room")
            run.process.send_signal(signal.SIGTERM)
            assert run.wait(60) == 130, run.text()
        assert "stopped while starting" in run.text()
        assert not run.dir.exists()
    finally:
        ray.shutdown()
        cluster.shutdown()


def pending() -> bool:
    groups = ray.util.placement_group_table().values()
    return any(group["state"] == "PENDING" for group in groups)


@pytest.mark.parametrize("launcher", ["ray", "inline"])
def test_a_second_signal_ends_at_once_in_one_box(tiny_root, tmp_path, launcher):
    with Run(tiny_root, tmp_path / "run", *LONG, launcher=launcher) as run:
        run.until(lambda: len(run.records()) >= 1, "a rollout")
        if launcher == "ray":
            (engine,) = run.named("EngineActor")
            engine.suspend()  # what asks it to close would wait
        below = run.descendants()
        run.process.send_signal(signal.SIGTERM)
        run.until(lambda: "stopping" in run.text(), "the first signal")
        first = len(run.text())
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(30) == 130, run.text()
        _, left = psutil.wait_procs(below, timeout=30)
        assert not left, [p.cmdline() for p in left]
    assert "Traceback" not in run.text(), run.text()
    top, *inside, bottom = run.text()[first:].strip().splitlines()
    assert "Interrupted" in top and len(inside) == 1 and not bottom.strip("\u2500\u2570\u256f")
    assert "stopped at once; what was saved before stands" in inside[0]
    assert last_event(run.dir)["event"] == "stopped"
