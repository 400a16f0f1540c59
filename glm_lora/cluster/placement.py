"""Who sits where: trainer ranks and rollout engines on machines and their GPUs.

Pure: a shape goes in, seats come out; nothing is started and no library of Ray or torch is needed.
A machine here is what must lie on one host (one bundle of a Ray placement group); a host with more
GPUs may hold several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from glm_lora.config import TrainConfig
from glm_lora.errors import ConfigError
from glm_lora.rollout.sglang_server import ServerOptions

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Machine:
    """What one host must have free."""

    gpus: int
    cpus: int
    """One per process."""


@dataclass(frozen=True)
class Part:
    """The GPUs of one process on one machine, counted from the machine's first; () on a CPU."""

    machine: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankSeat:
    """Where a trainer rank computes."""

    rank: int
    part: Part


@dataclass(frozen=True)
class EngineSeat:
    """Where a rollout engine computes; one that spans machines has a part on each, head first."""

    number: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Placement:
    """All seats of one run."""

    machines: tuple[Machine, ...]
    ranks: tuple[RankSeat, ...]
    engines: tuple[EngineSeat, ...]

    @property
    def gpus(self) -> int:
        """GPUs over all machines."""
        return sum(m.gpus for m in self.machines)

    def bundles(self) -> list[dict[str, float]]:
        """The resources of each machine as Ray counts them."""
        return [
            {"CPU": float(m.cpus)} | ({"GPU": float(m.gpus)} if m.gpus else {})
            for m in self.machines
        ]


