"""Building a base folder: plan, check the disk, write or resume the parts, finish.

States on disk: ``release.partial/`` while parts are written (kept after an interruption, and reused
when the same work is asked for again), ``release/`` when everything is written, and last the
tracker file that makes it a finished base.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from glm_lora import __version__
from glm_lora.arch.projections import all_params
from glm_lora.arch.spec import ModelSpec
from glm_lora.checkpoint import base_writer, ranks
from glm_lora.checkpoint.base_writer import BaseSource, Part
from glm_lora.checkpoint.files import (
    OLD,
    check_space,
    exclusive,
    make_folder,
    record_file,
    replace_folder,
    sync_folder,
    write_atomic,
    write_errors,
)
from glm_lora.checkpoint.manifest import MANIFEST, BaseManifest, read_manifest
from glm_lora.checkpoint.progress import Progress, Report, silent
from glm_lora.checkpoint.torch_dist import INDEX_FILES, RELEASE, TRACKER, read_metadata
from glm_lora.errors import MAKE_AGAIN, CheckpointError
from glm_lora.fingerprint import fingerprint, tensor_bytes

PARTIAL = f"{RELEASE}.partial"
PLAN_FILE = "plan.json"
MAX_WORKERS = 8
_OURS = {RELEASE, PARTIAL, f"{RELEASE}{OLD}", TRACKER}


@dataclass(frozen=True)
class BasePlan:
    """The work of building one base."""

    ref_load: Path
    spec: ModelSpec
    source: BaseSource
    description: Mapping[str, Any]
    """The source as the manifest will tell it; equal exactly for equal values."""
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data that a finished base holds."""
        return sum(part.nbytes for part in self.parts)

    @property
    def partial(self) -> Path:
        """Where the parts are written."""
        return self.ref_load / PARTIAL

    def identity(self) -> str:
        """A digest of everything that decides the bytes of the parts."""
        content = {
            "spec": asdict(self.spec),
            "source": dict(self.description),
            "parts": [[part.file_name, part.keys] for part in self.parts],
            "chunk": base_writer.CHUNK_BYTES,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def finished_parts(self) -> list[Part]:
        """The parts that an earlier, interrupted start of the same work has finished."""
        try:
            started = json.loads((self.partial / PLAN_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return []
        if started != {"identity": self.identity()}:
            return []
        return [p for p in self.parts if base_writer.read_sidecar(self.partial, p)]


def plan_base(
    ref_load: Path, spec: ModelSpec, source: BaseSource, description: Mapping[str, Any]
) -> BasePlan:
    """Plan a base of ``spec``; touches nothing."""
    parts = base_writer.plan_parts(all_params(spec), source)
    return BasePlan(ref_load, spec, source, description, tuple(parts))


def check_target(ref_load: Path) -> None:
    """Refuse a base folder that holds anything but a base.

    Raises:
        CheckpointError: A file in the way, foreign files, or no permission.
    """
    if ref_load.exists() and not ref_load.is_dir():
        raise CheckpointError(f"{ref_load} is a file", "a folder")
    foreign = sorted(p.name for p in ref_load.glob("*") if p.name.split(".tmp")[0] not in _OURS)
    if foreign:
        raise CheckpointError(
            f"{ref_load} is not empty ({', '.join(foreign[:3])})",
            "an empty folder, or an earlier base",
            "Name another folder with --ref-load",
        )


def build_base(plan: BasePlan, workers: int = 0, report: Report = silent) -> BaseManifest:
    """Write the base of ``plan``, or what is left of it; replaces a finished one at the end.

    Under torchrun every rank calls this and writes its share of the parts; a process alone uses
    ``workers`` threads (0: the processors there are, at most 8). Neither changes a byte.

    Raises:
        CheckpointError: The folder is not writable or not empty, the disk is too small or full, or
            the source turns out to be damaged. What was finished is kept.
    """
    with ranks.joined() as (rank, world):
        with write_errors(plan.ref_load), ExitStack() as held:
            if rank == 0:
                check_target(plan.ref_load)
                make_folder(plan.ref_load)
                held.enter_context(exclusive(plan.ref_load))
                _start(plan)
            ranks.wait()
            _write_parts(plan, plan.parts[rank::world], workers, report)
            ranks.wait()
            if rank == 0:
                _finish(plan)
            ranks.wait()
        return read_manifest(plan.ref_load)


def worker_count(wanted: int) -> int:
    """The number of threads for a wish: 0 takes the processors there are, at most 8."""
    return wanted or min(MAX_WORKERS, os.cpu_count() or 1)


def _start(plan: BasePlan) -> None:
    """Make the partial folder for this plan; parts of other work are dropped."""
    done = plan.finished_parts()
    if not done and plan.partial.exists():
        shutil.rmtree(plan.partial)
    needed = plan.nbytes - sum(part.nbytes for part in done)
    more = "Free some space, or name another disk with --ref-load"
    check_space(plan.ref_load, needed, "the base", more)
    if not done:
        plan.partial.mkdir(exist_ok=True)
        write_atomic(plan.partial / PLAN_FILE, json.dumps({"identity": plan.identity()}))


def _write_parts(plan: BasePlan, mine: tuple[Part, ...], workers: int, report: Report) -> None:
    left = [p for p in mine if base_writer.read_sidecar(plan.partial, p) is None]
    total = sum(part.nbytes for part in mine)
    counter = _ByteCounter(total - sum(p.nbytes for p in left), total, report)
    params = all_params(plan.spec)
    threads = min(worker_count(workers), max(1, len(left)))
    intra_op = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            # Largest first, so that no thread is left alone with a large one at the end.
            jobs = [
                pool.submit(
                    base_writer.write_part, plan.partial, part, params, plan.source, counter
                )
                for part in sorted(left, key=lambda p: -p.nbytes)
            ]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                counter.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(intra_op)


class _Interrupted(Exception):
    """Ends the threads that still write after another one failed."""


class _ByteCounter:
    """Adds up the bytes that the threads write, and reports them."""

    def __init__(self, done: int, total: int, report: Report) -> None:
        self._done, self._total, self._report = done, total, report
        self._lock = threading.Lock()
        self._stopped = False

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            if self._stopped:
                raise _Interrupted
            self._done += nbytes
            self._report(Progress("converting", self._done, self._total, "bytes"))

    def stop(self) -> None:
        self._stopped = True


def _finish(plan: BasePlan) -> None:
    sidecars = [base_writer.read_sidecar(plan.partial, part) for part in plan.parts]
    complete = [s for s in sidecars if s is not None]
    assert len(complete) == len(sidecars), "a part is not finished after all ranks have ended"
    records = base_writer.write_metadata(plan.partial, complete)
    manifest = BaseManifest(
        fingerprint(records),
        plan.spec,
        tuple(records),
        {s["file"]: s["size"] for s in complete},
        plan.description,
        {"glm-lora": __version__, "torch": version("torch")},
        {name: record_file(plan.partial / name) for name in INDEX_FILES},
    )
    write_atomic(plan.partial / MANIFEST, manifest.to_json())
    tracker = plan.ref_load / TRACKER
    tracker.unlink(missing_ok=True)
    replace_folder(plan.partial, plan.ref_load / RELEASE)
    (plan.ref_load / RELEASE / PLAN_FILE).unlink()
    write_atomic(tracker, RELEASE)
    sync_folder(plan.ref_load)


def verify_base(ref_load: Path, manifest: BaseManifest, report: Report = silent) -> None:
    """Read every tensor of a finished base again and compare its hash with the manifest.

    Raises:
        CheckpointError: A file is truncated or damaged; it is named, and the tensor.
    """
    release = ref_load / RELEASE
    metadata = read_metadata(release, [record.key for record in manifest.tensors])
    total = sum(manifest.files.values())
    done = 0
    for record in manifest.tensors:
        digest = hashlib.sha256()
        for value in base_writer.stored_chunks(release, metadata, record.key):
            digest.update(tensor_bytes(value))
            done += value.nbytes
            report(Progress("verifying", min(done, total), total, "bytes"))
        if digest.hexdigest() != record.sha256:
            raise CheckpointError(
                f"{record.key} in {release} is not what was written (its sha256 differs)",
                record.sha256,
                MAKE_AGAIN,
            )
