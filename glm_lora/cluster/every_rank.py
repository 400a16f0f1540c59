"""The methods of ``protocols.Trainer`` as calls that every rank makes at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glm_lora.protocols import AdapterState, StepStats, TrainBatch


class EveryRankTrainer(ABC):
    """A ``Trainer`` that knows how to make one call on the workers of all ranks."""

    @abstractmethod
    def call_all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call method ``name`` of every rank's worker; returns rank 0's result.

        Raises:
            GlmLoraError: What a rank raised, or that a rank is gone.
        """

    def step(self, batch: TrainBatch) -> StepStats:
        """See ``protocols.Trainer``."""
        return self.call_all("step", batch)

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, adapter: bool = True
    ) -> list[np.ndarray]:
        """See ``protocols.Trainer``."""
        return self.call_all("logprobs", sequences, temperature=temperature, adapter=adapter)

    def adapter(self, dtype: str = "float32") -> AdapterState:
        """See ``protocols.Trainer``."""
        return self.call_all("adapter", dtype)

    def set_adapter(self, state: AdapterState) -> None:
        """See ``protocols.Trainer``."""
        self.call_all("set_adapter", state)

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """See ``protocols.Trainer``."""
        self.call_all("save", folder, extra)

    def begin_save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """See ``protocols.Trainer``."""
        self.call_all("begin_save", folder, extra)

    def write_save(self) -> None:
        """See ``protocols.Trainer``."""
        self.call_all("write_save")

    def finish_save(self) -> Mapping[str, float]:
        """See ``protocols.Trainer``."""
        return self.call_all("finish_save")

    def load(self, folder: Path) -> Mapping[str, Any]:
        """See ``protocols.Trainer``."""
        return self.call_all("load", folder)

    def verify_base(self) -> str:
        """See ``protocols.Trainer``."""
        return self.call_all("verify_base")

    def offload(self) -> Mapping[str, float]:
        """See ``protocols.Trainer``."""
        return self.call_all("offload")

    def onload(self) -> Mapping[str, float]:
        """See ``protocols.Trainer``."""
        return self.call_all("onload")

    def host_copy_summary(self) -> str:
        """One line on how the ranks hold the base on the host; empty before ``offload``."""
        return self.call_all("host_copy_summary")
