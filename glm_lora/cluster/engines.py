"""Several rollout engines as one: work is shared out, and a lost engine costs a few minutes.

A lost or silent engine is ended, started again, given the adapters it had, and its unfinished
samples are redone; every request carries its own seed, so the samples are those it would have made.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import ray

from glm_lora.cluster.waiting import MachineLost, error_of, results
from glm_lora.errors import GlmLoraError, ProcessLost, RolloutError, first_line
from glm_lora.protocols import (
    AdapterRef,
    AdapterState,
    Capabilities,
    Receipt,
    Request,
    Sample,
)
from glm_lora.rollout.agreement import check_agreement

HELD = 2
"""Adapter versions an engine may be asked for: the newest and the one before."""
LANES = 4
"""Batches a server works on at the same time, so that a lost one costs only a part."""
_POLL = 0.5


class Handle(Protocol):
    """One engine's process."""

    lanes: int
    """Batches it works on at the same time."""

    def start(self) -> None:
        """Begin to start it; ``ready`` waits."""
        ...

    def ready(self) -> None:
        """Wait until the model is loaded; ProcessLost or RolloutError when it is not."""
        ...

    def submit(self, name: str, *args: Any) -> ray.ObjectRef:
        """Begin one call of the engine's method ``name``."""
        ...

    def end(self) -> None:
        """End the process and all that it started."""
        ...


@dataclass
class _Member:
    """One engine of the pool."""

    number: int
    handle: Handle
    restarts: int = 0
    """Since its last finished batch of samples."""
    running: dict[ray.ObjectRef, tuple[list[int], float]] = field(default_factory=dict)
    """Batches of request indices in progress, and when each runs out of time."""


