"""What the command line does with words and streams that are no use to any command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_lora import cli
from glm_lora.cli import main
from tests.conftest import ROOT
from tests.prepared import folders
from tests.report.run_folders import write_run
from tests.support import words


@pytest.fixture
def call(capsys, wide_errors):
    """Run a command in this process; returns exit code and error text."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(list(arguments))
        return code, words(capsys.readouterr().err)

    return run


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["targets", "--model-name", "tiny"], "--explain"),
        (["targets", "--model-name", "tiny"], "--hf-checkpoint"),
        (["targets", "--model-name", "tiny"], "--adapter"),
        (["train", "--model-name", "tiny"], "--run-dir"),
        (["train", "--model-name", "tiny"], "--ckpt-dir"),
        (["train", "--model-name", "tiny"], "--lora-adapter-path"),
        (["prepare", "--model-name", "tiny"], "--ref-load"),
        (["prepare", "--model-name", "tiny"], "--to-hf"),
        (["export", "--output", "x"], "--run"),
        (["export", "--run", "x"], "--output"),
        (["eval", "--prompt-data", "x"], "--run"),
        (["report"], "--run"),
        (["doctor", "--no-self-test"], "--sglang-python"),
    ],
)
def test_an_empty_value_is_not_the_working_directory(call, tmp_path, monkeypatch, command, option):
    monkeypatch.chdir(tmp_path)
    for given in ([option, ""], [f"{option}="]):
        code, text = call(*command, *given)
        assert code == 2 and option in text, text
    assert not list(tmp_path.iterdir())


def test_an_empty_run_folder_in_a_list(call, tmp_path):
    code, text = call("report", "--compare", str(tmp_path), "")
    assert code == 2 and "runs" in text and "empty" in text, text


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--model-name", "tiny", "--run-dir", "runs/\udcff"],
        ["export", "--run", "\udcff", "--output", "out"],
        ["eval", "--run", "run", "--prompt-data", "\udcfe.jsonl"],
        ["report", "--run", "\udcff"],
        ["targets", "--hf-checkpoint=\udcff"],
        ["\udcff"],
    ],
)
def test_a_name_that_is_no_unicode(call, tmp_path, monkeypatch, arguments):
    """It could be written neither into a configuration nor into a report."""
    monkeypatch.chdir(tmp_path)
    code, text = call(*arguments)
    assert code == 2 and "Unicode" in text, text
    assert not list(tmp_path.iterdir())


def run_with_output(target: str, buffered: bool, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -m glm_lora {' '.join(arguments)} {target}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        ["targets", "--model-name", "tiny"],
        ["targets", "--model-name", "GLM-5.3-Flash", "--list"],
        ["--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_output_that_cannot_be_written(arguments, buffered):
    done = run_with_output(">/dev/full", buffered, *arguments)
    assert done.returncode == 1
    assert "the output cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_output_that_nobody_reads():
    arguments = ["targets", "--model-name", "GLM-5.3-Flash", "--list"]
    done = run_with_output("| true", True, *arguments)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.fixture
def failing(monkeypatch):
    """Every command ends with the error that is given."""

    def fail_with(error: Exception) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(cli, "app", fail)

    return fail_with


def test_an_error_that_is_none_of_the_output_is_not_blamed_on_it(call, failing):
    failing(OSError(5, "Input/output error", "/data/file"))
    code, text = call("targets")
    assert code == 1 and "/data/file: Input/output error" in text, text
    assert "the output" not in text and "Traceback" not in text and "--traceback" in text
    code, text = call("targets", "--traceback")
    assert code == 1 and "Traceback" in text, text


def test_a_disk_that_is_full_in_the_middle_of_a_command(call, failing):
    failing(OSError(28, "No space left on device", "/data/file"))
    code, text = call("train")
    assert code == 1 and "/data/file: No space left on device" in text, text
    assert "next: Free some" in text, text


def test_a_broken_pipe_gets_no_box(failing):
    failing(BrokenPipeError(32, "Broken pipe"))
    with pytest.raises(BrokenPipeError):
        main(["targets"])


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", [["targets", "--model-name", "tiny"], ["--help"]])
def test_a_stream_that_is_closed(arguments, closed):
    done = run_with_output(closed, True, *arguments)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_an_error_while_the_output_is_closed():
    done = run_with_output(">&-", True, "targets", "--model-name", "tinny")
    assert done.returncode == 2 and "tinny" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    done = run_with_output("2>&-", True, "targets", "--model-name", "tinny")
    assert done.returncode == 2


LONG = "n" * 260


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "--run", "run", "--output", LONG],
        ["train", "--model-name", "tiny", "--launcher", "inline", "--prompt-data", LONG],
        ["report", "--run", "run", "--output", LONG],
        ["report", "--run", LONG],
        ["report", "--compare", "run", LONG],
        ["train", "--model-name", "tiny", "--run-dir", LONG],
        ["train", "--model-name", "tiny", "--adapter", LONG],
        ["targets", "--model-name", "tiny", "--hf-checkpoint", LONG],
        ["prepare", "--model-name", "tiny", "--hf-checkpoint", LONG],
    ],
    ids=lambda arguments: " ".join(arguments[:-1]),
)
def test_a_name_that_is_too_long_for_any_disk(call, tmp_path, monkeypatch, tiny_root, arguments):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    more = folders(tiny_root) if arguments[0] == "train" else []
    code, text = call(*arguments, *more)
    assert code == 2 and LONG in text and "too long" in text, text
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc here")
def test_a_folder_in_which_nothing_can_be_made(call, tmp_path):
    run = write_run(tmp_path / "run")
    code, text = call("export", "--run", str(run), "--output", "/proc/adapter")
    assert code == 2 and "/proc/adapter cannot be made in /proc" in text, text
    assert "free" not in text


def test_a_report_of_a_run_with_a_damaged_file(call, tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "selection.json", "base.json", "config.toml"):
        (run / name).write_text("{ = 1\n")
        code, text = call("report", "--run", str(run))
        assert code == 2 and name in text, text


def test_flags_for_sglang_are_those_of_train(call):
    for command in (["targets"], ["prepare", "--model-name", "tiny"]):
        code, text = call(*command, "--sglang-foo", "1")
        assert code == 2 and "--sglang-foo" in text and "--sglang-flags" not in text, text


@pytest.mark.parametrize("columns", ["0", "1"])
def test_a_terminal_that_says_it_has_no_columns(columns):
    done = subprocess.run(
        [sys.executable, "-m", "glm_lora", "targets", "--model-name", "nope"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": columns},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "nope" in done.stderr, done.stderr
