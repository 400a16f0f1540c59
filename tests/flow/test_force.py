"""``--force`` and ``--resume`` in a run folder that holds links and files of its user."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from glm_lora.checkpoint.train_state import latest_checkpoint
from tests.support import small_disk, words
from tests.tiny_runs import adapter, train

pytestmark = pytest.mark.usefixtures("wide_errors")


@pytest.fixture(scope="module")
def trained(tiny_root, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert train(tiny_root, run, "--num-rollout", "1") == 0
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def moved(run, tmp_path) -> dict[str, Path]:
    """Checkpoints and adapter on another disk, and links in their places."""
    (tmp_path / "disk").mkdir()
    places = {name: tmp_path / "disk" / name for name in ("checkpoints", "adapter")}
    for name, place in places.items():
        (run / name).rename(place)
        (run / name).symlink_to(place)
    return places


def test_a_resume_writes_through_links(run, moved, tiny_root):
    before = adapter(run)
    assert train(tiny_root, run, "--num-rollout", "2", "--resume") == 0
    assert all((run / name).is_symlink() for name in moved)
    assert (moved["checkpoints"] / "iter_0000002").is_dir()
    assert adapter(run) != before


def test_force_removes_links_and_nothing_behind_them(run, moved, tiny_root):
    before = adapter(run)
    assert train(tiny_root, run, "--num-rollout", "1", "--seed", "7", "--force") == 0
    assert not any((run / name).is_symlink() for name in moved)
    assert adapter(moved["adapter"].parent) == before != adapter(run)
    assert (moved["checkpoints"] / "iter_0000001").is_dir()
    assert latest_checkpoint(run) == run / "checkpoints" / "iter_0000001"


def test_files_of_the_user_stay(run, tiny_root):
    mine = [
        run / "adapter" / "mine" / "notes.txt",
        run / "checkpoints" / "iter_0000001.backup" / "state.json",
        run / "checkpoints" / "iter_0000001_before_lr_spike" / "state.json",
    ]
    for path in mine:
        path.parent.mkdir()
        path.write_text("mine")
    options = ["--save-interval", "1", "--keep-last", "1"]
    assert train(tiny_root, run, "--num-rollout", "2", "--resume", *options) == 0
    assert latest_checkpoint(run) == run / "checkpoints" / "iter_0000002"
    assert train(tiny_root, run, "--num-rollout", "1", "--force") == 0
    assert latest_checkpoint(run) == run / "checkpoints" / "iter_0000001"
    assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_what_cannot_be_removed_whole_stays_whole(run, tiny_root, capsys):
    with small_disk(run / "checkpoints" / "iter_0000001" / "disk", "size=64k") as disk:
        assert train(tiny_root, run, "--num-rollout", "1", "--force") == 2
        said = words(capsys.readouterr().err)
        assert f"--force: {disk} cannot be removed" in said, said
    disk.rmdir()
    assert train(tiny_root, run, "--num-rollout", "2", "--resume") == 0


def test_a_start_that_fails_after_the_removal_can_be_forced_again(run, tiny_root, capsys):
    """A folder in the place of a file that every run writes."""
    (run / "base.json").unlink()
    (run / "checkpoints" / "iter_0000001").rename(run / "moved")
    (run / "checkpoints").rmdir()
    (run / "checkpoints").write_text("a file of the user's")
    assert train(tiny_root, run, "--num-rollout", "1", "--force") == 2
    assert "cannot be written" in words(capsys.readouterr().err)
    (run / "checkpoints").unlink()
    assert train(tiny_root, run, "--num-rollout", "1", "--force") == 0
