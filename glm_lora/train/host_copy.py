"""The host copy of the frozen base: once per machine, not once per rank.

Ranks of one machine hold much that is equal: data-parallel replicas all of it, tensor-parallel
neighbours the replicated parameters. Every rank says what its storages hash to; what several hold
is written by the lowest of them and mapped by the others. The memory behind it has no name (a
``memfd``, or a file that is unlinked as it is made) and is opened through ``/proc``, so however a
process ends nothing is left behind, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from glm_lora.errors import RunError, TrainingError

_CHUNK = 2**26
"""Bytes hashed or compared at a time: what they need on the host or the device besides."""
_ALIGN = 512


@dataclass(frozen=True)
class Share:
    """Pieces that exactly these ranks of one machine hold, one behind the other."""

    holders: tuple[int, ...]
    """In order; the first writes the pieces."""
    offsets: Mapping[str, int]
    """Where each piece lies, by digest."""
    size: int
    """Bytes of all of them."""


@dataclass(frozen=True)
class Held:
    """What one rank says of itself."""

    machine: str
    pieces: Mapping[str, int]
    """Bytes by digest, or by a name where the machine has no other rank."""
    nbytes: int
    """Bytes of its storages; several may be equal."""


def shares(held: Sequence[Held]) -> list[Share]:
    """Who shares what: equal pieces of one machine once; a piece of one rank has one holder.

    Args:
        held: By rank.
    """
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, own in enumerate(held):
        for digest in own.pieces:
            holders.setdefault((own.machine, digest), []).append(rank)
    together: dict[tuple[int, ...], list[str]] = {}
    for (_, digest), ranks in holders.items():
        together.setdefault(tuple(ranks), []).append(digest)
    found = []
    for ranks, digests in together.items():
        offsets, end = {}, 0
        for digest in digests:
            offsets[digest] = end
            end += -(-held[ranks[0]].pieces[digest] // _ALIGN) * _ALIGN
        found.append(Share(ranks, offsets, end))
    return found


@dataclass
class _Outcome:
    """How it went on one rank."""

    written: int = 0
    """Bytes of the shares it made."""
    private: int = 0
    """Bytes of copies of its own, where sharing did not work."""
    reasons: list[str] = field(default_factory=list)
    unpinned: str = ""
    wrong: str = ""
    """A piece that differs from this rank's own."""


@dataclass(frozen=True)
class HostCopy:
    """The copy as one rank sees it."""

    pieces: Sequence[torch.Tensor]
    """``uint8`` on the host, one per storage."""
    written: int
    """Bytes that this rank copied."""
    machine_bytes: int
    """Bytes of all copies on the machine that holds most."""
    unshared_bytes: int
    """What that machine would hold with a copy for every rank."""
    summary: str
    """One line for the user; what could not be shared or pinned, and why, is in it."""
    registered: Sequence[torch.Tensor] = ()

    def metrics(self) -> dict[str, float]:
        """Bytes on the host of the fullest machine, as it is and without sharing."""
        return {
            "memory/base_host_bytes": float(self.machine_bytes),
            "memory/base_host_bytes_unshared": float(self.unshared_bytes),
        }

    def close(self) -> None:
        """Unpin what was pinned, before it is unmapped."""
        for arena in self.registered:
            _cudart().cudaHostUnregister(arena.data_ptr())


