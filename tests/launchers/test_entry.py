"""The recipe's entry point: when it joins a cluster that is already up."""

from __future__ import annotations

import runpy

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
