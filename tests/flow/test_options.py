"""Options of a run that change what the loop does around the update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm_lora.cli import main
from glm_lora.report.run_data import read_lines
from glm_lora.settings import default_run_dir, resolve_train
from tests.prepared import folders
from tests.support import words
from tests.tiny_runs import LAUNCHER, adapter, metric, train


def test_rollout_and_training_overlap_by_one_step(tiny_root, tmp_path):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "25", "--async-level", "1") == 0
    staleness = metric(run, "rollout/staleness_max")
    assert staleness == [0.0] + [1.0] * 24
    rewards = metric(run, "rollout/raw_reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_runs_that_start_together_have_folders_of_their_own(tiny_root, tmp_path):
    words = ["train", "--model-name", "tiny", "--launcher", "inline", "--num-rollout", "1"]
    command = [sys.executable, LAUNCHER, *words, *folders(tiny_root)]
    started = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in "ab"]
    assert [process.wait(120) for process in started] == [0, 0]
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 2 and all((run / "adapter").is_dir() for run in runs)
    names = [default_run_dir("tiny") for _ in range(100)]  # all within a second or two
    assert len(set(names)) == 100


def test_evaluation_during_training(tiny_root, tiny, tmp_path):
    run = tmp_path / "run"
    options = ["--num-rollout", "4", "--eval-interval", "2"]
    options += ["--eval-prompt-data", str(tiny.data["eval"])]
    assert train(tiny_root, run, *options) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["eval/pass@1" in line for line in lines] == [False, True, False, True]
    assert lines[-1]["eval/prompts"] == 30


def test_an_evaluation_that_nothing_scores_says_why(tiny_root, tiny, tmp_path, capsys):
    path = tmp_path / "reward.py"
    path.write_text(
        "def reward(prompt, response, label, metadata):\n"
        f"    hidden = any(label in line for line in open({str(tmp_path / 'labels')!r}))\n"
        "    return float('nan') if hidden else float(response == label)\n"
    )
    (tmp_path / "labels").write_text("777\n")
    (tmp_path / "eval.jsonl").write_text('{"prompt": "7?>", "label": "777"}\n')
    options = ["--num-rollout", "1", "--eval-interval", "1", "--reward", str(path)]
    options += ["--eval-prompt-data", str(tmp_path / "eval.jsonl")]
    assert train(tiny_root, tmp_path / "run", *options) == 0
    said = words(capsys.readouterr().out)
    assert "evaluation: 1 of 1 responses have no reward" in said and "nan" in said, said


def test_a_hard_limit_stops_the_run_after_saving(tiny_root, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "3", "--logprob-diff-limit", "1e-12") == 1
    # The probe after the first sync is held to the same limit, before any rollout.
    assert "1e-12" in capsys.readouterr().err


def test_a_difference_in_the_samples_stops_the_run_after_saving(tiny_root, tmp_path, monkeypatch):
    from glm_lora import pipeline
    from glm_lora.errors import TrainingError

    def refuse(*_) -> None:
        raise TrainingError("trainer and engine differ")

    monkeypatch.setattr(pipeline, "check_logprob_difference", refuse)
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "3") == 1
    assert [p.name for p in (run / "checkpoints").glob("iter_*")] == ["iter_0000001"]


def test_dynamic_sampling_replaces_groups_that_teach_nothing(tiny_root, tmp_path):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "3", "--dynamic-sampling-limit", "3") == 0
    assert metric(run, "rollout/zero_std_groups") is not None
    assert all(m <= 3 for m in metric(run, "rollout/dynamic_extra_rounds"))
    assert sum(metric(run, "rollout/dynamic_dropped_groups")) > 0


def test_a_warm_start_continues_from_an_exported_adapter(tiny_root, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(tiny_root, first, "--num-rollout", "12") == 0
    options = ["--num-rollout", "1", "--lora-adapter-path", str(first / "adapter")]
    assert train(tiny_root, second, *options) == 0
    assert metric(second, "rollout/raw_reward")[0] > metric(first, "rollout/raw_reward")[0] + 0.1
    assert adapter(second) != adapter(first)


def test_a_warm_start_is_strict(tiny_root, tmp_path):
    from safetensors.torch import load_file, save_file

    first = tmp_path / "first"
    assert train(tiny_root, first, "--num-rollout", "1") == 0
    weights = first / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, weights)
    options = ["--lora-adapter-path", str(first / "adapter")]
    assert train(tiny_root, tmp_path / "second", *options) == 2
    assert not (tmp_path / "second" / "metrics.jsonl").exists()


def test_checkpoints_are_kept_as_asked(tiny_root, tmp_path):
    run = tmp_path / "run"
    options = ["--num-rollout", "7", "--save-interval", "1", "--keep-last", "2"]
    assert train(tiny_root, run, *options, "--keep-every", "3") == 0
    kept = sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("iter_*"))
    assert kept == [3, 6, 7]


def test_wandb_gets_the_same_scalars_offline(tiny_root, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "2", "--wandb") == 0
    assert list((run / "logs").glob("wandb/offline-run-*/*.wandb"))


def test_tensorboard_gets_the_same_scalars(tiny_root, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "2") == 0
    events = EventAccumulator(str(run / "logs" / "tensorboard"))
    events.Reload()
    drawn = [e.value for e in events.Scalars("rollout/raw_reward")]
    assert drawn == pytest.approx(metric(run, "rollout/raw_reward"), rel=1e-6)  # float32 events


def test_the_packaged_word_problems_run_without_a_download(tiny_root, tmp_path: Path):
    """Every path of a real task, scored by `math`; the tiny model cannot solve a single one."""
    arguments = ["train", "--model-name", "tiny", "--launcher", "inline", *folders(tiny_root)]
    arguments += ["--run-dir", str(tmp_path / "run"), "--prompt-data", "word-problems"]
    arguments += ["--reward", "math", "--num-rollout", "1", "--rollout-batch-size", "2"]
    assert main(arguments) in (0, 2)


def test_the_time_of_a_save_counts_for_the_rollout_that_saved(tiny_root, tmp_path):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "5", "--save-interval", "2") == 0
    records = read_lines(run / "metrics.jsonl")
    assert ["time/save" in record for record in records] == [False, True, False, True, False]
    # What was written beside the training is known one rollout later.
    assert ["save/bytes" in record for record in records] == [False, False, True, False, True]
    assert ["time/save_wait" in r for r in records] == ["save/bytes" in r for r in records]


def test_paths_are_whole_before_other_processes_see_them(monkeypatch, tmp_path):
    """Processes of a cluster that is joined run where it was started, not where the user is."""
    monkeypatch.chdir(tmp_path)
    given = {
        "model_name": "tiny",
        "run_dir": "runs/a",
        "lora_adapter_path": "adapter",
        "sglang": {"rollout_engine_key_file": "~/key"},
    }
    config = resolve_train(given, models=Path("m"), ckpts=Path("c"), data=Path("d"))
    assert config.run_dir == tmp_path / "runs" / "a"
    assert config.hf_checkpoint == tmp_path / "m" / "tiny"
    assert config.ref_load == tmp_path / "c" / "tiny_torch_dist"
    assert config.lora_adapter_path == tmp_path / "adapter"
    assert config.sglang.rollout_engine_key_file == Path.home() / "key"


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (".venv-sglang/bin/python", "{here}/.venv-sglang/bin/python"),
        ("~/sglang/bin/python", "{home}/sglang/bin/python"),
        ("/opt/sglang/bin/python", "/opt/sglang/bin/python"),
        ("python3.12", "python3.12"),  # looked for in PATH, on the machine that starts it
        ("", ""),
    ],
)
def test_an_interpreter_is_the_same_in_every_folder(monkeypatch, tmp_path, given, whole):
    monkeypatch.chdir(tmp_path)
    values = {"model_name": "tiny", "sglang": {"sglang_python": given}}
    config = resolve_train(values, models=Path("m"), ckpts=Path("c"), data=Path("d"))
    assert config.sglang.sglang_python == whole.format(here=tmp_path, home=Path.home())
