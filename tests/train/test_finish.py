"""The adapter at the end of a run, over the one of an earlier finish: whole, or that one stays."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm_lora.arch.spec import TINY
from glm_lora.checkpoint.train_state import STATE_FILE
from glm_lora.errors import RunError
from glm_lora.export.load import load_adapter
from glm_lora.report.run_folder import RunFolder
from glm_lora.train.finish import write_result
from tests.support import small_disk
from tests.tiny_checkpoint import random_state, tiny_selection

FIRST, SECOND = (random_state(tiny_selection(), seed=seed) for seed in (1, 2))


@pytest.fixture
def folder(tmp_path) -> Iterator[RunFolder]:
    """Of a run that has written a checkpoint."""
    checkpoint = tmp_path / "run" / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    for name in (STATE_FILE, ".metadata"):
        (checkpoint / name).write_text("{}")
    opened = RunFolder(tmp_path / "run")
    yield opened
    opened.close()


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As ``ulimit -f``: writing more fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def digest(path: Path) -> str:
    return load_adapter(path, TINY).digest


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def test_what_a_killed_writer_left_is_removed(folder):
    write_result(FIRST, folder, "base", saved=True)
    written = names(folder.adapter)
    left = folder.adapter / ".adapter.abc123"
    left.mkdir()
    (left / "adapter_model.safetensors").write_text("half of it")
    write_result(SECOND, folder, "base", saved=True)
    assert names(folder.adapter) == written
    assert digest(folder.adapter) == SECOND.digest


def test_an_adapter_that_cannot_be_written_leaves_the_one_before_it(folder):
    write_result(FIRST, folder, "base", saved=True)
    written = names(folder.adapter)
    with files_of_at_most(10_000), pytest.raises(RunError) as caught:
        write_result(SECOND, folder, "base", saved=True)
    assert "File too large" in caught.value.what
    assert "iter_0000001 holds all" in caught.value.next_step
    assert digest(folder.adapter) == FIRST.digest
    assert names(folder.adapter) == written
    write_result(SECOND, folder, "base", saved=True)
    assert digest(folder.adapter) == SECOND.digest


def test_neither_checkpoint_nor_adapter(folder):
    with files_of_at_most(10_000), pytest.raises(RunError, match="neither the last checkpoint"):
        write_result(FIRST, folder, "base", saved=False)
    assert names(folder.path) == {".lock", "checkpoints"}


def test_other_files_in_the_folder_stay(folder):
    write_result(FIRST, folder, "base", saved=True)
    (folder.adapter / "mine").mkdir()
    (folder.adapter / "mine" / "notes.txt").write_text("mine")
    write_result(SECOND, folder, "base", saved=True)
    assert (folder.adapter / "mine" / "notes.txt").read_text() == "mine"
    assert digest(folder.adapter) == SECOND.digest


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_written_through(folder, tmp_path, there):
    elsewhere = tmp_path / "elsewhere" / "adapter"
    folder.adapter.symlink_to(elsewhere)
    if there:
        elsewhere.mkdir(parents=True)
    for state in (FIRST, SECOND):
        write_result(state, folder, "base", saved=True)
        assert folder.adapter.is_symlink()
        assert digest(elsewhere) == state.digest
    assert names(elsewhere.parent) == {"adapter"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_link_to_a_disk_of_its_own(folder, tmp_path):
    """The top of a mount can neither be renamed nor removed."""
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        folder.adapter.symlink_to(disk)
        write_result(FIRST, folder, "base", saved=True)
        assert digest(disk) == FIRST.digest
        (disk / "filler").write_bytes(bytes(4 * 2**20 - used(disk) - 2**16))
        with pytest.raises(RunError, match="the adapter was not written"):
            write_result(SECOND, folder, "base", saved=True)
        assert digest(disk) == FIRST.digest


def used(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.iterdir())
