"""Joining a Ray cluster that is up: two nodes on one machine, one of them lost in mid-run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.flow.processes import Run
from tests.flow.test_train_tiny import adapter, metric, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SHAPE = ["--num-nodes", "2", "--num-gpus-per-node", "1", "--tensor-model-parallel-size", "2"]


@pytest.fixture
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    ray.shutdown()
    made.shutdown()


def join(root: Path, run: Path, cluster, *options: str) -> Run:
    return Run(root, run, *options, "--ray-address", cluster.address)


def test_a_cluster_that_is_too_small_is_refused_before_anything_is_written(
    tiny_root, tmp_path, cluster
):
    cluster.add_node(num_cpus=1)
    with join(tiny_root, tmp_path / "run", cluster, "--num-rollout", "1", *SHAPE) as run:
        assert run.wait() == 2, run.text()
        text = " ".join(run.text().replace("\u2502", " ").split())
        assert "with 0 GPU(s) and 1 CPU(s)" in text, text
        assert "missing" in text and "1 with 0 GPU(s)" in text, text
        assert not run.dir.exists()


def test_no_cluster_at_the_address(tiny_root, tmp_path):
    options = ["--num-rollout", "1", "--ray-address", "127.0.0.1:1"]
    with Run(tiny_root, tmp_path / "run", *options) as run:
        assert run.wait() == 2, run.text()
        assert not run.dir.exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_several_machines_without_a_cluster_are_refused(tiny_root, tmp_path, more):
    with Run(tiny_root, tmp_path / "run", "--num-nodes", "3", *more) as run:
        assert run.wait() == 2, run.text()
    assert "--num-nodes 3 without --ray-address" in run.text(), run.text()
    assert not run.dir.exists()


def test_a_lost_node_comes_back_and_the_run_goes_on(tiny_root, tmp_path, cluster):
    more = ["--num-rollout", "8", "--save-interval", "1"]
    assert train(tiny_root, tmp_path / "one", "--num-rollout", "8") == 0
    nodes = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=1)]
    cluster.wait_for_nodes()
    with join(tiny_root, tmp_path / "run", cluster, *more, *SHAPE) as run:
        run.until_rollout(3)
        cluster.remove_node(nodes[1], allow_graceful=False)
        run.until(lambda: "restart 1 of 3" in run.text(), "the restart")
        time.sleep(2)
        cluster.add_node(num_cpus=1)
        assert run.wait() == 0, run.text()
    assert metric(run.dir, "rollout/step") == list(range(8))
    # Two tensor-parallel ranks round in another order than one.
    for name in ("rollout/raw_reward", "train/grad_norm"):
        expected = pytest.approx(metric(tmp_path / "one", name), rel=1e-3)
        assert metric(run.dir, name) == expected
    assert adapter(run.dir)
    ray.init(address=cluster.address, log_to_driver=False)  # the cluster goes on, all is given back

    def processors() -> tuple[float, float]:
        return ray.available_resources().get("CPU", 0), ray.cluster_resources()["CPU"]

    # Ray counts the killed node until its health checks have failed for long enough.
    end = time.monotonic() + 90
    while processors() != (3, 3) and time.monotonic() < end:
        time.sleep(0.5)
    assert processors() == (3, 3)
