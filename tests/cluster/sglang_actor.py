"""A real SGLang server on the CPU behind the engine's actor: a tiny llama, asking for a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from glm_lora.cluster.actors import EngineActor, MachineActor, Process, kill
from glm_lora.cluster.engines import LANES
from glm_lora.rollout import sglang_server
from glm_lora.rollout.sglang import SglangEngine
from glm_lora.rollout.sglang_client import SglangClient
from glm_lora.rollout.sglang_server import SglangServer
from tests.rollout.sglang_support import llama_options

KEY = "k3y-of-the-engine-9f27c1"
START_LIMIT = 480.0


class LlamaEngineActor(EngineActor):
    """As its parent, with a llama in the place of glm5_next."""

    def start_llama(self, work: str, checkpoint: str) -> str:
        """Start the server and connect to it; returns its URL."""
        # A llama needs no glm5_next configuration.
        sglang_server.serving_view = lambda checkpoint, view: checkpoint
        options = llama_options(Path(work), Path(checkpoint))
        settings = Path(work).with_suffix(".yaml")
        settings.write_text(f'api-key: "{KEY}"\n')
        self._server = SglangServer(
            replace(options, passed=(*options.passed, "--config", str(settings)))
        )
        self._server.wait(START_LIMIT)
        client = SglangClient(self._server.url, api_key=KEY)
        self._engine = SglangEngine([client], servers=[self._server], transport="folder")
        return self._server.url

    def server_pid(self) -> int:
        """The leader of the server's process group."""
        return self._server._process.pid


class LlamaHandle:
    """``engines.Handle``: what ``ray_parts.EngineProcess`` does, on this machine."""

    lanes = LANES

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self.starts = 0
        self.children: list[Process] = []
        self.url = ""

    def start(self) -> None:
        self.starts += 1
        work = self._folder / f"server-{self.starts}"
        remote: Any = ray.remote
        self.actor = remote(num_cpus=0, max_concurrency=self.lanes)(LlamaEngineActor).remote()
        self._starting = self.actor.start_llama.remote(str(work), str(self._checkpoint))

    def ready(self) -> None:
        self.url = ray.get(self._starting, timeout=START_LIMIT)
        self.children = ray.get(self.actor.children.remote())

    def submit(self, name: str, *args: Any) -> ray.ObjectRef:
        return self.actor.call.remote(name, *args)

    def end(self) -> None:
        kill([self.actor])
        MachineActor().end(self.children)

    def server_pid(self) -> int:
        return ray.get(self.actor.server_pid.remote())

    def log(self) -> str:
        (path,) = (self._folder / f"server-{self.starts}").glob("sglang-*.log")
        return path.read_text(errors="replace")


def alive(processes: Sequence[Process]) -> list[Process]:
    """Those that still run."""
    import psutil

    found = []
    for pid, started in processes:
        try:
            process = psutil.Process(pid)
            if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                found.append((pid, started))
        except psutil.NoSuchProcess:
            continue
    return found
