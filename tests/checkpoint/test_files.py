"""Folders are replaced whole, through links, and past what a crash left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from glm_lora.checkpoint.files import (
    built_folder,
    existing,
    make_folder,
    new_partial,
    replace_folder,
)
from glm_lora.errors import CheckpointError


def build(target: Path, text: str) -> None:
    with built_folder(target) as partial:
        (partial / "file").write_text(text)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_stays_a_link(tmp_path: Path, relative: bool, dangling: bool) -> None:
    disk, models = tmp_path / "disk", tmp_path / "models"
    models.mkdir()
    if not dangling:
        (disk / "tiny").mkdir(parents=True)
        (disk / "tiny" / "file").write_text("old")
    link = models / "tiny"
    link.symlink_to(Path("../disk/tiny") if relative else disk / "tiny")
    for text in ("1", "2"):
        build(link, text)
        assert link.is_symlink() and (disk / "tiny" / "file").read_text() == text
        assert list(models.iterdir()) == [link] and list(disk.iterdir()) == [disk / "tiny"]


def test_leftovers_that_are_links_are_unlinked(tmp_path: Path) -> None:
    target, kept = tmp_path / "tiny", tmp_path / "kept"
    build(kept, "kept")
    build(target, "1")
    own = new_partial(target)
    own.rmdir()
    old = own.with_name(f"{own.name}.old")
    for leftover in (old, own):
        leftover.symlink_to(kept)
    build(target, "2")
    assert {p.name for p in tmp_path.iterdir()} == {"tiny", "kept"}
    assert [(p / "file").read_text() for p in (target, kept)] == ["2", "kept"]
    old.symlink_to(tmp_path / "nothing")
    build(target, "3")
    assert {p.name for p in tmp_path.iterdir()} == {"tiny", "kept"}


@pytest.mark.parametrize("name", ["tiny.old", "tiny.partial", "tiny.partial.old", "tiny.partial1x"])
def test_a_folder_of_the_user_beside_it_stays(tmp_path: Path, name: str) -> None:
    build(tmp_path / name, "mine")
    for text in ("1", "2"):
        build(tmp_path / "tiny", text)
    assert {p.name for p in tmp_path.iterdir()} == {"tiny", name}
    assert (tmp_path / name / "file").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True])
def test_a_swap_that_fails_leaves_what_was_there(tmp_path: Path, there: bool) -> None:
    target = tmp_path / "tiny"
    if there:
        build(target, "1")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "missing", target)
    assert list(tmp_path.glob("**/*")) == ([target, target / "file"] if there else [])


def test_a_name_that_is_a_pattern_matches_itself_only(tmp_path: Path) -> None:
    mine = new_partial(tmp_path / "tiny1")
    build(tmp_path / "tiny[1]", "1")
    assert {p.name for p in tmp_path.iterdir()} == {"tiny[1]", mine.name}


def test_what_a_crash_between_the_two_renames_left_is_put_back(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    build(target, "1")
    with pytest.raises(KeyboardInterrupt), built_folder(target) as partial:
        # As the swap leaves them when its process is killed after the first rename.
        target.rename(partial.with_name(f"{partial.name}.old"))
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="disk"), built_folder(target):
        raise RuntimeError("disk")
    assert (target / "file").read_text() == "1" and list(tmp_path.iterdir()) == [target]


def test_a_link_inside_is_replaced_by_the_folder(tmp_path: Path) -> None:
    """``release`` may be a link to another disk, to which nothing can be renamed."""
    build(tmp_path / "kept", "kept")
    target = tmp_path / "release"
    target.symlink_to(tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", tmp_path / "finished")
    replace_folder(tmp_path / "finished", target)
    assert not target.is_symlink() and {p.name for p in tmp_path.iterdir()} == {"kept", "release"}


def test_a_folder_that_a_link_names_is_made(tmp_path: Path) -> None:
    link = tmp_path / "ckpt"
    link.symlink_to(tmp_path / "disk" / "ckpt")
    make_folder(link)
    assert link.is_symlink() and (tmp_path / "disk" / "ckpt").is_dir()


def test_a_link_to_itself(tmp_path: Path) -> None:
    link = tmp_path / "ckpt"
    link.symlink_to(link)
    with pytest.raises(CheckpointError, match="ckpt"):
        make_folder(link)
    assert existing(link / "deeper") == tmp_path