def place(config: TrainConfig, *, gpus: bool) -> Placement:
    """Seat the ranks and engines of a run.

    Rank ``r`` sits on machine ``r // num_gpus_per_node``, so that tensor-parallel neighbours share
    a host. Engines take the trainer's GPUs in the same order, or ``rollout_num_gpus`` of their own.

    Args:
        config: The resolved configuration.
        gpus: Whether processes compute on GPUs.

    Raises:
        ConfigError: The engines cannot be cut out of the GPUs they are given.
    """
    nodes, per_node = config.num_nodes, config.num_gpus_per_node
    ranks = [
        RankSeat(rank, Part(rank // per_node, (rank % per_node,) if gpus else ()))
        for rank in range(nodes * per_node)
    ]
    machine_gpus = [per_node if gpus else 0] * nodes
    engines = _engine_parts(config, gpus)
    own = config.sglang.rollout_num_gpus if gpus and _starts_servers(config) else 0
    if own:
        # Behind the trainer's machines, as many engines on each as there are GPUs on a node.
        machine_gpus += [per_node] * (own // per_node) + [own % per_node] * bool(own % per_node)
        engines = [tuple(Part(p.machine + nodes, p.gpus) for p in parts) for parts in engines]
    processes = [p.machine for seat in ranks for p in [seat.part]]
    processes += [p.machine for parts in engines for p in parts]
    return Placement(
        machines=tuple(
            Machine(count, processes.count(number)) for number, count in enumerate(machine_gpus)
        ),
        ranks=tuple(ranks),
        engines=tuple(EngineSeat(n, parts) for n, parts in enumerate(engines)),
    )


def _starts_servers(config: TrainConfig) -> bool:
    return config.rollout.rollout_engine == "sglang" and not config.sglang.rollout_engine_urls


def _engine_parts(config: TrainConfig, gpus: bool) -> list[tuple[Part, ...]]:
    """The parts of every engine, machines counted from the first that engines may use."""
    if config.sglang.rollout_engine_urls and config.rollout.rollout_engine == "sglang":
        return [(Part(0),)]
    if not gpus:
        count = max(1, config.sglang.rollout_num_engines)
        return [(Part(number % config.num_nodes),) for number in range(count)]
    per_node = config.num_gpus_per_node
    size = config.sglang.rollout_num_gpus_per_engine if _starts_servers(config) else 1
    total = config.world_size
    if _starts_servers(config):
        total = config.sglang.rollout_num_gpus or total
    where = "--rollout-num-gpus" if config.sglang.rollout_num_gpus else "the trainer's GPUs"
    if (size <= per_node and per_node % size) or (size > per_node and size % per_node):
        raise ConfigError(
            f"--rollout-num-gpus-per-engine {size} on machines of {per_node} GPUs",
            f"a divisor or a multiple of {per_node}",
        )
    most = total // size
    count = config.sglang.rollout_num_engines or (most if _starts_servers(config) else 1)
    if count > most or count == 0:
        raise ConfigError(
            f"{max(count, 1)} engine(s) of {size} GPU(s) do not fit {where} ({total})",
            f"at most {most} engines of {size}, or more GPUs",
        )
    return [_cut(number * size, size, per_node) for number in range(count)]


def _cut(first: int, size: int, per_node: int) -> tuple[Part, ...]:
    """The machines and GPUs of ``size`` consecutive GPUs."""
    parts: dict[int, list[int]] = {}
    for gpu in range(first, first + size):
        parts.setdefault(gpu // per_node, []).append(gpu % per_node)
    return tuple(Part(machine, tuple(held)) for machine, held in parts.items())


def part_options(
    options: ServerOptions, seat: EngineSeat, index: int, *, devices: Sequence[int], address: str
) -> ServerOptions:
    """The server command's options for one part of an engine.

    Args:
        options: What the whole engine serves.
        seat: The engine's seat.
        index: Which of its parts.
        devices: The GPUs of that part as the host numbers them; empty leaves them as they are.
        address: ``host:port`` where the parts of an engine that spans machines meet.
    """
    env = dict(options.env)
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    passed = options.passed
    if len(seat.parts) > 1:
        passed = ("--nnodes", str(len(seat.parts)), "--node-rank", str(index),
                  "--dist-init-addr", address, *passed)  # fmt: skip
    return replace(options, env=env, passed=passed)


@dataclass(frozen=True)
class Host:
    """One host of a cluster and what it has."""

    name: str
    gpus: float
    cpus: float


def check_fit(placement: Placement, hosts: Sequence[Host]) -> None:
    """Refuse a placement that the hosts cannot hold, largest machines first.

    Raises:
        ConfigError: Says what is there and what is missing.
    """
    left = [[host.gpus, host.cpus] for host in hosts]
    missing: list[Machine] = []
    for machine in sorted(placement.machines, key=lambda m: (m.gpus, m.cpus), reverse=True):
        fitting = [room for room in left if room[0] >= machine.gpus and room[1] >= machine.cpus]
        if not fitting:
            missing.append(machine)
            continue
        room = min(fitting)
        room[0] -= machine.gpus
        room[1] -= machine.cpus
    if not missing:
        return
    there = ", ".join(f"{h.name} with {_amount(h.gpus, h.cpus)}" for h in hosts) or "no machine"
    wanted = "; ".join(
        f"{count} machine(s) with {_amount(kind.gpus, kind.cpus)}"
        for kind, count in _counted(placement.machines).items()
    )
    lacking = "; ".join(
        f"{count} with {_amount(kind.gpus, kind.cpus)}" for kind, count in _counted(missing).items()
    )
    raise ConfigError(
        f"the cluster cannot hold this shape: there is {there}; missing: {lacking}",
        wanted,
        "Add machines, or change --num-nodes, --num-gpus-per-node or --rollout-num-gpus",
    )


def check_one_machine(config: TrainConfig) -> None:
    """Refuse several machines without a cluster to join: a local Ray is one.

    Raises:
        ConfigError: ``--num-nodes`` is more than 1 without ``--ray-address``.
    """
    if config.launcher == "ray" and config.num_nodes > 1 and not config.ray_address:
        raise ConfigError(
            f"--num-nodes {config.num_nodes} without --ray-address: a local Ray is one machine",
            "--num-nodes 1, or the address of a running cluster",
            "Start Ray on the machines and add --ray-address auto",
        )


def _counted(machines: Sequence[Machine]) -> Mapping[Machine, int]:
    return {m: list(machines).count(m) for m in dict.fromkeys(machines)}


def _amount(gpus: float, cpus: float) -> str:
    return f"{math.floor(gpus)} GPU(s) and {math.floor(cpus)} CPU(s)"
