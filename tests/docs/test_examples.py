"""The examples of the Python API, run as they stand, each in the folder the one before left."""

import re
import runpy
import sys

import pytest

import glm_lora
from glm_lora.cli import main
from glm_lora.errors import ConfigError
from tests.conftest import ROOT
from tests.prepared import folders

EXAMPLES = ROOT / "docs" / "examples"
ORDER = (
    ("resolve_targets", "485 projections, 65,955,840 parameters\n.*did you mean 'q_proj'"),
    ("selection", r"self_attn\.q_a_proj.*True"),
    ("glm_lora_error", r"what: .*kv_b_proj.*next: .*a ValueError: True"),
    ("prepare", "made nothing, all was there"),
    ("train", '"rollout/step": 5'),
    ("export", "peft version 6 digest .*sglang version 6 digest"),
    ("load_adapter", "86 tensors, equal: True"),
    ("adapter_state", r"0\.\d+ model\.language_model\.layers\.0"),
    ("evaluate", r"base 0\.\d+\nadapter 0\.\d+"),
    ("write_report", r"report\.html"),
)


def test_there_is_an_example_for_each_name():
    snake = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in glm_lora.__all__}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == snake == {name for name, _ in ORDER}
    for name in glm_lora.__all__:
        assert getattr(glm_lora, name).__doc__, f"{name} is documented"


def test_the_examples_run_in_order(tiny_root, capsys, monkeypatch):
    for name, expected in ORDER:
        monkeypatch.setattr(sys, "argv", [name, str(tiny_root)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        printed = capsys.readouterr().out
        assert re.search(expected, printed, re.DOTALL | re.IGNORECASE), f"{name}: {printed}"


def test_the_entry_about_b_is_true_as_typed(tiny_root, tmp_path, capsys, monkeypatch):
    text = (ROOT / "docs" / "when-it-breaks.md").read_text()
    ((options, script, folder),) = re.findall(
        r"`glm-lora train --model-name tiny ([^`]+)` and then `python (\S+_state\.py) (\w+)`", text
    )
    monkeypatch.chdir(tmp_path)
    command = ["train", "--model-name", "tiny", "--launcher", "inline", *options.split()]
    assert main([*command, *folders(tiny_root)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [script, folder])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    sizes = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(sizes) == 5 and min(sizes) > 0


def test_unknown_options_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'num_rollout'"):
        glm_lora.train("tiny", run_dir="nowhere", num_rollouts=3)
    with pytest.raises(AttributeError, match="no attribute 'resolve_target'"):
        glm_lora.resolve_target  # noqa: B018


def test_packages_of_the_same_name_do_not_hide_the_functions():
    import glm_lora.export.write
    import glm_lora.train.job

    assert callable(glm_lora.train) and callable(glm_lora.export)
    from glm_lora.train.job import Job

    assert Job.__module__ == "glm_lora.train.job"
