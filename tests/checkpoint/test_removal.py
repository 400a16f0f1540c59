"""Removing all of some paths, or nothing."""

from __future__ import annotations

import os

import pytest

from glm_lora.checkpoint.removal import remove_all
from tests.support import small_disk


def test_files_folders_and_links_go_and_what_links_name_stays(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "link").symlink_to(kept)
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    names = ("folder", "link", "dangling", "file", "not there")
    remove_all(tmp_path / name for name in names)
    assert list(tmp_path.iterdir()) == [kept]
    assert (kept / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove anything")
def test_a_folder_that_takes_no_changes(tmp_path):
    (tmp_path / "first").write_text("")
    locked = tmp_path / "second" / "locked"
    locked.mkdir(parents=True)
    (locked / "file").write_text("")
    locked.chmod(0o500)
    with pytest.raises(PermissionError) as caught:
        remove_all([tmp_path / "first", tmp_path / "second"])
    locked.chmod(0o700)
    assert caught.value.filename == str(locked)
    assert (tmp_path / "first").exists() and (locked / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_mounted_below(tmp_path):
    (tmp_path / "first").write_text("")
    (tmp_path / "second").mkdir()
    with small_disk(tmp_path / "second" / "disk", "size=64k") as disk:
        with pytest.raises(OSError, match="busy") as caught:
            remove_all([tmp_path / "first", tmp_path / "second"])
        assert caught.value.filename == str(disk) and (tmp_path / "first").exists()
    remove_all([tmp_path / "first", tmp_path / "second"])
    assert not list(tmp_path.iterdir())
