"""Trainer and engines as Ray actors in one placement group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from glm_lora.cluster.actors import (
    CALL_TIMEOUT,
    KILL_TIMEOUT,
    START_TIMEOUT,
    EngineActor,
    EnginePartActor,
    MachineActor,
    Process,
    RankActor,
    RayTrainer,
    kill,
)
from glm_lora.cluster.agreement import Software, check_same_software, installed
from glm_lora.cluster.engines import LANES, EnginePool
from glm_lora.cluster.placement import (
    LOOPBACK,
    EngineSeat,
    Host,
    Part,
    Placement,
    check_fit,
    check_one_machine,
    place,
)
from glm_lora.cluster.ray_runtime import ray_session
from glm_lora.cluster.waiting import MachineLost, results
from glm_lora.config import TrainConfig
from glm_lora.errors import ConfigError, ProcessLost, RolloutError, RunError
from glm_lora.protocols import RolloutEngine, Trainer
from glm_lora.targets.selection import Selection

BUSY_TIMEOUT = 120.0
"""Seconds to wait for resources that the cluster has but others use."""
RETURN_TIMEOUT = 600.0
"""Seconds a restart waits for a lost machine to come back."""


@dataclass(frozen=True)
class _Machine:
    """One bundle of the placement group, held by an actor."""

    number: int
    keeper: ActorHandle
    host: str
    gpus: tuple[int, ...]
    """The numbers of its GPUs on the host."""
    software: Software

    def devices(self, part: Part) -> list[int]:
        """The GPUs of a part as the host numbers them."""
        return [self.gpus[index] for index in part.gpus]


class _Group:
    """A placement group with an actor on each machine.

    Args:
        placement: Who sits where.
        check: Called while waiting; raises when waiting is to end.
    """

    def __init__(self, placement: Placement, check: Callable[[], None]) -> None:
        self.placement = placement
        self._group = placement_group(placement.bundles(), strategy="PACK")
        try:
            self._wait(check)
            self.machines = self._ask_machines(check)
        except BaseException:
            remove_placement_group(self._group)  # and what runs in it
            raise

    def _wait(self, check: Callable[[], None]) -> None:
        end = time.monotonic() + BUSY_TIMEOUT
        while not self._group.wait(1):
            check()
            if time.monotonic() > end:
                raise ConfigError(
                    f"the cluster's machines are in use: no room within {BUSY_TIMEOUT:g} s",
                    f"{self.placement.gpus} free GPUs on {len(self.placement.machines)} machine(s)",
                    "Wait for the other jobs, or make the shape smaller",
                )

    def _ask_machines(self, check: Callable[[], None]) -> list[_Machine]:
        """Start the keepers; ConfigError when a machine runs other software."""
        keepers = [
            self.actor(MachineActor, number, cpus=0, gpus=machine.gpus)
            for number, machine in enumerate(self.placement.machines)
        ]
        facts = results(
            [keeper.facts.remote() for keeper in keepers],
            "asking the machines",
            RunError,
            CALL_TIMEOUT,
            check,
        )
        machines = [
            _Machine(number, keeper, host, tuple(gpus), software)
            for number, (keeper, (host, gpus, software)) in enumerate(
                zip(keepers, facts, strict=True)
            )
        ]
        here = {"the driver": installed()}
        check_same_software(here | {f"machine {m.number} ({m.host})": m.software for m in machines})
        return machines

    def actor(
        self,
        cls: type,
        machine: int,
        *arguments: Any,
        cpus: int = 1,
        gpus: int = 0,
        concurrency: int = 1,
    ) -> Any:
        """A new actor on one machine."""
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=machine
            ),
        }
        if concurrency > 1:
            options["max_concurrency"] = concurrency
        return ray.remote(**options)(cls).remote(*arguments)

    def close(self) -> None:
        """End the machines' actors and give the resources back."""
        kill([machine.keeper for machine in self.machines])
        remove_placement_group(self._group)


class EngineProcess:
    """One engine in its place; ``engines.Handle``.

    Args:
        group: Where processes are placed.
        seat: Which machines and GPUs.
        config: The run's configuration.
        selection: What adapters cover.
        check: Called while waiting; raises when the run is to end.
    """

    def __init__(
        self,
        group: _Group,
        seat: EngineSeat,
        config: TrainConfig,
        selection: Selection,
        check: Callable[[], None],
    ) -> None:
        self._group, self._seat, self._check = group, seat, check
        self._config, self._selection = config, selection
        served = config.rollout.rollout_engine == "sglang"
        self.lanes = LANES if served else 1
        self._actors: list[ActorHandle] = []
        self._starting: ray.ObjectRef | None = None
        self._children: list[tuple[_Machine, list[Process]]] = []

    def start(self) -> None:
        """See ``engines.Handle``."""
        machines = [self._group.machines[part.machine] for part in self._seat.parts]
        asked = [machine.keeper.free_port.remote() for machine in machines]
        try:
            port = results(asked, "finding a port", RolloutError, CALL_TIMEOUT)[0]
        except ProcessLost as error:
            raise MachineLost(error.what) from error
        address = f"{machines[0].host}:{port}" if len(machines) > 1 else ""
        devices = [m.devices(p) for m, p in zip(machines, self._seat.parts, strict=True)]
        head = self._group.actor(
            EngineActor, machines[0].number, devices[0], concurrency=self.lanes
        )
        self._actors = [head]
        self._starting = head.start.remote(self._config, self._selection, self._seat, address)
        for index in range(1, len(machines)):
            part = self._group.actor(EnginePartActor, machines[index].number, devices[index])
            part.start.remote(self._config, self._selection, self._seat, index, address)
            self._actors.append(part)

    def ready(self) -> None:
        """See ``engines.Handle``."""
        assert self._starting is not None
        results([self._starting], "starting the engine", RolloutError, START_TIMEOUT, self._check)
        found = results(
            [actor.children.remote() for actor in self._actors],
            "asking the engine",
            RolloutError,
            CALL_TIMEOUT,
        )
        machines = [self._group.machines[part.machine] for part in self._seat.parts]
        self._children = list(zip(machines, found, strict=True))

    def submit(self, name: str, *args: Any) -> ray.ObjectRef:
        """See ``engines.Handle``."""
        return self._actors[0].call.remote(name, *args)

    def end(self) -> None:
        """See ``engines.Handle``: a killed actor leaves its server behind, which is ended too."""
        kill(self._actors)
        for machine, processes in self._children:
            if processes:
                with contextlib.suppress(RunError):
                    ended = [machine.keeper.end.remote(processes)]
                    results(ended, "ending a server", RunError, KILL_TIMEOUT)
        self._children = []


