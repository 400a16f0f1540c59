"""The Python functions: every argument means the same everywhere, and what cannot be is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import glm_lora
from glm_lora.errors import CheckpointError, ConfigError, DataError
from glm_lora.settings import default_run_dir


@pytest.fixture
def home(tiny_root, tmp_path, monkeypatch):
    """A home folder with what ``prepare`` made, and an empty current folder."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    for name in ("models", "ckpt", "data"):
        (home / name).symlink_to(tiny_root / name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    return home


FOLDERS = {"model_dir": "~/models", "ckpt_dir": "~/ckpt", "data_dir": "~/data"}


def write_prompts(path: Path, digits: str) -> None:
    rows = [{"prompt": f"{digit}?>", "label": digit} for digit in digits]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_home_folder_is_meant_in_every_path(home):
    write_prompts(home / "a.jsonl", "12")
    write_prompts(home / "b,c.jsonl", "34")
    (home / "mine.py").write_text("def reward(prompt, response, label, metadata): return 1\n")
    run = glm_lora.train(
        "tiny",
        run_dir="~/run",
        **FOLDERS,
        hf_checkpoint="~/models/tiny",
        ref_load=Path("~/ckpt/tiny_torch_dist"),
        num_rollout=1,
        prompt_data=["~/a.jsonl", Path("~/b,c.jsonl")],
        reward=Path("~/mine.py"),
        layers=[0, 1],
    )
    assert run == home / "run"
    glm_lora.export("~/run", "~/out")
    state = glm_lora.load_adapter("~/out", "tiny", hf_checkpoint="~/models/tiny")
    assert state.digest
    assert glm_lora.write_report("~/run", "~/page.html") == home / "page.html"
    for data in ("~/a.jsonl", Path("~/a.jsonl"), ["~/a.jsonl"], (home / "a.jsonl",)):
        result = glm_lora.evaluate("~/run", data, n_samples_per_prompt=1)
        assert result["base"]["eval/prompts"] == 2
    made = glm_lora.prepare("tiny", **FOLDERS, hf_checkpoint="~/models/tiny")
    assert made.hf_checkpoint == home / "models" / "tiny"
    planned = glm_lora.prepare(**FOLDERS, init="random", to_hf="~/copy", dry_run=True).plan
    assert str(home / "copy") in "".join(planned)
    assert not list(Path.cwd().iterdir()), "no folder is called ~"


def test_a_path_of_none_is_one_that_was_not_given(home):
    run = glm_lora.train("tiny", run_dir=None, **FOLDERS, num_rollout=1, lora_rank=None)
    assert run.parent == Path.cwd() / default_run_dir("tiny").parent
    with pytest.raises(ConfigError, match="resume without run_dir"):
        glm_lora.train("tiny", resume=True)
    with pytest.raises(ConfigError, match="resume together with force"):
        glm_lora.train("tiny", run_dir=run, resume=True, force=True)


def test_a_resume_takes_the_runs_own_options(home):
    run = glm_lora.train("tiny", run_dir="~/own", **FOLDERS, num_rollout=1, lr=1e-3, keep_every=5)
    assert glm_lora.train("tiny", run_dir="~/own", **FOLDERS, num_rollout=2, resume=True) == run
    text = (run / "config.toml").read_text()
    assert "keep_every = 5" in text and "lr = 0.001" in text and "num_rollout = 2" in text


def test_a_list_stands_for_commas():
    def sites(**options):
        return glm_lora.resolve_targets("tiny", **options).num_sites

    assert sites(layers=[0, 1]) == sites(layers="0,1") == sites(layers=range(2)) > 0
    assert sites(layers=1) == sites(layers="1") > 0
    assert sites(target_modules=["q_a_proj", "o_proj"]) == sites(target_modules="q_a_proj,o_proj")
    assert sites(lora_rank="4") == sites(lora_rank=4)


@pytest.mark.parametrize("odd", [3, b"x", "", "a\0b", ["x"], {"x": 1}, "~no-such-user/x"])
def test_what_is_no_path_is_refused_by_name(odd, home):
    calls = {
        "run_dir": lambda: glm_lora.train("tiny", run_dir=odd),
        "model_dir": lambda: glm_lora.train("tiny", run_dir="x", model_dir=odd),
        "ckpt_dir": lambda: glm_lora.prepare("tiny", ckpt_dir=odd),
        "data_dir": lambda: glm_lora.prepare("tiny", data_dir=odd),
        "to_hf": lambda: glm_lora.prepare("tiny", to_hf=odd),
        "ref_load": lambda: glm_lora.train("tiny", run_dir="x", ref_load=odd),
        "hf_checkpoint": lambda: glm_lora.resolve_targets("tiny", hf_checkpoint=odd),
        "folder": lambda: glm_lora.load_adapter(odd, "tiny"),
        "run": lambda: glm_lora.export(odd, "out"),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=f"^{name} is "):
            call()
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: glm_lora.train(None), "model_name is None"),
        (lambda: glm_lora.prepare(3), "model_name is 3"),
        (lambda: glm_lora.resolve_targets(None), "model_name is None"),
        (lambda: glm_lora.resolve_targets("tiny", layers={"0": 1}), "layers is {'0': 1}"),
        (lambda: glm_lora.resolve_targets("tiny", layers=[0.5]), "layers is 0.5"),
        (lambda: glm_lora.resolve_targets("tiny", lora_rank=[4]), r"lora_rank is \[4\]"),
        (lambda: glm_lora.resolve_targets("tiny", lora_rank=0), "lora_rank is 0"),
        (lambda: glm_lora.train(num_gpus_per_node="many"), "num_gpus_per_node is 'many'"),
        (
            lambda: glm_lora.train(pipeline_model_parallel_size=0),
            "pipeline_model_parallel_size is 0",
        ),
        (lambda: glm_lora.train("tiny", prompt_data=[Path("a"), None]), "prompt_data is None"),
        (lambda: glm_lora.train("tiny", prompt_data={"a": 1}), "prompt_data is {'a': 1}"),
        (lambda: glm_lora.train("tiny", num_rollout=2.5), "num_rollout is 2.5"),
        (lambda: glm_lora.train("tiny", n_samples_per_prompt=1), "n_samples_per_prompt is 1"),
        (lambda: glm_lora.evaluate("run", None), "prompt_data is None"),
        (lambda: glm_lora.evaluate("run", ["x", 3]), "prompt_data is 3"),
        (lambda: glm_lora.evaluate("run", "x", n_samples_per_prompt=2.5), "per_prompt is 2.5"),
        (lambda: glm_lora.evaluate("run", "x", n_samples_per_prompt=0), "per_prompt is 0"),
        (lambda: glm_lora.evaluate("run", "x", n_samples_per_prompt=True), "per_prompt is True"),
        (lambda: glm_lora.evaluate("run", "x", seed=-1), "seed is -1"),
        (lambda: glm_lora.export("run", None), "output is None"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(home, call, said):
    with pytest.raises(ConfigError, match=said):
        call()
    assert not list(Path.cwd().iterdir())


def test_a_file_that_is_not_there_and_a_folder_where_a_file_goes(home):
    run = glm_lora.train("tiny", run_dir="run", **FOLDERS, num_rollout=1)
    with pytest.raises(DataError, match=r"no\.jsonl does not exist"):
        glm_lora.evaluate(run, "no.jsonl")
    (home / "folder").mkdir()
    with pytest.raises(ConfigError, match="folder is a folder"):
        glm_lora.write_report("run", "~/folder")
    with pytest.raises((ConfigError, CheckpointError)):
        glm_lora.export("no-run", "out")
