"""Send an adapter to an engine, and believe nothing until a probe prompt agrees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol, runtime_checkable

import numpy as np

from glm_lora.errors import RolloutError, RunError, SyncError
from glm_lora.protocols import (
    BASE,
    LOGIT_ROUNDING,
    LOGPROB_LIMITS,
    AdapterRef,
    AdapterState,
    Capabilities,
    Receipt,
    RolloutEngine,
)
from glm_lora.sync.verify import check_probe, check_receipt, check_selection, check_state

TrainerLogprobs = Callable[[Sequence[int]], np.ndarray]
"""Log-probability of tokens 1.. of one sequence under the trainer's present adapter."""


@runtime_checkable
class Revocable(Protocol):
    """An engine that can take a pushed adapter back before any request used it."""

    def discard(self, ref: AdapterRef) -> None:
        """Forget ``ref``; requests for it fail from now on."""
        ...


@dataclass(frozen=True)
class Probe:
    """One prompt and what the engine's base says of it, recorded before the first adapter."""

    tokens: tuple[int, ...]
    base_logprobs: np.ndarray
    """The engine's log-probability of tokens 1.. without an adapter."""


@dataclass(frozen=True)
class SyncReport:
    """What one synchronisation did."""

    receipt: Receipt
    seconds: float
    """From the first check to the agreement of the probe."""
    mean_difference: float
    """Mean |trainer - engine| log-probability of the probe prompt, in nats."""
    max_difference: float
    """The largest such difference."""

    def metrics(self) -> dict[str, float]:
        """Scalars under their metric names."""
        return {
            "sync/seconds": self.seconds,
            "sync/push_seconds": self.receipt.seconds,
            "sync/bytes": float(self.receipt.bytes),
            "sync/num_tensors": float(self.receipt.num_tensors),
            "sync/probe_logprob_abs_diff": self.mean_difference,
            "sync/probe_logprob_max_diff": self.max_difference,
        }


def probe_tokens(
    prompts: Sequence[Sequence[int]], stop_token_ids: Sequence[int] = (), length: int = 64
) -> tuple[int, ...]:
    """A probe of ``length`` tokens: the longest prompt, then the others, over and over.

    Each is followed by the stop tokens. In bf16 a token whose router is undecided may take other
    experts in trainer and engine and differ by half a nat; over 64 tokens the mean stays far below
    its limit, over a prompt of three it need not.

    Args:
        prompts: Token ids; not all empty unless there are stop tokens.
        stop_token_ids: Of the chat format.
        length: Tokens of the probe.
    """
    ordered = cycle(sorted(prompts, key=len, reverse=True))
    return tuple(islice((t for p in ordered for t in (*p, *stop_token_ids)), length))


def record_probe(engine: RolloutEngine, tokens: Sequence[int]) -> Probe:
    """Ask the engine's base for the log-probabilities of ``tokens`` (at least two).

    Raises:
        SyncError: Too few tokens, or an answer that is not finite.
    """
    if len(tokens) < 2:
        raise SyncError(f"the probe prompt has {len(tokens)} tokens", "at least 2")
    (logprobs,) = engine.score([tuple(tokens)], BASE)
    if logprobs.shape != (len(tokens) - 1,) or not np.isfinite(logprobs).all():
        raise SyncError(
            f"the engine's base answers the probe prompt with {logprobs.shape} log-probabilities, "
            f"{int(np.isfinite(logprobs).sum())} of them finite",
            f"{len(tokens) - 1} finite numbers",
        )
    return Probe(tuple(tokens), logprobs)


def check_base(engine: RolloutEngine, probe: Probe) -> None:
    """Check that the engine's base still answers the probe prompt bit for bit as at the start.

    Raises:
        SyncError: It does not, for example because its weights did not survive a release.
    """
    (now,) = engine.score([probe.tokens], BASE)
    if not np.array_equal(now, probe.base_logprobs):
        same_shape = now.shape == probe.base_logprobs.shape
        gap = float(np.abs(now - probe.base_logprobs).max()) if same_shape else float("nan")
        raise SyncError(
            "the engine's base model no longer answers the probe prompt as it did at the start "
            f"(largest difference {gap:.4g})",
            "bit-equal log-probabilities",
            "If the engine releases its weights, it must keep a copy of them on the host",
        )


def push_and_verify(
    state: AdapterState,
    engine: RolloutEngine,
    probe: Probe,
    trainer_logprobs: TrainerLogprobs,
    *,
    capabilities: Capabilities | None = None,
    name: str = "policy",
    limit: float | None = None,
) -> SyncReport:
    """Validate ``state``, push it, check the receipt, and compare the probe prompt.

    Args:
        state: The whole adapter in the dtype it is to be served in.
        engine: Where it goes.
        probe: From ``record_probe`` on the same engine.
        trainer_logprobs: The trainer's log-probabilities under the same adapter.
        capabilities: The engine's, when the caller has asked for them already.
        name: Adapter name under which requests ask for it.
        limit: Largest mean difference of the probe, in nats; default by the engine's dtype.

    Returns:
        Receipt, seconds and differences.

    Raises:
        SyncError: The state is not sendable, the receipt differs from what was sent, or the probe
            disagrees. The engine keeps serving the previous version.
    """
    start = time.perf_counter()
    capabilities = capabilities or engine.capabilities()
    check_selection(state.selection, capabilities)
    check_state(state)
    if limit is None:
        limit = LOGPROB_LIMITS[capabilities.dtype]
    ref = state.ref(name)
    try:
        receipt = engine.push(state, name)
        check_receipt(state, ref, receipt)
        (served,) = engine.score([probe.tokens], ref)
        mean, largest = check_probe(
            state,
            trainer=np.asarray(trainer_logprobs(probe.tokens)),
            engine=served,
            engine_base=probe.base_logprobs,
            limit=limit,
            rounding=LOGIT_ROUNDING[capabilities.dtype],
        )
    except SyncError as error:
        _take_back(engine, ref, error)
        raise
    except RolloutError as error:
        failure = SyncError(f"{ref} did not arrive: {error}")
        _take_back(engine, ref, failure)
        raise failure from error
    return SyncReport(receipt, time.perf_counter() - start, mean, largest)


def _take_back(engine: RolloutEngine, ref: AdapterRef, cause: SyncError) -> None:
    if not isinstance(engine, Revocable):
        return
    try:
        engine.discard(ref)
    except RunError as error:
        cause.add_note(f"taking the adapter back failed too: {error}")
