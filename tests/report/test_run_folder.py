import errno
import json
import os
from pathlib import Path

import pytest

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.checkpoint.files import write_atomic
from glm_lora.config import TrainConfig, from_toml
from glm_lora.errors import ConfigError
from glm_lora.report.run_data import read_lines
from glm_lora.report.run_folder import RunFolder, truncate_metrics
from glm_lora.report.sinks import JsonlSink
from glm_lora.targets.selection import Selection, make_selection

INPUTS = {"rollout.prompt_data": "a" * 64}
BASE = {"fingerprint": "f" * 64}


def selection(rank: int = 8) -> Selection:
    return make_selection("tiny", TINY, trainable_sites(TINY), rank=rank, alpha=16.0)


def config(path: Path, **changes: object) -> TrainConfig:
    values = {"hf_checkpoint": "h", "ref_load": "r", "run_dir": str(path), **changes}
    return TrainConfig.model_validate(values)


def create(path: Path, **changes: object) -> RunFolder:
    force = bool(changes.pop("force", False))
    return RunFolder.create(config(path, **changes), selection(), BASE, INPUTS, force=force)


def test_a_new_run_leaves_its_configuration_and_selection(tmp_path):
    folder = create(tmp_path / "run")
    assert from_toml(TrainConfig, folder.path / "config.toml") == config(tmp_path / "run")
    text = (folder.path / "selection.json").read_text()
    assert Selection.from_json(text, TINY) == selection()
    assert json.loads((folder.path / "base.json").read_text()) == BASE
    folder.close()


def test_a_second_start_is_refused_and_nothing_is_lost(tmp_path):
    create(tmp_path / "run").close()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"rollout/step": 0}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        create(tmp_path / "run")
    assert metrics.read_text() == '{"rollout/step": 0}\n'
    create(tmp_path / "run", force=True).close()
    assert not metrics.exists()


def test_a_folder_with_other_files_is_refused_even_with_force(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(ConfigError, match="not empty"):
            create(tmp_path, force=force)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_force_keeps_files_that_are_not_of_the_run(tmp_path):
    create(tmp_path / "run").close()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    create(tmp_path / "run", force=True).close()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_two_processes_do_not_share_a_folder(tmp_path):
    folder = create(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by another process"):
        RunFolder.open(tmp_path / "run")
    folder.close()
    RunFolder.open(tmp_path / "run").close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        create(tmp_path / "run")


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        create(tmp_path / "run")


def test_an_earlier_run_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """Neither the lock nor the configuration; the folder is free again after it."""
    create(tmp_path / "run").close()

    def refused(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    read_only = r"--run-dir .* cannot be written \(Read-only"
    with monkeypatch.context() as patch:
        patch.setattr("os.open", refused)
        with pytest.raises(ConfigError, match=read_only):
            RunFolder.open(tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("glm_lora.report.run_folder.write_atomic", refused)
        with pytest.raises(ConfigError, match=read_only):
            folder.write_config(config(tmp_path / "run"))
    folder.close()
    RunFolder.open(tmp_path / "run").close()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, monkeypatch, call):
    path = tmp_path / "page.html"
    path.write_text("before")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((Path, call) if call == "replace" else (os, call)), full)
    with pytest.raises(OSError) as caught:
        write_atomic(path, "after")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "before"


def test_metrics_keep_nan_visible_and_are_cut_at_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(4):
        sink.log(step, {"a": float("nan"), "b": float("-inf"), "c": 0.5})
    sink.close()
    with path.open("a") as stream:
        stream.write('{"rollout/step": 4, "a"')  # the process died here
    truncate_metrics(path, 3)
    records = read_lines(path)
    assert [r["rollout/step"] for r in records] == [0, 1, 2]
    assert records[0] == {"rollout/step": 0, "a": "NaN", "b": "-Infinity", "c": 0.5}
