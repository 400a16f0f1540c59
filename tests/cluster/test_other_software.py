"""A machine of the cluster with other software is refused at the start: real Ray, two nodes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from glm_lora import __version__
from glm_lora.cluster.agreement import installed
from tests.conftest import ROOT
from tests.flow.processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHAPE = ["--num-nodes", "2", "--num-gpus-per-node", "1", "--tensor-model-parallel-size", "2"]


@pytest.fixture
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=2)
    yield made
    ray.shutdown()
    made.shutdown()


def another_torch(folder: Path) -> Path:
    """Installed where the second node's Python looks first: torch says that it is 2.0.0."""
    info = folder / "torch-2.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n")
    return folder


def another_wheel(folder: Path) -> Path:
    """This package under the same version with one line more."""
    shutil.copytree(ROOT / "glm_lora", folder / "glm_lora")
    with (folder / "glm_lora" / "rl" / "loss.py").open("a") as stream:
        stream.write("# a change that nobody released\n")
    return folder


OURS = dict(installed())


@pytest.mark.parametrize(
    ("install", "package", "theirs"),
    [(another_torch, "torch", "2.0.0"), (another_wheel, "glm-lora", f"{__version__} (source ")],
)
def test_a_node_with_another_version_is_refused_before_anything_is_written(
    tiny_root, tmp_path, cluster, install, package, theirs
):
    there = install(tmp_path / "other")
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(there)})
    cluster.wait_for_nodes()
    options = ["--num-rollout", "1", "--ray-address", cluster.address, *SHAPE]
    # Ray lets workers import from the driver's folder first: not from the one with the sources.
    with Run(tiny_root, tmp_path / "run", *options, cwd=tmp_path) as run:
        assert run.wait() == 2, run.text()
        text = " ".join(run.text().replace("\u2502", " ").split())
    found = re.search(rf"the same software: {package} (.+?) on machine 1 \(\S+\), (.+?) on", text)
    assert found, text
    assert found[1].startswith(theirs) and found[1] != found[2] == OURS[package]
    assert "on the driver expected: equal versions everywhere next: Install the same" in text
    assert not run.dir.exists()
