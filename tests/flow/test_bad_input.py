"""Bad input: a clear error, exit 2, nothing started, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glm_lora.cli import main
from tests.conftest import ROOT
from tests.prepared import folders
from tests.support import small_disk, words
from tests.tiny_runs import train


@pytest.fixture
def call(tiny_root, tmp_path, capsys, wide_errors):
    """Run a command on the tiny model; returns exit code, error text and the run folder."""

    def run(*options: str, command: str = "train") -> tuple[int, str, Path]:
        run_dir = tmp_path / "run"
        arguments = [command, "--model-name", "tiny", *folders(tiny_root)]
        if command == "train":
            arguments += ["--launcher", "inline", "--run-dir", str(run_dir)]
        code = main([*arguments, *options])
        captured = capsys.readouterr()
        return code, words(captured.err + captured.out), run_dir

    return run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora-rnk", "8"], "--lora-rank"),
        (["--lora-rank", "0"], "lora_rank is 0"),
        (["--lora-rank", "-4"], "lora_rank is -4"),
        (["--lora-rank", "many"], "valid integer"),
        (["--num-rollout", "0"], "num_rollout is 0"),
        (["--lr", "nan"], "lr is nan"),
        (["--rollout-temperature", "0"], "rollout_temperature is 0"),
        (["--launcher", "slurm"], "launcher is 'slurm'"),
        (["--advantage", "ppo"], "advantage is 'ppo'"),
        (["--model-name", "tinny"], "'tiny'"),
        (["--target-modules", "q_prj"], "q_proj"),
        (["--target-modules", "attn", "--exclude-modules", "*.mlp.experts.*"], "kv_b_proj"),
        (["--target-modules", "attn,mlp"], "kv_b_proj"),
        (["--target-modules", "mlp", "--exclude-modules", "*.kv_b_proj"], "experts"),
        (["--target-modules", "*.self_attn.kv_b_proj"], "never called"),
        (["--tensor-model-parallel-size", "2"], "a multiple of 2 ranks"),
        (["--num-gpus-per-node", "2"], "inline"),
        (["--resume"], "holds no run"),
        (["--adapter", "a.toml", "--lora-rank", "4"], "--lora-rank"),
        (["--prompt-data", "/no/such/file.jsonl"], "does not exist"),
        (["--reward", "exakt"], "exact"),
        (["--reward", "http://127.0.0.1:99999/"], "there is no port 99999"),
        (["--dry-run", "--reward", "http://[::1"], "cannot be called"),
        (["--reward-timeout", "3000000"], "reward_timeout is 3000000"),
        (["--n-samples-per-prompt", "1"], "2 or more: an advantage compares the samples of one"),
        (["--advantage", "rloo", "--n-samples-per-prompt", "1"], "n_samples_per_prompt is 1"),
    ],
)
def test_train_refuses_and_starts_nothing(call, options, said):
    code, text, run_dir = call(*options)
    assert code == 2, text
    assert said in text, text
    assert not run_dir.exists() or not any(run_dir.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no usable prompt"),
        ('{"prompt": "7?>", "label": "7"}\n{"prompt": "8?>", "lab\n', "invalid JSON"),
        ('{"prompt": "7?>"}\n', "'label'"),
        ('{"prompt": "", "label": "7"}\n', "empty"),
        ("[1, 2]\n", "not an object"),
        ('{"prompt": "\\ud800", "label": "1"}\n', "tokenised"),
        ('{"prompt": ' + "9" * 5000 + ', "label": 1}\n', "digits"),
        ('{"prompt": "0?>", "label": "0", "prompt": "1?>"}\n', "twice"),
        ('{"prompt": "0?>", "label": null}\n', "'label' is null"),
    ],
)
def test_prompt_files_are_checked_row_by_row(call, tmp_path, content, said):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    code, text, run_dir = call("--prompt-data", str(path))
    assert code == 2 and said in text, text
    assert not run_dir.exists()


def test_a_users_own_prompt_file_works_the_same_way(call, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{d}?>", "label": str(d)}) + "\n" for d in "123")
    )
    code, text, run_dir = call("--prompt-data", str(path), "--num-rollout", "1")
    assert code == 0, text
    assert (run_dir / "adapter" / "adapter_config.json").exists()


def test_a_missing_base(call, tmp_path):
    code, text, run_dir = call("--ref-load", str(tmp_path / "nothing"))
    assert code == 2 and "prepare" in text, text
    assert not run_dir.exists()


def test_a_truncated_base(call, tiny, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny.ref_load, base)
    data = max((base / "release").glob("*.distcp"), key=lambda p: p.stat().st_size)
    with data.open("r+b") as stream:
        stream.truncate(data.stat().st_size - 1)
    code, text, run_dir = call("--ref-load", str(base))
    assert code == 2 and data.name in text and "bytes" in text, text
    assert not run_dir.exists()


def test_a_checkpoint_of_another_model(call, tiny, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(tiny.hf_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "glm_moe_dsa"
    (folder / "config.json").write_text(json.dumps(config))
    code, text, _ = call("--hf-checkpoint", str(folder))
    assert code == 2 and "glm_moe_dsa" in text, text
    slice_name = ["--model-name", "GLM-5.3-Flash-4layer", "--hf-checkpoint", str(folder)]
    code, text, _ = call(*slice_name, command="prepare")
    assert code == 2 and "glm_moe_dsa" in text, text


def test_an_unknown_model_name(call):
    for command in ("targets", "prepare", "train"):
        code = main([command, "--model-name", "GLM-5.3-Flush"])
        assert code == 2


def test_an_output_folder_with_other_files(call, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "thesis.tex").write_text("years of work")
    code, text, _ = call()
    assert code == 2 and "not empty" in text, text
    assert (run_dir / "thesis.tex").read_text() == "years of work"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(call, tmp_path):
    with small_disk(tmp_path / "disk", "size=4k,nr_inodes=40") as disk:
        (disk / "filler").write_bytes(b"x" * 4096)
        code, text, _ = call("--run-dir", str(disk / "run"))
        assert code == 2 and "cannot be written" in text, text


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_cannot_be_written(call, tmp_path):
    with small_disk(tmp_path / "disk", "size=64m") as disk:
        given = ["--run-dir", str(disk / "run")]
        code, text, _ = call(*given, "--num-rollout", "1")
        assert code == 0, text
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, text, _ = call(*given, "--num-rollout", "2", "--resume")
        assert code == 2, text
        assert f"--run-dir {disk / 'run'} cannot be written (Read-only file system)" in text, text
        code, text, _ = call("--run-dir", str(disk / "other"))
        assert code == 2 and "cannot be written (Read-only file system)" in text, text


def test_a_run_folder_that_is_moved_away_while_the_run_goes_on(call, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    path = tmp_path / "mover.py"
    path.write_text(
        "from pathlib import Path\n\n\n"
        "def reward(prompt, response, label, metadata):\n"
        f"    if Path({str(run)!r}).exists():\n"
        f"        Path({str(run)!r}).rename({str(moved)!r})\n"
        "    return 1.0\n"
    )
    code, text, _ = call("--reward", str(path), "--num-rollout", "2")
    assert code == 1 and f"the folder {run} is gone" in text, text
    assert "Traceback" not in text
    assert (moved / "config.toml").exists() and not run.exists()


def test_errors_come_before_torch_is_imported():
    """A wrong selection fails in the torch-free half, so it costs well under a second."""
    script = (
        "import sys; sys.argv[0] = 'x'\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from glm_lora.cli import main\n"
        "code = main(['train', '--model-name', 'tiny', '--target-modules', 'q_prj'])\n"
        "heavy = {'torch', 'transformers', 'ray', 'megatron', 'peft'} & set(sys.modules)\n"
        "assert code == 2 and not heavy, (code, heavy)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize("body", ["raise ValueError('boom')", "return float('nan')"])
def test_a_reward_that_scores_nothing_stops_the_run_and_says_why(call, tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"def reward(prompt, response, label, metadata):\n    {body}\n")
    code, text, run_dir = call("--reward", str(path), "--num-rollout", "2")
    assert code == 1 and "could be scored" in text, text
    assert "boom" in text or "nan" in text.lower(), text
    assert not (run_dir / "adapter").exists()


@pytest.mark.parametrize("content", ["{", "[]", None])
@pytest.mark.parametrize("name", ["selection.json", "base.json"])
def test_damaged_files_in_a_run_folder(call, tiny_root, tmp_path, name, content):
    code, text, run_dir = call("--num-rollout", "1")
    assert code == 0, text
    damaged = run_dir / name
    damaged.unlink() if content is None else damaged.write_text(content)
    code, text, _ = call("--num-rollout", "2", "--resume")
    assert code == 2 and name in text, text
    assert main(["export", "--run", str(run_dir), "--output", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_resume_that_asks_for_fewer_rollouts_than_are_done(call):
    assert call("--num-rollout", "3")[0] == 0
    code, text, _ = call("--num-rollout", "2", "--resume")
    assert code == 2 and "at least 3" in text, text


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--model-name", "tiny", "--run-dir", "~nobody-here/x"],
        ["train", "--model-name", "tiny", "--model-dir", "~nobody-here/x"],
        ["train", "--model-name", "tiny", "--reward", "~nobody-here/x.py"],
        ["prepare", "--model-name", "tiny", "--hf-checkpoint", "~nobody-here/x"],
        ["export", "--run", "r", "--output", "~nobody-here/x"],
        ["report", "--run", "~nobody-here/x"],
        ["train", "--pipeline-model-parallel-size", "0", "--dry-run"],
        ["prepare", "--model-name", "tiny", "--to-hf", "x"],
    ],
    ids=" ".join,
)
def test_it_is_refused_in_a_box(capsys, arguments):
    assert main(arguments) == 2
    said = words(capsys.readouterr().err)
    assert "Traceback" not in said and ("nobody-here" in said or "expected" in said), said


def test_a_tilde_is_the_home_folder_for_every_path(tmp_path, monkeypatch, tiny_root, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert train(tiny_root, Path("~/run"), "--num-rollout", "1") == 0
    assert main(["export", "--run", "~/run", "--output", "~/out"]) == 0
    assert main(["report", "--run", "~/run", "--output", "~/page.html"]) == 0
    assert main(["report", "--compare", "~/run", "~/run", "--output", "~/two.html"]) == 0
    made = {path.name for path in tmp_path.iterdir()}
    assert {"run", "out", "page.html", "two.html"} <= made and "~" not in made


def test_resume_and_force_exclude_each_other(call):
    code, text, _ = call("--resume", "--force")
    assert code == 2 and "--force" in text, text


def test_a_dry_run_reads_the_prompts_too(call, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "7?>"}\n')
    code, text, run_dir = call("--dry-run", "--prompt-data", str(path))
    assert code == 2 and "'label'" in text, text
    assert call("--dry-run")[0] == 0
    assert not run_dir.exists()


@pytest.mark.parametrize("rank", ["999999999", "100"])
def test_a_rank_above_full_rank(call, rank):
    code, text, _ = call("--lora-rank", rank)
    assert code == 2 and "at most 64" in text, text


def test_an_export_through_a_link_fills_what_it_names(call, tmp_path):
    _, _, run_dir = call("--num-rollout", "1")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert main(["export", "--run", str(run_dir), "--output", str(tmp_path / "link")]) == 0
    assert (tmp_path / "real" / "adapter_config.json").exists()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    "options",
    [
        ["--rollout-engine-urls", "http://127.0.0.1:3"],
        ["--rollout-engine-key-file", "key"],
        ["--sglang-colocated"],
        ["--sglang-python", "/opt/sglang/bin/python"],
        ["--rollout-num-gpus", "1"],
    ],
)
def test_options_of_another_engine_are_refused(call, options):
    """The embedded engine would train on, and the server that was named would never be asked."""
    code, said, run_dir = call(*options)
    assert code == 2
    assert f"{options[0]} with --rollout-engine embedded, which would not use it" in said
    assert not run_dir.exists()


def test_flags_for_an_engine_that_is_not_there_are_refused(call):
    code, said, run_dir = call("--sglang-foo", "1")
    assert code == 2 and "flags for SGLang (--foo 1) with --rollout-engine embedded" in said, said
    assert not run_dir.exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_interpreter_that_is_none_is_refused_before_there_is_a_folder(call, tmp_path, more):
    (tmp_path / "text").write_text("no program")
    for python in ("/nonexistent/python", str(tmp_path / "text")):
        options = ["--rollout-engine", "sglang", "--sglang-python", python]
        code, said, run_dir = call(*options, *more)
        assert code == 2 and f"--sglang-python {python} is no program" in said, said
        assert not run_dir.exists()


@pytest.mark.parametrize(
    ("options", "without"),
    [
        (["--ray-address", "10.0.0.1:6379"], "--launcher inline"),
        (["--rollout-num-engines", "2"], "--launcher inline"),
        (["--offload-train-target", "disk"], "engines that do not share the trainer's GPUs"),
    ],
)
def test_options_that_would_do_nothing_are_refused(call, options, without):
    code, said, run_dir = call(*options)
    assert code == 2
    assert f"{' '.join(options)} with {without}" in said, said
    assert not run_dir.exists()


def test_a_dry_run_looks_at_the_run_folder_and_changes_nothing(call, tmp_path):
    code, said, run_dir = call("--resume", "--dry-run")
    assert code == 2
    assert "holds no run" in said
    assert not run_dir.exists()
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    code, said, _ = call("--dry-run")
    assert code == 2
    assert "is not empty (notes.txt" in said
    assert [p.name for p in run_dir.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("options", [["--dry-run"], []])
@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_stands_where_the_run_folder_goes(call, tmp_path, options, below):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    code, said, _ = call("--run-dir", str(taken / below), *options)
    assert code == 2
    assert f"{taken} is a file" in said, said
    assert taken.read_text() == "mine"


def test_a_model_that_was_not_prepared_has_no_tokenizer(call, tmp_path):
    code, said, _ = call("--dry-run", "--init", "random", "--hf-checkpoint", str(tmp_path / "none"))
    assert code == 2
    assert f"there is no checkpoint in {tmp_path / 'none'}" in said
    assert "glm-lora prepare" in said


def test_a_dry_run_prints_the_plan_before_it_asks_for_a_base(
    tmp_path, capsys, monkeypatch, wide_errors
):
    """A shape is planned before 600 GB are prepared for it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shape = ["--num-nodes", "3", "--num-gpus-per-node", "8", "--ray-address", "auto"]
    shape += ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "8"]
    command = ["train", "--model-name", "GLM-5.3-Flash", *shape, "--sglang-python", "X"]
    assert main([*command, "--dry-run"]) == 2
    captured = capsys.readouterr()
    printed, said = words(captured.out), words(captured.err)
    assert "485 projections, 65,955,840 trainable parameters at rank 16" in printed
    assert "24 trainer rank(s) (TP 2, PP 1, DP 12, EP 8)" in printed
    assert "GiB on the fullest trainer rank" in printed
    assert "rank 23 of 24: CUDA_VISIBLE_DEVICES=7" in printed
    assert "engine 2 on GPU(s) 0,1,2,3,4,5,6,7" in printed
    assert "there is no base in" in said
    assert "glm-lora prepare --model-name GLM-5.3-Flash, or" in said
    assert not list(tmp_path.iterdir())
    assert main(command) == 2
    assert not capsys.readouterr().out, "without --dry-run nothing is announced that cannot start"
    assert not list(tmp_path.iterdir())
