"""Shell scripts: shellcheck for all; what the Slurm and KubeRay starters run without a cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

LAUNCHERS = ROOT / "launchers"
SCRIPTS = sorted([*LAUNCHERS.glob("*.sh"), *(ROOT / "benchmarks").glob("*.sh")])
TRAIN = [
    "--model-name",
    "GLM-5.3-Flash",
    "--exclude-modules",
    "*.mlp.experts.*,it's",
    "--seed",
    "3",
]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck(script):
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_nothing_is_killed_by_name(script):
    text = script.read_text()
    for word in ("pkill", "killall", "ray stop"):
        assert word not in text


def slurm(tmp_path: Path, *arguments: str, nodes: int = 3, **environment: str):
    """Run slurm.sh as Slurm would, with a ``scontrol`` that only names the nodes."""
    tools = tmp_path / "bin"
    tools.mkdir()
    names = " ".join(f"node{n}" for n in range(nodes))
    (tools / "scontrol").write_text(f'#!/bin/sh\nprintf "%s\\n" {names}\n')
    (tools / "scontrol").chmod(0o755)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]",
        "SLURM_JOB_ID": "1234567",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
        **environment,
    }
    command = ["bash", str(LAUNCHERS / "slurm.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_slurm_starts_a_head_workers_and_the_launcher(tmp_path):
    done = slurm(tmp_path, "--show", *TRAIN)
    assert done.returncode == 0, done.stderr
    head, *workers, train = [shlex.split(line.rstrip("& ")) for line in done.stdout.splitlines()]
    port = head[head.index("--port") + 1]
    assert head[head.index("--nodelist") + 1] == "node0" and "--head" in head
    assert head[head.index("--num-gpus") + 1] == "4"
    assert [w[w.index("--nodelist") + 1] for w in workers] == ["node1", "node2"]
    assert all(w[w.index("--address") + 1] == f"node0:{port}" for w in workers)
    assert train[-len(TRAIN) :] == TRAIN, "quoting survives"
    assert train[train.index("--ray-address") + 1] == f"node0:{port}"
    assert str(LAUNCHERS / "run_glm5_3_flash_lora.py") in train


def test_every_slurm_step_uses_the_token(tmp_path):
    done = slurm(tmp_path, "--show", *TRAIN)
    for line in done.stdout.splitlines():
        assert "env RAY_AUTH_MODE=token " in line, line


def test_slurm_refuses_to_run_outside_a_job(tmp_path):
    done = slurm(tmp_path, "--show", SLURM_JOB_NODELIST="")
    assert done.returncode == 2 and "sbatch" in done.stderr


def test_slurm_refuses_another_folder(tmp_path):
    done = slurm(tmp_path, "--show", SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and "checkout" in done.stderr


def kuberay(*arguments: str):
    command = ["bash", str(LAUNCHERS / "kuberay.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_kuberay_writes_a_manifest_of_one_cluster(tmp_path):
    done = kuberay("--show", "--image", "i:1", "--claim", "c", "--nodes", "8", "--gpus", "4",
                   "--", *TRAIN)  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    assert manifest["kind"] == "RayJob" and manifest["spec"]["backoffLimit"] == 0
    words = shlex.split(manifest["spec"]["entrypoint"])
    assert words[-len(TRAIN) :] == TRAIN, "quoting survives"
    assert words[1] == "launchers/run_glm5_3_flash_lora.py"
    cluster = manifest["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 7
    for pods in (cluster["headGroupSpec"], group):
        (container,) = pods["template"]["spec"]["containers"]
        assert container["image"] == "i:1"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}


def test_kuberay_on_one_machine_has_no_workers():
    done = kuberay("--show", "--image", "i:1", "--claim", "c", "--")
    assert "workerGroupSpecs" not in yaml.safe_load(done.stdout)["spec"]["rayClusterSpec"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--claim", "c"], "--image is missing"),
        (["--image", "i"], "--claim is missing"),
        (["--image", "i", "--claim", "c", "--nodes", "two"], "--nodes is 'two'"),
        (["--imgae", "i"], "unknown option '--imgae'"),
        (["--image"], "--image needs a value"),
        (["--image", "i", "--claim", "c", "--name", "My Job"], "DNS label"),
        (["--image", "a: b", "--claim", "c"], "--image is 'a: b'"),
        (["--image", "i", "--claim", "x, y}"], "--claim is 'x, y}'"),
        (["--image", "i", "--claim", "c", "--", "--num-nodes", "3"], "--num-nodes after --"),
        (["--image", "i", "--claim", "c", "--", "--ray-address=x"], "--ray-address after --"),
    ],
)
def test_kuberay_refuses(arguments, said):
    done = kuberay("--show", *arguments)
    assert done.returncode == 2 and said in done.stderr


def test_kuberay_says_how_it_is_called():
    done = kuberay("--help")
    assert done.returncode == 0 and "--image IMAGE" in done.stdout, done
    assert "set -euo" not in done.stdout
