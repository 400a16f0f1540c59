"""Ray shells around the trainer's ranks and the rollout engines: no logic of their own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from glm_lora.cluster.agreement import Software, check_same_on_all_ranks, installed
from glm_lora.cluster.every_rank import EveryRankTrainer
from glm_lora.cluster.placement import EngineSeat, part_options
from glm_lora.cluster.waiting import results
from glm_lora.config import TrainConfig
from glm_lora.errors import ProcessLost, TrainingError
from glm_lora.targets.selection import Selection

START_TIMEOUT = 3600.0
"""Seconds in which ranks and engines must have loaded the model."""
CALL_TIMEOUT = 900.0
"""Seconds any other call than an update or a batch of samples may take."""
KILL_TIMEOUT = 30.0

Process = tuple[int, float]
"""Pid and start time: a number alone may belong to another process by now."""


class MachineActor:
    """Holds the GPUs of one machine's bundle and looks after what is left on that host."""

    def facts(self) -> tuple[str, list[int], Software]:
        """Address of the host, the numbers of the bundle's GPUs, versions of the software."""
        gpus = [int(number) for number in ray.get_gpu_ids()]
        return ray.util.get_node_ip_address(), gpus, installed()

    def free_port(self) -> int:
        """A port that is free on this host now."""
        with socket.socket() as listener:
            listener.bind((ray.util.get_node_ip_address(), 0))
            return int(listener.getsockname()[1])

    def end(self, processes: Sequence[Process]) -> int:
        """Kill processes that a lost actor had started; returns how many were still there."""
        ended = 0
        for pid, started in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == started:
                    process.kill()
                    ended += 1
        return ended


class _OnDevices:
    """An actor that sees the given GPUs only; torch must not have been imported before."""

    def __init__(self, devices: Sequence[int]) -> None:
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        use_interface(ray.util.get_node_ip_address())

    def children(self) -> list[Process]:
        """What this process has started and is still running."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((child.pid, child.create_time()))
        return found


def use_interface(address: str) -> None:
    """Let gloo and NCCL talk over the interface of ``address`` unless the user said which."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return


def serve_store(host: str) -> Any:
    """A rendezvous store on a free port of ``host``'s interface only."""
    from torch.distributed import TCPStore

    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class RankActor(_OnDevices):
    """One trainer rank in a process of its own."""

    def __init__(self, devices: Sequence[int] = ()) -> None:
        super().__init__(devices)
        self._worker: Any = None
        self._store: Any = None

    def address(self) -> tuple[str, int]:
        """Start the rendezvous store on a free port of this node (rank 0 only)."""
        host = ray.util.get_node_ip_address()
        self._store = serve_store(host)
        return host, self._store.port

    def start(
        self, config: TrainConfig, selection: Selection, rank: int, address: tuple[str, int]
    ) -> None:
        """Join the process group and build this rank's worker."""
        from glm_lora.train.worker import build_worker, init_process_group

        init_process_group(config, rank, config.world_size, address, store=self._store)
        check_same_on_all_ranks(config, selection)
        self._worker = build_worker(config, selection)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one method of the worker; its result on rank 0, None elsewhere.

        All ranks have the same, and an adapter is no small thing to send for nothing.
        """
        result = getattr(self._worker, name)(*args, **kwargs)
        return result if self._worker.context.rank == 0 else None


class EngineActor(_OnDevices):
    """A rollout engine, and the server it may need, in a process of its own."""

    def __init__(self, devices: Sequence[int] = ()) -> None:
        super().__init__(devices)
        self._devices = list(devices)
        self._engine: Any = None

    def start(
        self, config: TrainConfig, selection: Selection, seat: EngineSeat, address: str = ""
    ) -> None:
        """Load the model; ``address`` is where the parts of an engine on many machines meet."""
        from glm_lora.rollout.engine import build_engine, server_options

        servers = []
        if config.rollout.rollout_engine == "sglang" and not config.sglang.rollout_engine_urls:
            options = server_options(config, selection, seat.number)
            servers = [part_options(options, seat, 0, devices=self._devices, address=address)]
        self._engine = build_engine(config, selection, servers)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one method of the engine; None for one that it does not have."""
        method = getattr(self._engine, name, None)
        try:
            return method(*args, **kwargs) if method is not None else None
        except Exception as error:  # whatever it is, it follows from the server's death
            if name != "close" and not getattr(self._engine, "alive", lambda: True)():
                raise ProcessLost(f"engine.{name}: its server is gone: {error}") from None
            raise


class EnginePartActor(_OnDevices):
    """The further machines of an engine that spans several: a server without an address."""

    def __init__(self, devices: Sequence[int] = ()) -> None:
        super().__init__(devices)
        self._devices = list(devices)

    def start(
        self,
        config: TrainConfig,
        selection: Selection,
        seat: EngineSeat,
        index: int,
        address: str,
    ) -> None:
        """Start this part; it is ready when the head's server is."""
        from glm_lora.rollout.engine import server_options
        from glm_lora.rollout.sglang_server import SglangServer

        options = server_options(config, selection, seat.number)
        options = part_options(options, seat, index, devices=self._devices, address=address)
        self._server = SglangServer(options)

    def stop(self) -> None:
        """End the server."""
        self._server.stop()


class RayTrainer(EveryRankTrainer):
    """The ``Trainer`` whose ranks are Ray actors; every call is made on all of them.

    Args:
        config: Limits and the size of the world.
        selection: What is trained.
        actors: One ``RankActor`` per rank.
        check: Called while waiting; raises when the run is to end.
    """

    def __init__(
        self,
        config: TrainConfig,
        selection: Selection,
        actors: Sequence[ActorHandle],
        check: Callable[[], None],
    ) -> None:
        self._actors = list(actors)
        self._check = check
        self._limit = config.step_timeout
        (address,) = results(
            [self._actors[0].address.remote()],
            "starting the trainer",
            TrainingError,
            CALL_TIMEOUT,
            check,
        )
        starts = [
            actor.start.remote(config, selection, rank, address)
            for rank, actor in enumerate(self._actors)
        ]
        self._starting: Sequence[Any] | None = starts

    def wait_ready(self) -> None:
        """Block until every rank has loaded its part of the base."""
        if self._starting is not None:
            results(
                self._starting, "starting the trainer", TrainingError, START_TIMEOUT, self._check
            )
            self._starting = None

    def call_all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """See ``EveryRankTrainer``."""
        self.wait_ready()
        shared = [ray.put(arg) for arg in args]
        refs = [actor.call.remote(name, *shared, **kwargs) for actor in self._actors]
        return results(refs, f"trainer.{name}", TrainingError, self._limit, self._check)[0]

    def close(self) -> None:
        """End the rank processes."""
        kill(self._actors)


def kill(actors: Sequence[ActorHandle]) -> None:
    """End actor processes at once."""
    for actor in actors:
        with contextlib.suppress(ValueError, RayActorError):
            ray.kill(actor)
