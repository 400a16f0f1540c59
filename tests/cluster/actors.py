"""A rollout engine that only waits: real Ray actors, no model."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import ray

from glm_lora.errors import RolloutError
from glm_lora.protocols import BASE, AdapterRef, Capabilities, Finish, Receipt, Sample


class WaitingEngine:
    """Answers with samples that name the request's seed and the engine's process."""

    def __init__(self, seconds: float = 0.0, folder: str = "") -> None:
        self.seconds, self.folder = seconds, folder
        self.held: list[AdapterRef] = []
        self.released = False

    def call(self, name: str, *args):
        method = getattr(self, name, None)
        return method(*args) if method is not None else None

    def generate(self, requests, adapter):
        if self.released or (adapter != BASE and adapter not in self.held):
            raise RolloutError(f"{adapter} is not held, or released")
        self._log("generate")
        time.sleep(self.seconds)
        return [
            Sample(r.prompt_ids, (r.sampling.seed, i), (-1.0, -1.0), Finish.STOP, adapter)
            for r in requests
            for i in range(r.n)
        ]

    def score(self, sequences, adapter):
        return [np.zeros(len(s) - 1, dtype=np.float32) for s in sequences]

    def push(self, state, name="policy"):
        self._log("push")
        self.held = [*self.held, state.ref(name)][-2:]
        return Receipt(state.ref(name), state.digest, len(state.tensors), 10, 0.0)

    def capabilities(self):
        return Capabilities("waiting", "1", 8, frozenset(), "float32")

    def release(self):
        self.released = True

    def resume(self):
        self.released = False

    def state(self):
        return os.getpid(), list(self.held), self.released

    def _log(self, what: str) -> None:
        if self.folder:
            with (Path(self.folder) / f"{os.getpid()}.log").open("a") as log:
                log.write(what + "\n")


class WaitingHandle:
    """``engines.Handle`` around one of them."""

    def __init__(self, lanes: int = 1, **arguments) -> None:
        self.lanes = lanes
        self.arguments = arguments
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        cls = ray.remote(num_cpus=0, max_concurrency=max(1, self.lanes))(WaitingEngine)
        self.actor = cls.remote(**self.arguments)

    def ready(self) -> None:
        ray.get(self.actor.call.remote("capabilities"))

    def submit(self, name: str, *args):
        return self.actor.call.remote(name, *args)

    def end(self) -> None:
        ray.kill(self.actor)

    def state(self):
        return ray.get(self.actor.call.remote("state"))