def host_copy(storages: Sequence[torch.Tensor], folder: Path | None = None) -> HostCopy:
    """Copy storages to the host; every rank of the default process group calls this.

    Args:
        storages: Their bytes (``uint8``), on the device or the CPU; they must not change.
        folder: Put the copy into files there, mapped, instead of into memory.

    Raises:
        RunError: No file in ``folder`` can be made that large.
        TrainingError: What is shared differs from what a rank holds; raised on all ranks.
    """
    mine = dist.get_rank() if dist.is_initialized() else 0
    machine = _machine()
    alone = _everyone(machine).count(machine) == 1
    # A rank alone has nobody to share with: names do, and hashing takes seconds per 10 GB.
    digests = [f"{n}" if alone else _digest(storage) for n, storage in enumerate(storages)]
    pieces = {d: s.nbytes for d, s in zip(digests, storages, strict=True)}
    held = _everyone(Held(machine, pieces, sum(s.nbytes for s in storages)))
    own = dict(zip(digests, storages, strict=True))
    plan = [share for share in shares(held) if mine in share.holders]
    outcome = _Outcome()
    arenas, opened = _made(plan, mine, own, folder, outcome)
    offers = _everyone({share.holders: (os.getpid(), fd) for share, fd in opened})
    for share in plan:
        if share.holders[0] != mine:
            arenas[share.holders] = _mapped(share, offers[share.holders[0]], outcome)
    _everyone(None)  # nobody closes a descriptor that another one still opens
    for _, fd in opened:
        os.close(fd)
    registered = [a for a in arenas.values() if a is not None and _pinned(a, storages, outcome)]
    kept: dict[str, torch.Tensor] = {}
    for share in plan:
        kept |= _checked(share, arenas[share.holders], own, outcome)
    outcomes = _everyone(outcome)
    _refuse(outcomes, folder)
    now, unshared = _fullest(held, outcomes)
    return HostCopy(
        pieces=[kept[digest] for digest in digests],
        written=outcome.written + outcome.private,
        machine_bytes=now,
        unshared_bytes=unshared,
        summary=_summary(held, outcomes, folder),
        registered=registered,
    )


def _made(
    plan: Sequence[Share],
    mine: int,
    own: Mapping[str, torch.Tensor],
    folder: Path | None,
    outcome: _Outcome,
) -> tuple[dict[tuple[int, ...], torch.Tensor | None], list[tuple[Share, int]]]:
    """The shares that this rank writes, and the descriptors under which others find them."""
    arenas: dict[tuple[int, ...], torch.Tensor | None] = {}
    opened: list[tuple[Share, int]] = []
    for share in plan:
        if share.holders[0] != mine:
            continue
        arenas[share.holders] = None
        fd = -1
        try:
            fd = _nameless(folder)
            os.posix_fallocate(fd, 0, share.size)  # known now, not by a fault while writing
            arena = torch.frombuffer(mmap.mmap(fd, share.size), dtype=torch.uint8)
        except OSError as error:
            outcome.reasons.append(f"{share.size} bytes cannot be shared: {error.strerror}")
            if fd >= 0:
                os.close(fd)
            continue
        for digest, offset in share.offsets.items():
            arena[offset : offset + own[digest].nbytes].copy_(own[digest])
        outcome.written += sum(own[digest].nbytes for digest in share.offsets)
        arenas[share.holders] = arena
        opened.append((share, fd))
    return arenas, opened


def _nameless(folder: Path | None) -> int:
    """A new file without a name, which goes with the last process that has it."""
    if folder is None:
        return os.memfd_create("glm-lora-base")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, prefix="base-") as file:
        return os.dup(file.fileno())


def _mapped(
    share: Share, offers: Mapping[tuple[int, ...], tuple[int, int]], outcome: _Outcome
) -> torch.Tensor | None:
    """A share that another rank has written; None where it cannot be opened."""
    if share.holders not in offers:
        return None  # its writer says why
    pid, number = offers[share.holders]
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(fd, share.size), dtype=torch.uint8)
        finally:
            os.close(fd)
    except OSError as error:
        outcome.reasons.append(f"the copy of rank {share.holders[0]}: {error.strerror}")
        return None


def _checked(
    share: Share,
    arena: torch.Tensor | None,
    own: Mapping[str, torch.Tensor],
    outcome: _Outcome,
) -> dict[str, torch.Tensor]:
    """The pieces of a share, compared bit for bit with what this rank holds itself."""
    if arena is None:
        outcome.private += sum(own[digest].nbytes for digest in share.offsets)
        return {digest: to_host(own[digest]) for digest in share.offsets}
    found = {}
    for digest, offset in share.offsets.items():
        found[digest] = arena[offset : offset + own[digest].nbytes]
        if len(share.holders) > 1 and not _same(found[digest], own[digest]):
            outcome.wrong = f"a piece of {own[digest].nbytes} bytes that rank {share.holders[0]} "
            outcome.wrong += "wrote"
    return found


