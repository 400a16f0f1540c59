"""One trainer rank that gives its memory away; a process of its own in ``test_host_copy.py``.

It writes what it saw to ``<folder>/rank<R>.json``. Faults are real ones: a limit on the
size of files, a byte that changes in the shared memory.
"""

from __future__ import annotations

import json
import re
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist

from glm_lora.errors import GlmLoraError
from glm_lora.fingerprint import fingerprint, record_of
from glm_lora.settings import spec_of
from glm_lora.targets.resolve import resolve
from glm_lora.train import host_copy
from glm_lora.train.worker import TrainWorker, build_worker, init_process_group
from tests.prepared import tiny_train_config

PROMPT = [[2, 15, 17, 5, 3]]
SMALL = 4096
"""Bytes a file may have under the fault ``no room``."""


def build(rank: int, world: int, folder: Path, root: Path, values: dict) -> TrainWorker:
    given = {"launcher": "torchrun", "num_gpus_per_node": world, **values}
    given["sglang"] = {"sglang_colocated": True}
    config = tiny_train_config(root, folder / "run", **given)
    spec = spec_of("tiny", config.hf_checkpoint)
    store = dist.FileStore(str(folder / "store"), world)
    init_process_group(config, rank, world, None, store=store)
    return build_worker(config, resolve(spec, "tiny", config.selection).selection)


def base_digest(worker: TrainWorker) -> str:
    base = worker.stage.base_parameters()
    return fingerprint(record_of(k, t.clone()) for k, t in base.items())


def storage_bytes(worker: TrainWorker) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in worker.stage.parameters()}
    return sum(s.nbytes() for s in storages.values())


def mappings() -> dict[str, dict[str, int]]:
    """Size, Rss and Pss in KiB of the nameless files that are mapped here, by inode."""
    found: dict[str, dict[str, int]] = {}
    counted: dict[str, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) (\d+)\s*(.*)", line)
        if head:
            device, inode, name = head.groups()
            ours = "memfd:glm-lora" in name or "/logs/" in name
            counted = found.setdefault(f"{device} {inode}", {}) if ours else None
        elif counted is not None and (value := re.match(r"(Size|Rss|Pss):\s+(\d+) kB", line)):
            counted[value[1]] = counted.get(value[1], 0) + int(value[2])
    return found


def spoil_what_is_written() -> None:
    """One byte of what this rank shares changes before the others look."""
    real = host_copy._made

    def made(*args):
        arenas, opened = real(*args)
        for arena in arenas.values():
            assert arena is not None
            arena[7] += 1
        return arenas, opened

    host_copy._made = made


def rank(number: int, world: int, folder: str, root: str, values: dict, fault: str) -> None:
    """Build, give the memory away, take it back, and say what happened."""
    torch.set_num_threads(1)
    place = Path(folder)
    worker = build(number, world, place, Path(root), values)
    said = {"digest": base_digest(worker), "held": storage_bytes(worker)}
    before = worker.logprobs(PROMPT)[0]
    if fault == "wrong byte" and number == 0:
        spoil_what_is_written()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "no room" and number == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, limit[1]))
    try:
        said["metrics"] = dict(worker.offload())
    except GlmLoraError as error:
        said["error"] = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if "error" not in said:
        said |= {"away": storage_bytes(worker), "maps": mappings()}
        said["summary"] = worker.host_copy_summary()
        said["files"] = [p.name for p in (place / "run").rglob("*") if p.is_file()]
        if fault == "killed":
            wait_for_the_death_of_rank_0(number, place)
        if fault == "later byte" and number == 1:
            next(piece for _, piece in worker._memory._host_base).add_(1)
        dist.barrier() if fault != "killed" else None
        worker.onload()
        said["digest after"] = base_digest(worker)
        if fault == "later byte":
            try:
                worker.verify_base()
            except GlmLoraError as error:
                said["error"] = str(error)
        elif fault != "killed":
            worker.offload()  # the copy is there now: only what changes is copied
            said["again"] = dict(worker.onload())
            said["equal"] = bool((worker.logprobs(PROMPT)[0] == before).all())
    (place / f"rank{number}.json").write_text(json.dumps(said))
    if fault != "killed":
        worker.close()


def wait_for_the_death_of_rank_0(number: int, place: Path) -> None:
    """Rank 0 waits to be killed; rank 1 goes on when it is gone."""
    (place / f"ready{number}").touch()
    if number == 0:
        time.sleep(3600)
    while not (place / "killed").exists():
        time.sleep(0.05)
