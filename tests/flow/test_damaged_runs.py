"""What a killed run or a bad disk leaves behind: it is used as far as it is whole, or named."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from glm_lora import commands_export
from glm_lora.checkpoint.files import umask
from glm_lora.checkpoint.train_state import latest_checkpoint
from glm_lora.cli import main
from glm_lora.export import source
from glm_lora.report.run_data import read_lines
from tests.support import small_disk, words
from tests.tiny_runs import metric, train

pytestmark = pytest.mark.usefixtures("wide_errors")


@pytest.fixture(scope="module")
def saved(tiny_root, tmp_path_factory) -> Path:
    """Three rollouts with a checkpoint after each."""
    run = tmp_path_factory.mktemp("saved") / "run"
    options = ["--num-rollout", "3", "--save-interval", "1", "--keep-last", "3"]
    assert train(tiny_root, run, *options) == 0
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_an_export_takes_the_last_whole_line_of_the_metrics(run, tmp_path):
    """As the run was killed while it wrote the line of rollout 3."""
    reward = metric(run, "rollout/raw_reward")[-1]
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"rollout/step": 3, "rollout/raw_re')
    assert main(["export", "--run", str(run), "--output", str(tmp_path / "out")]) == 0
    assert f"{reward:.6g}" in (tmp_path / "out" / "README.md").read_text()


def test_an_export_of_a_run_whose_only_line_is_torn(run, tmp_path):
    (run / "metrics.jsonl").write_text('{"rollout/st')
    assert main(["export", "--run", str(run), "--output", str(tmp_path / "out")]) == 0


def test_lines_that_are_torn_are_mended_by_a_resume(run, tiny_root):
    """As power was lost in the middle of a line of each file."""
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl"):
        with (run / name).open("r+b") as stream:
            stream.truncate((run / name).stat().st_size - 10)
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 0
    assert [e["event"] for e in read_lines(run / "events.jsonl")] == [
        "started",
        "started",
        "finished",
    ]
    assert main(["report", "--run", str(run)]) == 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("events.jsonl", "{}"),
        ("events.jsonl", "[]"),
        ("events.jsonl", '{"event": "started"'),
        ("metrics.jsonl", '{"rollout/step": "two"}'),
        ("samples.jsonl", '{"best": 3}'),
    ],
)
def test_a_line_that_no_run_writes_is_named(run, tiny_root, capsys, name, line):
    with (run / name).open("a") as stream:
        stream.write(line + "\n")
    assert main(["report", "--run", str(run)]) == 2
    said = words(capsys.readouterr().err)
    assert f"{run / name} line" in said and "expected:" in said, said
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 0
    printed = capsys.readouterr()
    if name == "events.jsonl":  # the others are cut where the run goes on
        assert "no report was written" in words(printed.out + printed.err)


def test_a_report_replaces_nothing_but_reports(run, tmp_path, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    for taken in (run / "metrics.jsonl", tmp_path / "pipe", run / "checkpoints"):
        for command in (["--run", str(run)], ["--compare", str(run), str(run)]):
            assert main(["report", *command, "--output", str(taken)]) == 2
            assert f"{taken}" in words(capsys.readouterr().err)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "pipe").is_fifo()
    for free in ("empty", "link", "page.html"):
        assert main(["report", "--run", str(run), "--output", str(tmp_path / free)]) == 0
    assert (tmp_path / "link").is_symlink()
    assert "<title>glm-lora: run</title>" in (tmp_path / "page.html").read_text()


def test_a_report_is_called_as_it_was_named(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    for named in (["--run", "run"], ["--compare", "run", "run", "--output", "two.html"]):
        assert main(["report", *named]) == 0
    said = capsys.readouterr().out.split()
    assert said == ["report", "run/report.html", "report", "two.html"]


def test_an_adapter_may_be_read_by_a_server_of_another_user(run, tmp_path):
    for kind in ("peft", "sglang"):
        output = tmp_path / kind
        command = ["export", "--run", str(run), "--format", kind, "--output", str(output)]
        assert main(command) == 0
        modes = {stat.S_IMODE(path.stat().st_mode) for path in output.iterdir()}
        assert modes == {0o666 & ~umask()}


def cut(folder: Path, name: str) -> None:
    """Lose most of a file, as a disk that was full or not synchronised does."""
    for path in folder.glob(name):
        with path.open("r+b") as stream:
            stream.truncate(path.stat().st_size // 10)


@pytest.mark.parametrize("name", ["*.distcp", ".metadata", "state.json"])
def test_a_truncated_checkpoint_names_the_whole_one_before_it(
    run, tiny_root, tmp_path, capsys, name
):
    newest = latest_checkpoint(run)
    assert newest is not None and newest.name == "iter_0000003"
    cut(newest, name)
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 2
    said = words(capsys.readouterr().err)
    assert f"next: {newest.with_name('iter_0000002')} is whole" in said, said
    assert main(["export", "--run", str(run), "--output", str(tmp_path / "out")]) == 2
    assert "iter_0000002 is whole" in words(capsys.readouterr().err)
    newest.rename(tmp_path / "away")  # the step that was named
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 0
    assert metric(run, "rollout/step") == [0, 1, 2, 3]


def test_changed_bytes_are_refused(run, tiny_root, capsys):
    newest = latest_checkpoint(run)
    assert newest is not None
    path = newest / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(b ^ 0xFF for b in data[middle : middle + 64])
    path.write_bytes(data)
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 2
    said = words(capsys.readouterr().err)
    assert f"{path} is damaged" in said and "iter_0000002 is whole" in said, said


def test_a_newer_folder_that_was_never_finished_is_named(run, tiny_root, capsys):
    newest = latest_checkpoint(run)
    assert newest is not None
    (newest / "state.json").unlink()
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 0
    printed = capsys.readouterr()
    said = words(printed.out + printed.err)
    assert f"passed over: {newest.name} is no finished checkpoint" in said, said
    assert metric(run, "rollout/step") == [0, 1, 2, 3]


def test_a_state_without_the_prompts_place_is_named(run, tiny_root, capsys):
    newest = latest_checkpoint(run)
    assert newest is not None
    state = json.loads((newest / "state.json").read_text())
    del state["files"], state["extra"]["driver"]["prompts"]  # as of before there were digests
    (newest / "state.json").write_text(json.dumps(state))
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 2
    said = words(capsys.readouterr().err)
    assert f"{newest / 'state.json'} has no 'prompts'" in said, said
    assert "iter_0000002 is whole" in said, said


def test_what_is_not_whole_either_is_not_named(run, tiny_root, capsys):
    for number in (2, 3):
        cut(run / "checkpoints" / f"iter_{number:07d}", "*.distcp")
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 2
    assert "iter_0000001 is whole" in words(capsys.readouterr().err)
    cut(run / "checkpoints" / "iter_0000001", "*.distcp")
    assert train(tiny_root, run, "--num-rollout", "4", "--resume") == 2
    assert "no checkpoint before it is whole" in words(capsys.readouterr().err)


def test_a_checkpoint_that_is_not_there(run, tmp_path, capsys):
    """The trainer keeps the newest ones only."""
    gone = run / "checkpoints" / "iter_0000007"
    arguments = ["export", "--model-name", "tiny", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--adapter-checkpoint", str(gone)]) == 2
    said = words(capsys.readouterr().err)
    assert f"{gone} does not exist" in said, said
    assert "there is: iter_0000001, iter_0000002, iter_0000003" in said, said
    assert "--force" not in said and "move" not in said


def test_an_export_of_a_run_that_goes_on(run, tmp_path, monkeypatch, capsys):
    """The newest checkpoint is replaced between being found and being read, then stays."""
    newest, place = latest_checkpoint(run), run / "checkpoints"
    load, loaded = source.load_train_state, []

    def load_late(folder: Path, *rest):
        loaded.append(folder.name)
        if len(loaded) == 1:
            (place / "iter_0000003").rename(place / "iter_0000009")
        return load(folder, *rest)

    monkeypatch.setattr(source, "load_train_state", load_late)
    out = tmp_path / "out"
    assert main(["export", "--run", str(run), "--output", str(out), "--check"]) == 0
    assert loaded == ["iter_0000003", "iter_0000009"]
    assert newest is not None and not newest.exists()


def test_the_check_of_an_export_takes_the_adapter_that_was_exported(run, tmp_path, monkeypatch):
    """A checkpoint that the run writes in between is another adapter."""
    place = run / "checkpoints"
    later = place / "iter_0000003"
    later.rename(tmp_path / later.name)
    check = commands_export._check

    def check_later(*arguments):
        (tmp_path / later.name).rename(later)
        return check(*arguments)

    monkeypatch.setattr(commands_export, "_check", check_later)
    out = tmp_path / "out"
    assert main(["export", "--run", str(run), "--output", str(out), "--check"]) == 0


def used(folder: Path) -> int:
    """Bytes of the files in ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("room", ["for the adapter", "for neither"])
def test_a_disk_without_room_for_the_last_checkpoint(saved, tiny_root, tmp_path, capsys, room):
    """The run keeps 1 MiB free of checkpoints, in which the much smaller adapter fits."""
    size = used(saved / "adapter") * 2 + 2**19 if room == "for the adapter" else 2**17
    with small_disk(tmp_path / "disk", f"size={size}") as disk:
        assert train(tiny_root, disk / "run", "--num-rollout", "1") == 1
        printed = capsys.readouterr()
        said = words(printed.out + printed.err)
        assert "run the same command again" not in said and "is full" in said, said
        if room == "for neither":
            assert "neither the last checkpoint nor the adapter was written" in said, said
            assert "--force" in said
            return
        result = disk / "run" / "adapter"
        assert f"the adapter is complete in {result}" in said, said
        other = ["--lora-adapter-path", str(result), "--num-rollout", "1"]  # the step that is named
        assert train(tiny_root, tmp_path / "other", *other) == 0
