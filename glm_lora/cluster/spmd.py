"""One trainer over many ranks without Ray: rank 0 drives, the others follow its commands.

Started by torchrun. Rank 0 wraps its worker in ``LeadingTrainer``, which announces each call to all
ranks and then makes it on its own worker; every other rank sits in ``follow``. After each call all
ranks exchange their outcome, so that an error anywhere stops all with its traceback.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from glm_lora.errors import GlmLoraError, TrainingError
from glm_lora.protocols import AdapterState, StepStats, TrainBatch

if TYPE_CHECKING:
    from glm_lora.train.worker import TrainWorker

_STOP = "stop"
CONTROL_TIMEOUT = timedelta(days=1)
"""Followers wait this long for the next command: sampling and scoring happen in between."""


def _call(
    worker: TrainWorker, control: dist.ProcessGroup, name: str, args: Any, kwargs: Any
) -> Any:
    """Run one method on this rank's worker and learn how the other ranks fared.

    Raises:
        GlmLoraError: The first error of any rank, as it was raised there when it is ours, else a
            TrainingError that carries that rank's traceback.
    """
    result, failure = None, None
    try:
        result = getattr(worker, name)(*args, **kwargs)
    except Exception as error:  # the border between processes: every error is carried over
        own = error if isinstance(error, GlmLoraError) else None
        failure = (dist.get_rank(), own, traceback.format_exc())
    failures: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(failures, failure, group=control)
    for failed in failures:
        if failed is None:
            continue
        rank, own, trace = failed
        if own is not None:
            raise own
        raise TrainingError(f"rank {rank} failed in {name}:\n{trace}")
    return result


def follow(worker: TrainWorker, control: dist.ProcessGroup) -> None:
    """Serve rank 0's calls until it says stop; an error is raised here too, after rank 0 has it."""
    while True:
        command: list[Any] = [None]
        dist.broadcast_object_list(command, src=0, group=control)
        name, args, kwargs = command[0]
        if name == _STOP:
            return
        _call(worker, control, name, args, kwargs)


class LeadingTrainer:
    """The ``Trainer`` of rank 0: every call is made on all ranks at once."""

    def __init__(self, worker: TrainWorker, control: dist.ProcessGroup) -> None:
        self._worker = worker
        self._control = control
        self._broken = False

    def _all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        dist.broadcast_object_list([(name, args, kwargs)], src=0, group=self._control)
        try:
            return _call(self._worker, self._control, name, args, kwargs)
        except BaseException:
            self._broken = True  # the followers have left their loop
            raise

    def step(self, batch: TrainBatch) -> StepStats:
        """See ``protocols.Trainer``."""
        return self._all("step", batch)

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, adapter: bool = True
    ) -> list[np.ndarray]:
        """See ``protocols.Trainer``."""
        return self._all("logprobs", sequences, temperature=temperature, adapter=adapter)

    def adapter(self, dtype: str = "float32") -> AdapterState:
        """See ``protocols.Trainer``."""
        return self._all("adapter", dtype)

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """See ``protocols.Trainer``."""
        self._all("save", folder, extra)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """See ``protocols.Trainer``."""
        return self._all("load", folder)

    def verify_base(self) -> str:
        """See ``protocols.Trainer``."""
        return self._all("verify_base")

    def offload(self) -> Mapping[str, float]:
        """See ``protocols.Trainer``."""
        return self._all("offload")

    def onload(self) -> Mapping[str, float]:
        """See ``protocols.Trainer``."""
        return self._all("onload")

    def close(self) -> None:
        """Release the other ranks."""
        if not self._broken:
            dist.broadcast_object_list([(_STOP, (), {})], src=0, group=self._control)
            self._broken = True
        self._worker.close()
