"""A checked command: all that can be known before anything starts. No torch, nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glm_lora.arch.spec import ModelSpec
from glm_lora.config import TrainConfig
from glm_lora.errors import CheckpointError
from glm_lora.model.plan import MemoryPlan, check_topology, plan_memory
from glm_lora.settings import spec_of
from glm_lora.targets.resolve import Resolution, resolve
from glm_lora.targets.selection import Selection


@dataclass(frozen=True)
class Outline:
    """What a ``train`` command asks for: known without a base, a tokenizer or prompts."""

    config: TrainConfig
    spec: ModelSpec
    resolution: Resolution

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


@dataclass(frozen=True)
class Plan(Outline):
    """What a ``train`` command will do, on a base that is there."""

    base: dict[str, Any]
    """What identifies the base; ``fingerprint`` among it."""


def outline(config: TrainConfig) -> Outline:
    """Resolve the selection and check shape and engine; the base may still be missing.

    Raises:
        UserError: The command is wrong.
    """
    spec = spec_of(config.model_name, config.hf_checkpoint)
    resolution = resolve(spec, config.model_name, config.selection)
    check_topology(spec, config.parallel, config.world_size)
    from glm_lora.rollout.engine import check_engine

    check_engine(config)
    return Outline(config, spec, resolution)


def on_base(wanted: Outline) -> Plan:
    """The plan of ``wanted`` on the base that its configuration names.

    Raises:
        CheckpointError: The base is missing, unfinished, damaged or of another model.
    """
    config = wanted.config
    fingerprint = f"random weights, seed {config.seed}"
    if config.init != "random":
        from glm_lora.checkpoint.manifest import check_base

        if not config.ref_load.exists():
            raise CheckpointError(
                f"there is no base in {config.ref_load}",
                "a torch_dist base",
                f"Run glm-lora prepare --model-name {config.model_name}, or name one with "
                "--ref-load",
            )
        fingerprint = check_base(config.ref_load, wanted.spec).fingerprint
    return Plan(config, wanted.spec, wanted.resolution, {"fingerprint": fingerprint})


def plan(config: TrainConfig) -> Plan:
    """Resolve the selection and check the base.

    Raises:
        UserError, CheckpointError: The command or a file it names is wrong.
    """
    # In this order a wrong target is reported even where no base exists yet.
    return on_base(outline(config))