def hosts() -> list[Host]:
    """The hosts that are up and what they have."""
    return [
        Host(
            node["NodeManagerAddress"],
            node["Resources"].get("GPU", 0.0),
            node["Resources"].get("CPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def wait_for_hosts(placement: Placement, limit: float, check: Callable[[], None]) -> None:
    """Check that the cluster holds ``placement``; after a loss machines get time to come back."""
    end = time.monotonic() + limit
    while True:
        try:
            return check_fit(placement, hosts())
        except ConfigError:
            if time.monotonic() > end:
                raise
        check()
        time.sleep(1.0)


def check_local(config: TrainConfig) -> Placement:
    """Who sits where on this machine alone, known before Ray starts.

    Raises:
        ConfigError: This machine cannot hold the shape.
    """
    check_one_machine(config)
    placement = place(config, gpus=uses_gpus(config))
    # One logical CPU per process: Ray is told as many as are needed.
    cpus = sum(machine.cpus for machine in placement.machines)
    check_fit(placement, [Host(LOOPBACK, _local_gpus(), cpus)])
    return placement


@contextlib.contextmanager
def ray_runtime(config: TrainConfig, check: Callable[[], None]) -> Iterator[Placement]:
    """Ray, started here or joined, and who will sit where on it.

    Args:
        config: The run's configuration.
        check: Called while waiting; raises when the run is to end.

    Raises:
        ConfigError: No cluster answers, it cannot hold the shape, or its machines do not run the
            software of this one.
    """
    if not config.ray_address:
        placement = check_local(config)
        cpus = sum(machine.cpus for machine in placement.machines)
        gpus = _local_gpus() if placement.gpus else 0
        with ray_session("", num_cpus=cpus, num_gpus=gpus, check=check):
            yield placement
        return
    with ray_session(config.ray_address, num_cpus=0, num_gpus=0, check=check):
        there = config.device == "auto" and any(host.gpus for host in hosts())
        placement = place(config, gpus=there or config.device == "cuda")
        check_fit(placement, hosts())
        # Asks every machine for its software, before a run folder is made.
        _Group(placement, check).close()
        yield placement


def uses_gpus(config: TrainConfig) -> bool:
    """Whether processes on this machine compute on GPUs."""
    return config.device == "cuda" or (config.device == "auto" and _local_gpus() > 0)


def _local_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@contextlib.contextmanager
def ray_parts(
    config: TrainConfig,
    selection: Selection,
    placement: Placement,
    note: Callable[[str], None],
    check: Callable[[], None],
    *,
    again: bool,
) -> Iterator[tuple[Trainer, RolloutEngine]]:
    """Trainer and engines for the length of the block.

    Args:
        config: The run's configuration.
        selection: What is trained.
        placement: Who sits where.
        note: Told about lost engines and the host copy of the base.
        check: Called while waiting; raises when the run is to end.
        again: After a loss: a machine that is gone gets time to come back.

    Raises:
        ConfigError: The cluster cannot hold the shape.
        ProcessLost: A process went while starting.
    """
    wait_for_hosts(placement, RETURN_TIMEOUT if again else 0.0, check)
    with contextlib.ExitStack() as stack:
        group = _Group(placement, check)
        stack.callback(group.close)
        handles = [
            EngineProcess(group, seat, config, selection, check) for seat in placement.engines
        ]
        pool = EnginePool(
            handles,
            rollout_limit=config.rollout.rollout_timeout,
            call_limit=CALL_TIMEOUT,
            max_restarts=config.max_restarts,
            note=note,
            check=check,
        )
        # Both sides load their model at the same time, unless they share GPUs.
        stack.callback(_end_all, handles)
        if not config.sglang.sglang_colocated:
            for handle in handles:
                handle.start()
        ranks = [
            group.actor(
                RankActor, seat.part.machine, group.machines[seat.part.machine].devices(seat.part)
            )
            for seat in placement.ranks
        ]
        stack.callback(kill, ranks)
        trainer = RayTrainer(config, selection, ranks, check)
        trainer.wait_ready()
        if config.sglang.sglang_colocated:
            # The engine measures the memory that is free when it starts.
            trainer.offload()
            note(trainer.host_copy_summary())
            for handle in handles:
                handle.start()
        for handle in handles:
            handle.ready()
        # After a second signal nobody waits for an engine's answer.
        stack.push(lambda kind, *_: pool.abandon() if kind is KeyboardInterrupt else pool.close())
        yield trainer, pool


def _end_all(handles: Sequence[EngineProcess]) -> None:
    for handle in handles:
        with contextlib.suppress(ProcessLost):
            handle.end()
