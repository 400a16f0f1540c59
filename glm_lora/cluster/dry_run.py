"""What ``train --dry-run`` prints: machines, processes, commands, environment and ports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from glm_lora.cluster.placement import (
    LOOPBACK,
    EngineSeat,
    Placement,
    check_one_machine,
    part_options,
    place,
)
from glm_lora.cluster.plan import Outline
from glm_lora.config import TrainConfig
from glm_lora.rollout.engine import server_options
from glm_lora.rollout.sglang_server import server_command


def describe(plan: Outline) -> list[str]:
    """The lines; ``device`` auto counts as CUDA except for a run without GPUs at all.

    Raises:
        ConfigError: Several machines without a cluster to join.
    """
    config = plan.config
    check_one_machine(config)
    placement = place(config, gpus=config.device != "cpu")
    lines = [_ray(config, placement), _store(config)]
    for number, machine in enumerate(placement.machines):
        held = f"{machine.gpus} GPU(s), " if machine.gpus else ""
        lines.append(f"machine {number}: {held}{machine.cpus} process(es)")
        lines += _ranks(config, placement, number)
        for seat in placement.engines:
            lines += _engine(plan, seat, number)
    return lines


def _ray(config: TrainConfig, placement: Placement) -> str:
    if config.launcher != "ray":
        return f"launcher {config.launcher}: no Ray"
    bundles = "; ".join(
        ", ".join(f"{name} {count:g}" for name, count in bundle.items())
        for bundle in placement.bundles()
    )
    where = (
        f"join {config.ray_address}" if config.ray_address else f"start a local one on {LOOPBACK}"
    )
    return f"ray: {where}; placement group PACK of [{bundles}]"


def _host(config: TrainConfig, machine: int) -> str:
    if config.launcher == "inline" or (config.launcher == "ray" and not config.ray_address):
        return LOOPBACK
    return f"<machine {machine}>"


def _store(config: TrainConfig) -> str:
    if config.launcher == "torchrun":
        return "rendezvous: where torchrun's MASTER_ADDR and MASTER_PORT say"
    return f"rendezvous: {_host(config, 0)}, a free port taken at the start"


def _ranks(config: TrainConfig, placement: Placement, machine: int) -> Iterator[str]:
    for seat in placement.ranks:
        if seat.part.machine != machine:
            continue
        devices = ",".join(map(str, seat.part.gpus))
        shown = f": CUDA_VISIBLE_DEVICES={devices}" if devices else ""
        if config.launcher != "ray":
            shown = ""  # torchrun's environment says it
        yield f"  rank {seat.rank} of {len(placement.ranks)}{shown}"


def _engine(plan: Outline, seat: EngineSeat, machine: int) -> Iterator[str]:
    config = plan.config
    for index, part in enumerate(seat.parts):
        if part.machine != machine:
            continue
        whole = f" part {index + 1} of {len(seat.parts)}" if len(seat.parts) > 1 else ""
        gpus = f" on GPU(s) {','.join(map(str, part.gpus))}" if part.gpus else ""
        name = f"  engine {seat.number}{whole}{gpus}"
        if config.rollout.rollout_engine != "sglang":
            yield f"{name}: embedded (transformers and PEFT)"
            continue
        if config.sglang.rollout_engine_urls:
            yield f"{name}: uses {', '.join(config.sglang.rollout_engine_urls)}"
            continue
        head = f"{_host(config, next(p.machine for p in seat.parts))}:<free port>"
        options = part_options(
            server_options(config, plan.selection, seat.number),
            seat,
            index,
            devices=part.gpus,
            address=head,
        )
        yield f"{name}: HTTP on {LOOPBACK}, a free port taken at the start"
        environment = " ".join(f"{key}={value}" for key, value in options.env.items())
        command = server_command(options, options.checkpoint, options.port)
        yield f"    {environment} {shlex.join(command)}".replace("--port 0", "--port <free port>")
