"""``eval`` on a finished run: samples without a reward are counted and explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import glm_lora
from glm_lora.cli import main
from glm_lora.errors import RolloutError
from tests.support import words
from tests.tiny_runs import train

REWARD = "def reward(prompt, response, label, metadata):\n    return float(response == label)\n"
SOME = (
    "def reward(prompt, response, label, metadata):\n"
    "    if prompt.startswith('7'):\n"
    "        raise ValueError('seven is not scored')\n"
    "    return 1.0\n"
)
NONE = "def reward(prompt, response, label, metadata):\n    raise ValueError('the model is gone')\n"


@pytest.fixture(scope="module")
def run(tiny_root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    (folder / "reward.py").write_text(REWARD)
    options = ["--num-rollout", "1", "--reward", str(folder / "reward.py")]
    assert train(tiny_root, folder / "run", *options) == 0
    return folder / "run"


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{digit}?>", "label": digit} for digit in "789"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evaluate(run, prompts, capsys, wide_errors):
    def call(reward: str, *options: str, rows: str = "") -> tuple[int, str, str]:
        (run.parent / "reward.py").write_text(reward)
        if rows:
            prompts.write_text(rows)
        code = main(["eval", "--run", str(run), "--prompt-data", str(prompts), *options])
        said = capsys.readouterr()
        return code, said.out, words(said.err)

    return call


def strict(text: str):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_samples_without_a_reward_are_counted_and_the_first_reason_is_said(evaluate):
    code, out, err = evaluate(SOME, "--json", "--n-samples-per-prompt", "4")
    assert code == 0, err
    result = strict(out)
    for side in ("base", "adapter"):
        assert result[side]["eval/unscored"] == 4 and result[side]["eval/pass@4"] == 1
        note = f"note: {side}: 4 of 12 responses have no reward: ValueError: seven is not scored"
        assert note in err
    code, out, err = evaluate(SOME, "--n-samples-per-prompt", "1")
    assert code == 0 and "eval/unscored" in out and "1 of 3 responses" in err


EVERY_SECOND = """
import itertools, os

def reward(prompt, response, label, metadata):
    for number in itertools.count():
        try:
            os.mkdir(os.path.join(metadata["folder"], str(number)))
            break
        except FileExistsError:
            pass
    assert number % 2 == 0, "every second one"
    return 1.0
"""


def test_a_number_that_nobody_knows_is_valid_json(evaluate, tmp_path):
    """One of the two samples is scored, so pass@2 is not known."""
    (tmp_path / "calls").mkdir()
    metadata = {"folder": str(tmp_path / "calls")}
    row = json.dumps({"prompt": "7?>", "label": "7", "metadata": metadata})
    options = ["--json", "--n-samples-per-prompt", "2"]
    code, out, err = evaluate(EVERY_SECOND, *options, rows=row)
    assert code == 0, err
    for side, numbers in strict(out).items():
        assert (numbers["eval/pass@1"], numbers["eval/pass@2"]) == (1.0, "NaN"), side
    assert "AssertionError: every second one" in err


def test_a_reward_that_scores_nothing_ends_the_command_and_says_why(evaluate, run, prompts):
    for options in ([], ["--json"]):
        code, out, err = evaluate(NONE, "--n-samples-per-prompt", "2", *options)
        assert code == 1 and not out
        assert "none of the 6 responses of the base could be scored" in err
        assert "ValueError: the model is gone" in err
    with pytest.raises(RolloutError, match="the model is gone"):
        glm_lora.evaluate(run, prompts, n_samples_per_prompt=1)


def test_the_python_function_logs_the_reason(evaluate, run, prompts, caplog):
    (run.parent / "reward.py").write_text(SOME)
    result = glm_lora.evaluate(run, str(prompts), n_samples_per_prompt=1)
    assert result["base"]["eval/unscored"] == 1
    assert "seven is not scored" in caplog.text
