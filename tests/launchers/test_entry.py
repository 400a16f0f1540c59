"""The entry points: a Ctrl-C at any moment, and when a cluster that is already up is joined."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT

JOIN = {"MILES_SCRIPT_EXTERNAL_RAY": "1"}
ADDRESS = ["--ray-address", "auto"]


@pytest.fixture(scope="module")
def arguments():
    script = runpy.run_path(str(ROOT / "launchers" / "run_glm5_3_flash_lora.py"))
    return script["arguments"]


@pytest.mark.parametrize(
    ("given", "environment", "added"),
    [
        (["train"], JOIN, ADDRESS),
        (["train", "--launcher", "ray"], JOIN, ADDRESS),
        (["train", "--launcher=ray"], JOIN, ADDRESS),
        (["train"], {}, []),
        (["train"], {"MILES_SCRIPT_EXTERNAL_RAY": "0"}, []),
        (["train"], {"MILES_SCRIPT_EXTERNAL_RAY": ""}, []),
        (["train", "--ray-address", "10.0.0.1:6379"], JOIN, []),
        (["train", "--ray-address=10.0.0.1:6379"], JOIN, []),
        (["train", "--launcher", "inline"], JOIN, []),
        (["train", "--launcher=torchrun"], JOIN, []),
        (["train", "--launcher"], JOIN, []),
        (["prepare"], JOIN, []),
        ([], JOIN, []),
    ],
)
def test_a_running_cluster_is_joined_where_the_command_leaves_it_open(
    arguments, given, environment, added
):
    assert arguments(given, environment) == [*given, *added]


INTERRUPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Finalized:  # as a callback of the import system: what is raised in it is dropped
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module}:
            Finalized() if {finalizer} else os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize(
    "entry",
    [
        ["-m", "glm_lora"],
        ["-c", "import sys; from glm_lora.__main__ import main; sys.exit(main())"],
        [str(ROOT / "launchers" / "run_glm5_3_flash_lora.py")],
    ],
    ids=["module", "console script", "launcher"],
)
@pytest.mark.parametrize(
    ("module", "finalizer"),
    [("glm_lora.cli", False), ("pydantic", True), ("glm_lora.cluster.plan", False)],
    ids=["first import", "in a finalizer", "in the command"],
)
def test_ctrl_c_while_modules_are_imported(entry, module, finalizer, tmp_path):
    program = INTERRUPT.format(module=repr(module), finalizer=finalizer)
    (tmp_path / "sitecustomize.py").write_text(program)
    done = subprocess.run(
        [sys.executable, *entry, "train", "--model-name", "tiny", "--dry-run"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_the_console_script_is_the_entry_that_was_tested():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"glm-lora": "glm_lora.__main__:main"}
