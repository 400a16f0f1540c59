"""The doctor on this machine, and on states of a machine that this one is not in."""

import http.server
import importlib.metadata
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from glm_lora.cli import main
from glm_lora.doctor import hardware, software
from glm_lora.doctor.finding import State
from glm_lora.doctor.self_test import TOLERANCE, self_tests
from glm_lora.doctor.sglang_env import describe, sglang

GOOD = {"sglang": "0.5.23", "torch": "2.14.1", "glm_lora": "0.1.0", "model": True, "plugin": ["x"]}


def test_every_declared_dependency_has_a_line():
    declared = [Requirement(text) for text in importlib.metadata.requires("glm-lora")]
    always = {r.name for r in declared if r.marker is None}
    found = {finding.name: finding for finding in software.packages()}
    assert always <= set(found)
    assert {found[name].state for name in always} == {State.OK}
    assert "flash-linear-attention" in found and "pytest" not in found


def test_a_package_that_is_too_old_or_absent():
    old = software._package(Requirement("peft>=99"), None)
    assert old.state is State.BROKEN and old.fatal and old.mend == "pip install 'peft>=99'"
    absent = software._package(Requirement("no-such-package-here>=1"), None)
    assert absent.state is State.MISSING and absent.fatal
    optional = software._package(Requirement("no-such-package-here>=1"), "gpu")
    assert optional.state is State.MISSING and not optional.fatal
    assert optional.mend == "pip install 'glm-lora[gpu]'"


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({}, [State.OK, State.OK]),
        ({"plugin": []}, [State.OK, State.MISSING]),
        ({"model": False}, [State.OK, State.BROKEN, State.OK]),
        ({"sglang": "0.4.0"}, [State.BROKEN]),
        ({"sglang": None}, [State.BROKEN]),
    ],
)
def test_what_an_sglang_environment_amounts_to(change, states):
    findings = list(describe(GOOD | change, Path("py")))
    assert [finding.state for finding in findings] == states
    assert all(bool(f.mend) is (f.state is not State.OK) for f in findings)


def test_interpreters_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (nothing,) = sglang(None)
    assert nothing.state is State.MISSING and nothing.mend == "make sglang-env"
    (absent,) = sglang(tmp_path / "python")
    assert absent.state is State.BROKEN
    script = tmp_path / "not-python"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    (wrong,) = sglang(script)
    assert wrong.state is State.BROKEN and "not a Python interpreter" in wrong.detail
    (without,) = sglang(Path(sys.executable))
    assert without.state is State.BROKEN and "not installed" in without.detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu(monkeypatch):
    (finding,) = hardware.cuda()
    monkeypatch.setattr(hardware.shutil, "which", lambda name: f"/usr/bin/{name}")
    (driver,) = hardware.cuda()
    assert finding.state is State.MISSING or Path("/proc/driver/nvidia").exists()
    assert driver.state is State.BROKEN, "a driver, but a torch that sees no device"


def test_folders(tmp_path):
    (fine,) = hardware.disks({"--model-dir": tmp_path / "not" / "yet" / "there"})
    assert str(tmp_path) in fine.detail and fine.state in (State.OK, State.MISSING)
    assert not (tmp_path / "not").exists(), "looking makes nothing"
    if os.geteuid():
        tmp_path.chmod(0o500)
        (closed,) = hardware.disks({"--model-dir": tmp_path / "x"})
        assert closed.state is State.BROKEN


def test_memory_and_ports():
    assert hardware.memory().detail.endswith("GiB free")
    assert hardware.ports().state is State.OK


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_the_hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server = http.server.HTTPServer(("127.0.0.1", 0), Quiet)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert hardware.hub().state is State.OK
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    gone = hardware.hub()
    assert gone.state is State.MISSING and not gone.fatal and address in gone.detail
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in hardware.hub().detail


def test_the_trainer_takes_a_step_here_and_a_device_that_is_not_there_is_broken():
    findings = self_tests(["cpu", "cuda:99"])
    assert findings[0].state is State.OK and "43 adapters moved" in findings[0].detail
    assert findings[1].state is State.BROKEN and findings[1].detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_computes_what_the_cpu_does():
    _, finding = self_tests(["cpu", "cuda:0"])
    assert finding.state is State.OK, f"within {TOLERANCE}: {finding.detail}"


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["doctor", "--no-self-test", "--json"]) in (0, 1)
    answer = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in answer["findings"]]
    for expected in ("python", "torch", "ray", "sglang", "memory", "--run-dir", "ports", "hub"):
        assert expected in names
    states = {finding["state"] for finding in answer["findings"]}
    assert states <= {"ok", "missing", "broken"} and "broken" not in states and answer["works"]
    assert main(["doctor", "--no-self-test", "--sglang-python", "nowhere/python"]) == 1
    lines = capsys.readouterr().out
    assert "mend: make sglang-env" in lines and "broken: sglang" in lines


def test_a_part_without_its_kernel_is_named_with_what_mends_it():
    from glm_lora.doctor.hardware import kernels

    (slow,) = kernels({"KDA delta rule": "torch (no flash-linear-attention)"})
    assert slow.state is State.MISSING and "gpu" in slow.mend
    (fast,) = kernels({"hyper-connections": "triton"})
    assert fast.state is State.OK and fast.detail == "triton"
