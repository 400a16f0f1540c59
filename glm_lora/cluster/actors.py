"""Ray shells around the trainer's ranks and the rollout engine: no logic of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from glm_lora.config import TrainConfig
from glm_lora.errors import GlmLoraError, RolloutError, TrainingError
from glm_lora.protocols import (
    AdapterRef,
    AdapterState,
    Capabilities,
    Receipt,
    Request,
    Sample,
    StepStats,
    TrainBatch,
)
from glm_lora.targets.selection import Selection


class RankActor:
    """One trainer rank in a process of its own."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._store: Any = None

    def address(self) -> tuple[str, int]:
        """Start the rendezvous store on a free port of this node (rank 0 only)."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(
        self, config: TrainConfig, selection: Selection, rank: int, address: tuple[str, int]
    ) -> None:
        """Join the process group and build this rank's worker."""
        from glm_lora.train.worker import build_worker, init_process_group

        init_process_group(config, rank, config.world_size, address, store=self._store)
        self._worker = build_worker(config, selection)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one method of the worker."""
        return getattr(self._worker, name)(*args, **kwargs)


class EngineActor:
    """The rollout engine in a process of its own."""

    def __init__(self, config: TrainConfig, selection: Selection) -> None:
        from glm_lora.rollout.engine import build_engine

        self._engine = build_engine(config, selection)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one method of the engine."""
        return getattr(self._engine, name)(*args, **kwargs)


def _get(refs: list[Any], what: str, failure: type[GlmLoraError]) -> list[Any]:
    """Results in order; the first error of any process is raised without waiting for the others."""
    waiting = list(refs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        try:
            ray.get(done)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, GlmLoraError):
                raise cause from None
            raise failure(f"{what} failed:\n{error}") from None
        except RayActorError as error:
            raise failure(f"{what}: its process is gone ({error})") from None
    return ray.get(refs)


class RayTrainer:
    """The ``Trainer`` whose ranks are Ray actors; every call is made on all of them."""

    def __init__(
        self, config: TrainConfig, selection: Selection, actors: Sequence[Any]
    ) -> None:
        self._actors = list(actors)
        address = ray.get(self._actors[0].address.remote())
        starts = [
            actor.start.remote(config, selection, rank, address)
            for rank, actor in enumerate(self._actors)
        ]
        self._starting: list[Any] | None = starts

    def wait_ready(self) -> None:
        """Block until every rank has loaded its part of the base."""
        if self._starting is not None:
            _get(self._starting, "starting the trainer", TrainingError)
            self._starting = None

    def _all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.wait_ready()
        shared = [ray.put(arg) for arg in args]
        refs = [actor.call.remote(name, *shared, **kwargs) for actor in self._actors]
        return _get(refs, f"trainer.{name}", TrainingError)[0]

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
        """End the rank processes."""
        _kill(self._actors)


class RayEngine:
    """The ``RolloutEngine`` that lives in a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        ref = self._actor.call.remote(name, *args, **kwargs)
        return _get([ref], f"engine.{name}", RolloutError)[0]

    def generate(self, requests: Sequence[Request], adapter: AdapterRef) -> list[Sample]:
        """See ``protocols.RolloutEngine``."""
        return self._call("generate", requests, adapter)

    def score(self, sequences: Sequence[Sequence[int]], adapter: AdapterRef) -> list[np.ndarray]:
        """See ``protocols.RolloutEngine``."""
        return self._call("score", sequences, adapter)

    def push(self, state: AdapterState, name: str = "policy") -> Receipt:
        """See ``protocols.AdapterSink``."""
        return self._call("push", state, name)

    def capabilities(self) -> Capabilities:
        """See ``protocols.RolloutEngine``."""
        return self._call("capabilities")

    def release(self) -> None:
        """See ``protocols.RolloutEngine``."""
        self._call("release")

    def resume(self) -> None:
        """See ``protocols.RolloutEngine``."""
        self._call("resume")

    def close(self) -> None:
        """Let the engine stop what it started, then end its process."""
        with contextlib.suppress(GlmLoraError):
            self._call("close")
        _kill([self._actor])


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        with contextlib.suppress(ValueError, RayActorError):
            ray.kill(actor)
