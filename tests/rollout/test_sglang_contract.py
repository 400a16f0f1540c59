"""SGLang's own glm5_next and LoRA manager on CPU, with the plugin, on an adapter we exported."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from glm_lora.arch.spec import TINY
from glm_lora.export.sglang import export_sglang
from glm_lora.rollout.sglang_plugin.widths import MODULES, module_names
from glm_lora.rollout.sglang_server import serving_view
from tests.rollout.sglang_support import CPU_ENV, PYTHON
from tests.tiny_checkpoint import random_state, tiny_selection, write_checkpoint

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON.exists(), reason="run make sglang-env first"),
]
SCRIPT = Path(__file__).parent / "sglang_contract.py"


@pytest.fixture(scope="module")
def state():
    return random_state(tiny_selection())


@pytest.fixture(scope="module")
def result(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    checkpoint = serving_view(write_checkpoint(folder / "base"), folder / "view")
    adapter = export_sglang(state, folder / "adapter", "tiny")
    done = subprocess.run(
        [str(PYTHON), str(SCRIPT), str(checkpoint), str(adapter)],
        env={**os.environ, **CPU_ENV},
        capture_output=True,
        text=True,
        timeout=280,
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), "")
    assert line, done.stderr[-3000:]
    return json.loads(line.removeprefix("RESULT "))


def test_every_module_gives_the_adapters_delta(result):
    assert result["loaded"] == [True, ""]
    assert set(result["errors"]) == set(result["modules"]) == module_names(TINY)
    for name, error in result["errors"].items():
        assert result["effects"][name] > 0.05, f"{name}: nothing to compare"
        assert error <= 1e-5, f"{name}: fp32 rounding of two products of width 64"


def test_no_buffers_for_experts_and_one_per_module(result):
    assert set(result["buffers"]) == set(MODULES)


def test_the_ranks_digest_is_ours(result, state):
    assert result["digest"] == state.digest


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("misshapen", "has shape [4, 63] instead of [4, 64]"),
        ("unknown", "is no tensor of this model"),
        ("no B", "q_proj.lora_B.weight is missing"),
        ("no k", "k_proj.lora_A.weight is missing"),
        ("value", "received digest"),
        ("empty", "no tensors"),
    ],
)
def test_spoiled_adapters_are_refused_at_load(result, kind, message):
    success, reason = result["refused"][kind]
    assert success is False
    assert message in reason


def test_the_plugin_is_installed_there_without_our_pins():
    code = "import glm_lora.rollout.sglang_plugin as p; print(p.KNOWN_VERSIONS)"
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, cwd="/")
    assert "0.5.23" in done.stdout, done.stderr
