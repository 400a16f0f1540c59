"""What the parts say to each other: three small protocols and the records they exchange.

The loop (``pipeline.py``) knows only these. In-process objects, Ray actors and SGLang servers fill
them in. Nothing here imports torch; token sequences are plain tuples or numpy arrays so that they
travel between processes as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from glm_lora.tensor_block import Table, pack, unpack

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from glm_lora.targets.selection import Selection


LOGPROB_DIFF = "train/train_rollout_logprob_abs_diff"
"""Metric: mean difference between trainer and engine per response token, in nats."""
LOGPROB_LIMITS = {"float32": 1e-3, "bfloat16": 0.05}
"""Default hard limits, by compute dtype, of the mean difference between two computations of one
log-probability, in nats."""
LOGIT_ROUNDING = {"float32": 2**-22, "bfloat16": 2**-7}
"""Relative error of a logit by compute dtype: two roundings to its significand."""


@dataclass(frozen=True, order=True)
class AdapterRef:
    """Which adapter a request wants or a sample was made by; ``version`` is the training step."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"adapter {self.name!r} version {self.version}" if self.name else "the base"


BASE = AdapterRef("", -1)
"""The base model without an adapter, asked for explicitly."""


@dataclass(frozen=True)
class AdapterState:
    """A whole adapter: full (unsharded) tensors under serving keys.

    Keys are those of ``Selection.tensor_shapes()``: ``<disk name>.lora_A.weight`` ``[rank, in]``
    and ``<disk name>.lora_B.weight`` ``[out, rank]``, on the CPU, fp32 or bf16.
    """

    selection: Selection
    tensors: Mapping[str, torch.Tensor]
    version: int
    digest: str
    """``fingerprint_tensors`` of ``tensors``."""

    def ref(self, name: str = "policy") -> AdapterRef:
        """The name and version under which an engine serves this state."""
        return AdapterRef(name, self.version)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the tensors as one block: by itself, each takes its whole storage along."""
        table, block = pack(self.tensors)
        whole = PickleBuffer(block) if protocol >= 5 else bytes(block)
        return _arrived, (self.selection, table, whole, self.version, self.digest)


def _arrived(
    selection: Selection, table: Table, block: Buffer, version: int, digest: str
) -> AdapterState:
    return AdapterState(selection, unpack(table, block), version, digest)


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples. Probabilities are those of the temperature-scaled full vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Seed of this request; the same request with the same seed gives the same samples."""


@dataclass(frozen=True)
class Request:
    """One prompt to be sampled ``n`` times."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1


class Finish(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last response token."""
    LENGTH = "length"
    """The token limit was reached (a truncated response)."""
    ABORT = "abort"
    """The engine gave up; the sample must not be trained on."""


@dataclass(frozen=True)
class Sample:
    """One sampled response."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """Sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each response token at the sampling temperature."""
    finish: Finish
    adapter: AdapterRef
    """The adapter that made it, as the engine reports it."""
    routed_experts: np.ndarray | None = None
    """Experts the engine chose, ``[prompt + response - 1, MoE layers, top-k]``, when asked for."""


@dataclass(frozen=True)
class TrainSample:
    """A scored sample as the trainer gets it."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float
    loss_mask: tuple[int, ...]
    """1 where a response token counts in the loss."""
    adapter: AdapterRef
    routed_experts: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens together."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class TrainBatch:
    """All samples of one optimizer step, the same object on every rank (each takes its share)."""

    samples: tuple[TrainSample, ...]
    step: int
    """Rollout number, from 0; the adapter that results has version ``step + 1``."""
    temperature: float = 1.0

    @property
    def stale(self) -> bool:
        """Whether any sample was made by another version than the trainer's present one."""
        return any(s.adapter.version != self.step for s in self.samples)


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did."""

    applied: bool
    """False when the batch held no learning signal: nothing moved, no moments, no schedule."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Scalars under their metric names (``train/...``)."""
    logprobs: Sequence[np.ndarray] = ()
    """The trainer's log-probability of each response token before the step, per sample."""


@dataclass(frozen=True)
class Receipt:
    """What an engine says it received."""

    ref: AdapterRef
    digest: str
    num_tensors: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, read from the engine itself."""

    engine: str
    version: str
    max_rank: int
    target_leaves: frozenset[str]
    """Leaf names of the projections it can adapt."""
    dtype: str
    """Compute dtype: ``float32`` or ``bfloat16``; the log-probability limit depends on it."""
    routed_experts: bool = False
    """Whether it returns the routed experts of each token."""
    api: str = ""
    """Which adapter interface was chosen."""


@runtime_checkable
class Trainer(Protocol):
    """The side that learns. Every method is called once, by the driver."""

    def step(self, batch: TrainBatch) -> StepStats:
        """One update from a scored batch; raises TrainingError rather than apply a bad one."""
        ...

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, adapter: bool = True
    ) -> list[np.ndarray]:
        """Log-probability of tokens 1.. of each sequence given those before; no gradient."""
        ...

    def adapter(self, dtype: str = "float32") -> AdapterState:
        """The adapter as it is now, gathered from all ranks, in serving names."""
        ...

    def set_adapter(self, state: AdapterState) -> None:
        """Start from this adapter (every tensor, nothing else); moments and counters stay."""
        ...

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write adapter, optimizer and generators, and the driver's own ``extra`` (JSON values)."""
        ...

    def begin_save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """As ``save``, but only copy to the host what is to be written."""
        ...

    def write_save(self) -> None:
        """Write what ``begin_save`` copied while the trainer goes on."""
        ...

    def finish_save(self) -> Mapping[str, float]:
        """Wait for ``write_save``; its seconds and bytes. CheckpointError when it failed."""
        ...

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Continue exactly from what ``save`` wrote, at any topology; returns ``extra``."""
        ...

    def verify_base(self) -> str:
        """The fingerprint of the frozen base as it lies in memory now."""
        ...

    def offload(self) -> Mapping[str, float]:
        """Free the device memory; returns seconds and bytes as metrics."""
        ...

    def onload(self) -> Mapping[str, float]:
        """Take the device memory again; returns seconds and bytes as metrics."""
        ...

    def close(self) -> None:
        """Stop what this trainer started."""
        ...


@runtime_checkable
class AdapterSink(Protocol):
    """The place an adapter is sent to."""

    def push(self, state: AdapterState, name: str = "policy") -> Receipt:
        """Make ``state`` servable as ``state.ref(name)``; the receipt is the receiver's account."""
        ...


@runtime_checkable
class RolloutEngine(AdapterSink, Protocol):
    """The side that samples."""

    def generate(self, requests: Sequence[Request], adapter: AdapterRef) -> list[Sample]:
        """Sample every request; ``sum(r.n)`` samples in request order, all made by ``adapter``."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], adapter: AdapterRef) -> list[np.ndarray]:
        """Log-probability (temperature 1) of tokens 1.. of each sequence given those before."""
        ...

    def capabilities(self) -> Capabilities:
        """What this engine can do, asked of the engine."""
        ...

    def release(self) -> None:
        """Free the device memory while the trainer works."""
        ...

    def resume(self) -> None:
        """Take the device memory again."""
        ...

    def close(self) -> None:
        """Stop what this engine started, and nothing else."""
        ...
