"""Resumes of real runs: what was not given again, moved or changed since."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from glm_lora.cli import main
from tests.prepared import folders
from tests.support import words
from tests.tiny_runs import metric, train

pytestmark = pytest.mark.usefixtures("wide_errors")
REWARD = "def reward(prompt, response, label, metadata):\n    return float(response == label)\n"


def again(root: Path, run: Path, *options: str) -> int:
    """The command of docs/resume.md, with nothing but what it must name."""
    command = ["train", "--model-name", "tiny", "--run-dir", str(run), "--resume"]
    return main([*command, *folders(root), *options])


def test_the_documented_command_keeps_every_option(tiny_root, tmp_path, capsys):
    run = tmp_path / "run"
    options = [
        "--save-interval",
        "1",
        "--keep-every",
        "2",
        "--keep-last",
        "1",
        "--num-rollout",
        "5",
    ]
    assert train(tiny_root, run, *options, "--lr", "1e-3") == 0
    shutil.rmtree(run / "checkpoints" / "iter_0000005")
    before = tomllib.loads((run / "config.toml").read_text())
    assert again(tiny_root, run) == 0
    assert tomllib.loads((run / "config.toml").read_text()) == before
    assert metric(run, "rollout/step") == list(range(5))
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["iter_0000002", "iter_0000004", "iter_0000005"]
    capsys.readouterr()
    assert again(tiny_root, run, "--num-rollout", "6", "--save-interval", "3") == 0
    said = words(capsys.readouterr().out)
    assert "rollout.num_rollout: 5 before, 6 from now on" in said
    assert "save_interval: 1 before, 3 from now on" in said
    assert again(tiny_root, run, "--lr", "2e-3") == 2
    assert "optimizer.lr: 0.001 then, 0.002 now" in words(capsys.readouterr().err)


@pytest.fixture
def own(tiny_root, tmp_path, monkeypatch) -> Path:
    """A run on prompts and a reward of one's own, named from their folder."""
    monkeypatch.chdir(tmp_path)
    prompts = next(Path(tiny_root).rglob("prompts.jsonl"))
    shutil.copy(prompts, "p.jsonl")
    Path("r.py").write_text(REWARD)
    options = ["--prompt-data", "p.jsonl", "--reward", "r.py", "--num-rollout", "1"]
    assert train(tiny_root, tmp_path / "run", *options) == 0
    return tmp_path


def test_files_may_be_named_otherwise_and_may_move(own, tiny_root, monkeypatch):
    (own / "else").mkdir()
    monkeypatch.chdir(own / "else")
    assert again(tiny_root, own / "run", "--num-rollout", "2") == 0
    for name in ("p.jsonl", "r.py"):
        (own / name).rename(own / "else" / name)
    moved = ["--prompt-data", "./p.jsonl", "--reward", "./r.py"]
    assert again(tiny_root, own / "run", "--num-rollout", "3", *moved) == 0
    assert metric(own / "run", "rollout/step") == [0, 1, 2]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize("name", ["p.jsonl", "r.py"])
def test_changed_files_are_noticed_before_anything_is(own, tiny_root, capsys, name, dry):
    if name == "r.py":
        (own / name).write_text(REWARD.replace("==", "!="))
    else:
        first, *rest = (own / name).read_text().splitlines(keepends=True)
        row = json.loads(first)
        (own / name).write_text(json.dumps({**row, "label": "7"}) + "\n" + "".join(rest))
    before = {p: p.read_bytes() for p in (own / "run").rglob("*") if p.is_file()}
    assert again(tiny_root, own / "run", "--num-rollout", "2", *dry) == 2
    said = words(capsys.readouterr().err)
    assert f"rollout.{'reward' if name == 'r.py' else 'prompt_data'}: another content" in said
    assert {p: p.read_bytes() for p in (own / "run").rglob("*") if p.is_file()} == before


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_configuration(tiny_root, tmp_path):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "1") == 0
    (data,) = (run / "checkpoints" / "iter_0000001").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    before = (run / "config.toml").read_bytes()
    assert again(tiny_root, run, "--num-rollout", "9") == 2
    assert (run / "config.toml").read_bytes() == before
