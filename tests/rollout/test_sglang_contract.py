"""SGLang's own glm5_next and LoRA manager on CPU, with the plugin, on an adapter we exported."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from glm_lora.arch.spec import TINY
from glm_lora.checkpoint import tiny
from glm_lora.checkpoint.base_build import build_base, plan_base
from glm_lora.checkpoint.random_init import RandomSource
from glm_lora.checkpoint.tiny_folder import write_folder
from glm_lora.checkpoint.to_hf import write_hf
from glm_lora.export.sglang import export_sglang
from glm_lora.protocols import AdapterState
from glm_lora.rollout.sglang_plugin.widths import MODULES, module_names
from glm_lora.rollout.sglang_server import serving_view
from tests.rollout.sglang_support import CPU_ENV, PYTHON
from tests.tiny_checkpoint import random_state, tiny_selection

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON.exists(), reason="run make sglang-env first"),
]
SCRIPT = Path(__file__).parent / "sglang_contract.py"


@pytest.fixture(scope="module")
def state():
    return random_state(tiny_selection())


def contract(folder: Path, state: AdapterState, ranks: int) -> list[dict]:
    """What each tensor-parallel rank found; all run at once."""
    checkpoint = serving_view(written_by_prepare(folder / "base"), folder / "view")
    adapter = export_sglang(state, folder / "adapter", "tiny")
    processes = [
        subprocess.Popen(
            [str(PYTHON), str(SCRIPT), str(checkpoint), str(adapter), str(rank), str(ranks)],
            env={**os.environ, **CPU_ENV},
            stdout=subprocess.PIPE,
            stderr=(folder / f"errors{rank}").open("w"),
            text=True,
        )
        for rank in range(ranks)
    ]
    results = []
    for rank, process in enumerate(processes):
        try:
            out, _ = process.communicate(timeout=280)
        finally:
            process.kill()
        line = next((x for x in out.splitlines() if x.startswith("RESULT ")), "")
        assert line, (folder / f"errors{rank}").read_text()[-3000:]
        results.append(json.loads(line.removeprefix("RESULT ")))
    return results


@pytest.fixture(scope="module")
def result(state, tmp_path_factory):
    return contract(tmp_path_factory.mktemp("contract"), state, 1)[0]


def check_deltas(result: dict) -> None:
    assert result["loaded"] == [True, ""]
    assert set(result["errors"]) == set(result["modules"]) == module_names(TINY)
    for name, error in result["errors"].items():
        assert result["effects"][name] > 0.05, f"{name}: nothing to compare"
        assert error <= 1e-5, f"{name}: fp32 rounding of two products of width 64"


def test_every_module_gives_the_adapters_delta(result):
    check_deltas(result)


def test_every_module_gives_the_adapters_delta_on_two_ranks(state, tmp_path):
    """f_a and g_a are whole on both, everything else is cut as its base is."""
    for rank in contract(tmp_path, state, 2):
        check_deltas(rank)


def test_the_checkpoint_fills_every_parameter(result):
    assert [name for name in result["unfilled"] if "visual" not in name] == []


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


MODEL_CONFIG = """
import json, sys
from sglang.srt.configs.model_config import ModelConfig
config = ModelConfig(model_path=sys.argv[1])
text = config.hf_text_config
print("RESULT " + json.dumps({
    "architectures": config.hf_config.architectures, "hidden": config.hidden_size, "mhc": text.mhc,
}))
"""


def written_by_prepare(folder: Path) -> Path:
    """What ``prepare --model-name tiny`` leaves, not yet pre-trained."""
    folder.mkdir()
    write_folder(folder, tiny.build_model(TINY), 0, TINY)
    return folder


def written_by_to_hf(folder: Path) -> Path:
    """What ``prepare --init random --to-hf`` writes."""
    source = RandomSource(0)
    manifest = build_base(plan_base(folder / "base", TINY, source, source.describe()))
    write_hf(folder / "base", manifest, None, folder / "hf")
    return folder / "hf"


def nulls_as_written(folder: Path) -> Path:
    """The same with every null that transformers' own configuration holds (5.17 writes them)."""
    written_by_prepare(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["architectures"] = None
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("write", [written_by_prepare, written_by_to_hf, nulls_as_written])
def test_sglang_reads_the_configuration_of_every_checkpoint_made_here(write, tmp_path):
    view = serving_view(write(tmp_path / "checkpoint"), tmp_path / "view")
    done = subprocess.run(
        [str(PYTHON), "-c", MODEL_CONFIG, str(view)],
        env={**os.environ, **CPU_ENV},
        capture_output=True,
        text=True,
        timeout=200,
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), "")
    assert line, done.stderr[-3000:]
    assert json.loads(line.removeprefix("RESULT ")) == {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "hidden": TINY.hidden_size,
        "mhc": True,
    }


def test_the_plugin_is_installed_there_without_our_pins():
    code = "import glm_lora.rollout.sglang_plugin as p; print(p.KNOWN_VERSIONS)"
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, cwd="/")
    assert "0.5.23" in done.stdout, done.stderr
