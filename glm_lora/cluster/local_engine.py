"""The rollout engine of a run without Ray: beside the driver, on the driver's machine."""

from __future__ import annotations

import os

from glm_lora.cluster.placement import part_options, place
from glm_lora.config import TrainConfig
from glm_lora.errors import ConfigError
from glm_lora.protocols import RolloutEngine
from glm_lora.rollout.engine import build_engine, server_options
from glm_lora.targets.selection import Selection


def build_local_engine(config: TrainConfig, selection: Selection) -> RolloutEngine:
    """Start the run's engines on this machine, on the GPUs of their seats.

    Raises:
        ConfigError: An engine would sit on another machine.
    """
    starts = config.rollout.rollout_engine == "sglang" and not config.sglang.rollout_engine_urls
    if not starts:
        return build_engine(config, selection)
    import torch

    count = torch.cuda.device_count() if config.device != "cpu" else 0
    engines = place(config, gpus=count > 0).engines
    if count and any(part.machine for seat in engines for part in seat.parts):
        raise ConfigError(
            f"--launcher {config.launcher} with engines on other machines",
            "--launcher ray, which starts them there",
        )
    servers = [
        part_options(
            server_options(config, selection, seat.number),
            seat,
            0,
            devices=_visible(seat.parts[0].gpus),
            address="",
        )
        for seat in engines
    ]
    return build_engine(config, selection, servers)


def _visible(gpus: tuple[int, ...]) -> list[int]:
    """GPU numbers of the host for GPUs counted as this process sees them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(name) for name in names if name.strip().isdigit()]
    return [numbers[gpu] if numbers else gpu for gpu in gpus]
