"""Ranks of one machine keep one host copy of what they hold alike: two real processes, tiny."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from glm_lora.train.host_copy import Held, host_copy, shares
from tests.train import host_copy_ranks

TP2 = {"parallel": {"tensor_model_parallel_size": 2}}


def start(
    folder: Path, root: Path, values: dict | None = None, fault: str = "", join: bool = True
) -> Any:
    folder.mkdir(exist_ok=True)
    arguments = (2, str(folder), str(root), values or {}, fault)
    return mp.spawn(host_copy_ranks.rank, arguments, nprocs=2, join=join)


def said(folder: Path, rank: int) -> dict:
    return json.loads((folder / f"rank{rank}.json").read_text())


def both(folder: Path) -> list[dict]:
    return [said(folder, rank) for rank in range(2)]


def inodes(report: dict) -> set[str]:
    return set(report["maps"])


def came_back(report: dict) -> None:
    assert report["away"] == 0 and report["held"] > 0
    assert report["digest after"] == report["digest"], "bit-equal after release and resume"
    assert report["equal"], "the same log-probabilities"


@pytest.mark.parametrize("target", ["cpu", pytest.param("disk", marks=pytest.mark.slow)])
def test_data_parallel_ranks_share_all_of_the_base(tiny_root, tmp_path, target):
    start(tmp_path, tiny_root, {"offload_train_target": target})
    first, second = both(tmp_path)
    for report in (first, second):
        came_back(report)
        assert report["metrics"]["memory/base_host_bytes_unshared"] == 2 * first["held"]
        assert report["metrics"]["memory/base_host_bytes"] <= first["held"]
        assert not [name for name in report["files"] if name.startswith("base-")]
    assert inodes(first) == inodes(second) and len(inodes(first)) == 1, "one file in both"
    (counted,) = second["maps"].values()
    assert counted["Rss"] >= first["held"] / 1024 and counted["Pss"] <= 0.51 * counted["Rss"]
    written = [r["metrics"]["offload/bytes_to_host"] for r in (first, second)]
    assert written[0] - written[1] == first["metrics"]["memory/base_host_bytes"], "one writes it"
    line = "1.03 MiB on a machine (2.06 MiB with a copy for each rank; 2 rank(s), 1 machine(s))"
    assert line in first["summary"]
    assert "unpinned" not in first["summary"], "on GPUs this is where pinning is tested"


def test_tensor_parallel_ranks_share_what_is_replicated(tiny_root, tmp_path):
    start(tmp_path, tiny_root, TP2)
    first, second = both(tmp_path)
    for report in (first, second):
        came_back(report)
    both_hold = inodes(first) & inodes(second)
    assert len(both_hold) == 1, "replicated and routed experts"
    assert len(inodes(first)) == len(inodes(second)) == 2, "and what only one of them holds"
    assert first["digest"] != second["digest"]
    metrics = first["metrics"]
    saved = metrics["memory/base_host_bytes_unshared"] - metrics["memory/base_host_bytes"]
    shared = first["maps"][both_hold.pop()]["Size"] * 1024
    assert 0 < saved <= shared
    assert metrics["memory/base_host_bytes_unshared"] == first["held"] + second["held"]


def test_a_killed_writer_leaves_nothing_and_the_others_keep_the_copy(tiny_root, tmp_path):
    context = start(tmp_path, tiny_root, fault="killed", join=False)
    try:
        end = time.monotonic() + 120
        while not all((tmp_path / f"ready{n}").exists() for n in range(2)):
            assert time.monotonic() < end, "the ranks have no host copy"
            time.sleep(0.1)
        os.kill(context.processes[0].pid, signal.SIGKILL)
        context.processes[0].join(30)
        (tmp_path / "killed").touch()
        context.processes[1].join(60)
    finally:
        for process in context.processes:
            process.kill()  # one that is left would be waited for when the tests end
    second = said(tmp_path, 1)
    assert second["digest after"] == second["digest"], "rank 0 had written it, rank 1 has it"
    assert not [p for p in Path("/dev/shm").iterdir() if "glm-lora" in p.name]
    assert not list((tmp_path / "run").rglob("base-*"))


def test_no_room_leaves_a_copy_for_each_rank_and_says_why(tiny_root, tmp_path):
    start(tmp_path, tiny_root, fault="no room")
    first, second = both(tmp_path)
    for report in (first, second):
        came_back(report)
        assert report["maps"] == {}
        metrics = report["metrics"]
        # Equal storages of one rank are one piece, with or without sharing.
        assert metrics["memory/base_host_bytes"] > 1.9 * first["held"]
        assert "cannot be shared: File too large" in report["summary"]
        assert "rank 1 keeps" in report["summary"]


@pytest.mark.slow
def test_no_room_on_the_disk_that_was_asked_for_is_an_error(tiny_root, tmp_path):
    start(tmp_path, tiny_root, {"offload_train_target": "disk"}, fault="no room")
    for report in both(tmp_path):
        assert report["error"].startswith("RunError: --offload-train-target disk: no copy")
        assert "on rank 0" in report["error"] and "--offload-train-target cpu" in report["error"]


def test_a_share_that_differs_from_a_ranks_own_base_is_refused_on_all(tiny_root, tmp_path):
    start(tmp_path, tiny_root, fault="wrong byte")
    for report in both(tmp_path):
        assert report["error"].startswith("TrainingError: the shared host copy of the base is")
        assert "that rank 0 wrote" in report["error"]


@pytest.mark.slow
def test_a_byte_that_changes_later_is_found_by_the_check_of_the_base(tiny_root, tmp_path):
    start(tmp_path, tiny_root, fault="later byte")
    for report in both(tmp_path):
        assert "the frozen base changed" in report["error"]


def test_who_shares_what():
    held = [
        Held("a", {"all": 600, "left": 8}, 608),
        Held("a", {"all": 600, "right": 8}, 608),
        Held("a", {"all": 600, "left": 8}, 608),
        Held("b", {"all": 600, "left": 1000}, 1600),
    ]
    found = {share.holders: dict(share.offsets) for share in shares(held)}
    assert found == {
        (0, 1, 2): {"all": 0},
        (0, 2): {"left": 0},
        (1,): {"right": 0},
        (3,): {"all": 0, "left": 1024},
    }
    assert {share.size for share in shares(held)} == {1024, 512, 2048}


def test_a_rank_alone_has_a_copy_too():
    storages = [torch.full((3000,), 7, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8)]
    copy = host_copy(storages)
    assert [piece.tolist() for piece in copy.pieces] == [s.tolist() for s in storages]
    assert (copy.written, copy.machine_bytes, copy.unshared_bytes) == (3010, 3010, 3010)
    copy.close()