class EnginePool:
    """A ``RolloutEngine`` made of engine processes.

    Args:
        handles: One per engine, started.
        rollout_limit: Seconds an engine may take for one batch of samples.
        call_limit: Seconds any other call may take.
        max_restarts: Restarts of one engine without a finished batch in between.
        note: Told about every lost engine.
        check: Called while waiting for samples; raises when the run is to end.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        *,
        rollout_limit: float,
        call_limit: float,
        max_restarts: int,
        note: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._members = [_Member(number, handle) for number, handle in enumerate(handles)]
        self._rollout_limit, self._call_limit = rollout_limit, call_limit
        self._max_restarts = max_restarts
        self._note, self._check = note, check
        self._held: OrderedDict[AdapterRef, AdapterState] = OrderedDict()
        self._released = self._closed = False
        self.restarts = 0
        """Engines restarted so far."""

    # Asking all engines

    def _ask(self, member: _Member, name: str, *args: Any) -> Any:
        """One call on one engine, which is restarted as often as allowed."""
        while True:
            try:
                ref = member.handle.submit(name, *args)
                return results([ref], f"engine.{name}", RolloutError, self._call_limit)[0]
            except ProcessLost as error:
                self._revive(member, error)

    def _everywhere(self, name: str, *args: Any) -> list[Any]:
        """The same call on every engine at once; answers in order."""
        refs = [member.handle.submit(name, *args) for member in self._members]
        answers = []
        for member, ref in zip(self._members, refs, strict=True):
            try:
                answer = results([ref], f"engine.{name}", RolloutError, self._call_limit)[0]
            except ProcessLost as error:
                self._revive(member, error)
                answer = self._ask(member, name, *args)
            answers.append(answer)
        return answers

    def _revive(self, member: _Member, cause: ProcessLost) -> None:
        """Start a lost engine again and give it what it held."""
        if self._closed:
            raise cause
        while True:
            member.handle.end()
            if member.restarts >= self._max_restarts:
                raise RolloutError(
                    f"engine {member.number} was lost {member.restarts + 1} times in a row, the "
                    f"last time because: {cause}",
                    next_step="SGLang's log is in the run's logs folder; continue with --resume",
                ) from cause
            member.restarts += 1
            self.restarts += 1
            self._note(f"engine {member.number} is lost and restarts: {first_line(cause)}")
            start = time.monotonic()
            try:
                member.handle.start()
                member.handle.ready()
                for ref, state in self._held.items():
                    done = member.handle.submit("push", state, ref.name)
                    results([done], "engine.push", RolloutError, self._call_limit)
                if self._released:
                    done = member.handle.submit("release")
                    results([done], "engine.release", RolloutError, self._call_limit)
            except MachineLost:
                raise
            except ProcessLost as error:
                cause = error
                continue
            seconds = time.monotonic() - start
            self._note(f"engine {member.number} is back after {seconds:.1f} s")
            return

    # protocols.RolloutEngine

    def generate(self, requests: Sequence[Request], adapter: AdapterRef) -> list[Sample]:
        """See ``protocols.RolloutEngine``; batches of a lost engine are redone by any other."""
        lanes = [member for member in self._members for _ in range(member.handle.lanes)]
        todo = deque(_shares(len(requests), len(lanes)))
        found: dict[int, list[Sample]] = {}
        try:
            while todo or any(member.running for member in self._members):
                for member in self._members:
                    while todo and len(member.running) < member.handle.lanes:
                        batch = todo.popleft()
                        wanted = [requests[index] for index in batch]
                        ref = member.handle.submit("generate", wanted, adapter)
                        member.running[ref] = (batch, time.monotonic() + self._rollout_limit)
                todo.extend(self._collect(requests, found))
        finally:
            for member in self._members:
                member.running.clear()
        return [sample for index in range(len(requests)) for sample in found[index]]

    def _collect(
        self, requests: Sequence[Request], found: dict[int, list[Sample]]
    ) -> list[list[int]]:
        """Wait a moment for finished batches; returns the batches of engines that were lost."""
        running = {ref: m for m in self._members for ref in m.running}
        self._check()
        done, _ = ray.wait(list(running), num_returns=1, timeout=_POLL)
        for ref in done:
            member = running[ref]
            error = error_of(ref, "engine.generate", RolloutError)
            if isinstance(error, ProcessLost):
                return self._lose(member, error)
            if error is not None:
                raise error
            batch, _ = member.running.pop(ref)
            found.update(_by_request(ray.get(ref), batch, requests))
            member.restarts = 0
        now = time.monotonic()
        for member in self._members:
            if any(end < now for _, end in member.running.values()):
                what = f"engine.generate did not finish within {self._rollout_limit:g} s"
                return self._lose(member, ProcessLost(what))
        return []

    def _lose(self, member: _Member, error: ProcessLost) -> list[list[int]]:
        unfinished = [batch for batch, _ in member.running.values()]
        member.running.clear()
        self._revive(member, error)
        return unfinished

    def score(self, sequences: Sequence[Sequence[int]], adapter: AdapterRef) -> list[np.ndarray]:
        """See ``protocols.RolloutEngine``; every engine is asked, and all must agree."""
        answers = self._everywhere("score", sequences, adapter)
        names = [f"engine {number}" for number in range(len(answers))]
        check_agreement(names, answers, adapter, self.capabilities().dtype)
        return answers[0]

    def push(self, state: AdapterState, name: str = "policy") -> Receipt:
        """See ``protocols.AdapterSink``; the receipt of the first engine that differs, if any."""
        start = time.monotonic()
        receipts: list[Receipt] = self._everywhere("push", ray.put(state), name)
        self._held[state.ref(name)] = state
        while len(self._held) > HELD:
            self._held.popitem(last=False)
        odd = [r for r in receipts if r.digest != state.digest or r.ref != state.ref(name)]
        chosen = (odd or receipts)[0]
        return Receipt(
            ref=chosen.ref,
            digest=chosen.digest,
            num_tensors=chosen.num_tensors,
            bytes=sum(receipt.bytes for receipt in receipts),
            seconds=time.monotonic() - start,
        )

    def discard(self, ref: AdapterRef) -> None:
        """Take a pushed adapter back from every engine that can."""
        self._held.pop(ref, None)
        self._everywhere("discard", ref)

    def capabilities(self) -> Capabilities:
        """See ``protocols.RolloutEngine``; RolloutError when the engines are not alike."""
        answers: list[Capabilities] = self._everywhere("capabilities")
        for number, answer in enumerate(answers):
            if answer != answers[0]:
                raise RolloutError(f"engine {number} is {answer}", f"{answers[0]} like engine 0")
        return answers[0]

    def release(self) -> None:
        """See ``protocols.RolloutEngine``."""
        self._everywhere("release")
        self._released = True

    def resume(self) -> None:
        """See ``protocols.RolloutEngine``."""
        self._released = False
        self._everywhere("resume")

    def abandon(self) -> None:
        """Start no engine again: they are about to be ended without being asked."""
        self._closed = True

    def close(self) -> None:
        """Let every engine stop what it started, then end its process."""
        self._closed = True  # a thread that still samples must not start engines again
        refs = [member.handle.submit("close") for member in self._members]
        with contextlib.suppress(GlmLoraError):
            results(refs, "engine.close", RolloutError, 30.0)
        for member in self._members:
            member.handle.end()


def _shares(count: int, lanes: int) -> list[list[int]]:
    """Request indices dealt out evenly; no empty share."""
    return [list(range(first, count, lanes)) for first in range(min(count, lanes))]


def _by_request(
    samples: Sequence[Sample], batch: Sequence[int], requests: Sequence[Request]
) -> dict[int, list[Sample]]:
    """An engine's answer split by request; RolloutError when it holds another number of samples."""
    wanted = sum(requests[index].n for index in batch)
    if len(samples) != wanted:
        raise RolloutError(f"an engine returned {len(samples)} samples", f"{wanted} samples")
    found: dict[int, list[Sample]] = {}
    position = 0
    for index in batch:
        count = requests[index].n
        found[index] = list(samples[position : position + count])
        position += count
    return found
