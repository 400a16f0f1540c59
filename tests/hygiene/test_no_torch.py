"""The front half never imports torch: a wrong command fails before any of it is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "megatron", "ray", "sglang")
CHECK = f"""
import sys
heavy = sorted(set({HEAVY!r}) & set(sys.modules))
assert not heavy, heavy
print("clean")
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code + CHECK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("clean\n")


@pytest.mark.parametrize(
    "module",
    [
        "glm_lora",
        "glm_lora.errors",
        "glm_lora.fingerprint",
        "glm_lora.config",
        "glm_lora.protocols",
        "glm_lora.arch.checkpoint_index",
        "glm_lora.arch.foreign",
        "glm_lora.arch.naming",
        "glm_lora.arch.projections",
        "glm_lora.arch.spec",
        "glm_lora.targets.matrix",
        "glm_lora.targets.recipes",
        "glm_lora.targets.report",
        "glm_lora.targets.resolve",
        "glm_lora.targets.selection",
    ],
)
def test_importing(module: str) -> None:
    run(f"import {module}\n")


def test_a_whole_selection_and_its_report() -> None:
    run(
        "from glm_lora.config import SelectionConfig\n"
        "from glm_lora.targets.report import run_targets\n"
        "for as_json in (True, False):\n"
        "    run_targets(model_name='GLM-5.3-Flash', config=SelectionConfig(), as_json=as_json,\n"
        "                list_sites=not as_json)\n"
        "run_targets(model_name='tiny', config=SelectionConfig(), explain='q_proj')\n"
    )


def test_a_refusal() -> None:
    run(
        "from glm_lora.config import SelectionConfig\n"
        "from glm_lora.errors import TargetError\n"
        "from glm_lora.targets.report import run_targets\n"
        "try:\n"
        "    run_targets(model_name='tiny', config=SelectionConfig(target_modules='q_prj'))\n"
        "except TargetError:\n"
        "    pass\n"
        "else:\n"
        "    raise AssertionError\n"
    )
