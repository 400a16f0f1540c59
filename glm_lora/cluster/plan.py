"""A checked command: all that can be known before anything starts. No torch, nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glm_lora.arch.spec import ModelSpec
from glm_lora.config import TrainConfig
from glm_lora.model.plan import MemoryPlan, check_topology, plan_memory
from glm_lora.settings import spec_of
from glm_lora.targets.resolve import Resolution, resolve
from glm_lora.targets.selection import Selection


@dataclass(frozen=True)
class Plan:
    """What a ``train`` command will do."""

    config: TrainConfig
    spec: ModelSpec
    resolution: Resolution
    base: dict[str, Any]
    """What identifies the base; ``fingerprint`` among it."""

    @property
    def memory(self) -> MemoryPlan:
        """Memory of the trainer's fullest rank."""
        size = 2 if self.config.dtype == "bfloat16" else 4
        return plan_memory(
            self.spec,
            self.selection,
            self.config.parallel,
            self.config.world_size,
            bytes_per_value=size,
        )

    @property
    def selection(self) -> Selection:
        """What is trained."""
        return self.resolution.selection


def plan(config: TrainConfig) -> Plan:
    """Resolve the selection and check the base.

    Raises:
        UserError, CheckpointError: The command or a file it names is wrong.
    """
    spec = spec_of(config.model_name, config.hf_checkpoint)
    resolution = resolve(spec, config.model_name, config.selection)
    check_topology(spec, config.parallel, config.world_size)
    from glm_lora.rollout.engine import check_engine

    check_engine(config)
    if config.init == "random":
        return Plan(
            config, spec, resolution, {"fingerprint": f"random weights, seed {config.seed}"}
        )
    # After the selection: a wrong target is reported even where no base exists yet.
    from glm_lora.checkpoint.manifest import check_base

    manifest = check_base(config.ref_load, spec)
    return Plan(config, spec, resolution, {"fingerprint": manifest.fingerprint})