def _refuse(outcomes: Sequence[_Outcome], folder: Path | None) -> None:
    for rank, outcome in enumerate(outcomes):
        if outcome.wrong:
            raise TrainingError(
                f"the shared host copy of the base is wrong: rank {rank} reads {outcome.wrong}",
                "bytes equal to its own base",
                "Check the machine's memory; please report this if it comes again",
            )
        if folder is not None and outcome.reasons:
            raise RunError(
                f"--offload-train-target disk: no copy of the base in {folder} on rank {rank} "
                f"({'; '.join(outcome.reasons)})",
                "room for the rank's part of the base",
                "Free some space, or use --offload-train-target cpu",
            )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, pinned when the tensor is on a GPU."""
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return host.copy_(tensor)


def _pinned(arena: torch.Tensor, storages: Sequence[torch.Tensor], outcome: _Outcome) -> bool:
    """Let the GPU read the share at full speed; without that it is only slower."""
    device = next((s.device for s in storages), torch.device("cpu"))
    if device.type != "cuda":
        return False
    cudart = _cudart()
    code = cudart.cudaHostRegister(arena.data_ptr(), arena.nbytes, 0)
    if code == cudart.cudaError.success:
        return True
    outcome.unpinned = f"cudaHostRegister: {cudart.cudaGetErrorString(code)}"
    with contextlib.suppress(RuntimeError):  # CUDA blames the next kernel for it
        torch.zeros(1, device=device).add_(1)
    return False


def _cudart() -> Any:
    """CUDA's runtime, of which torch exposes the registering of host memory."""
    return torch.cuda.cudart()


def _digest(storage: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for start in range(0, storage.nbytes, _CHUNK):
        # A copy: a storage that numpy has seen can no longer give its memory away.
        digest.update(storage[start : start + _CHUNK].to("cpu", copy=True).numpy().data)
    return digest.hexdigest()


def _same(host: torch.Tensor, storage: torch.Tensor) -> bool:
    return all(
        torch.equal(host[at : at + _CHUNK].to(storage.device), storage[at : at + _CHUNK])
        for at in range(0, storage.nbytes, _CHUNK)
    )


def _machine() -> str:
    """What ranks that can open each other's descriptors have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.getpid()} alone, without /proc"


def _everyone(mine: Any) -> list[Any]:
    """What every rank says, in rank order; also a barrier."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said


def _fullest(held: Sequence[Held], outcomes: Sequence[_Outcome]) -> tuple[int, int]:
    """Bytes of the copies, and of one copy per rank, on the machine that holds most."""
    machines: dict[str, list[int]] = {}
    for own, outcome in zip(held, outcomes, strict=True):
        sums = machines.setdefault(own.machine, [0, 0])
        sums[0] += outcome.written + outcome.private
        sums[1] += own.nbytes
    now, unshared = max(machines.values())
    return now, unshared


def _summary(held: Sequence[Held], outcomes: Sequence[_Outcome], folder: Path | None) -> str:
    machines = len({own.machine for own in held})
    now, unshared = _fullest(held, outcomes)
    text = f"host copy of the base: {_amount(now)} on a machine"
    text += f" ({_amount(unshared)} with a copy for each rank; {len(held)} rank(s), "
    text += f"{machines} machine(s))"
    if folder is not None:
        text += f", in files without a name in {folder}"
    for rank, outcome in enumerate(outcomes):
        if outcome.private:
            reasons = "; ".join(outcome.reasons) or "its writer could not share it"
            text += f"; rank {rank} keeps {_amount(outcome.private)} of its own: {reasons}"
        if outcome.unpinned:
            text += f"; rank {rank} copies unpinned, more slowly: {outcome.unpinned}"
    return text


def _amount(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
