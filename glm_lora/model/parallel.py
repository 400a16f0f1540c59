"""Process groups of one rank, on top of megatron-core's ``parallel_state``.

Everything that depends on the topology takes a ``ParallelContext``; nothing else reads process
groups. A group is None when it would hold one rank, and every collective of
``glm_lora.model.collectives`` is then the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from glm_lora.config import ParallelConfig
from glm_lora.errors import ConfigError

Group = dist.ProcessGroup


@dataclass(frozen=True)
class ParallelContext:
    """Where this rank stands in each parallel dimension; the default is one rank alone."""

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    tp_group: Group | None = None
    pp_size: int = 1
    pp_rank: int = 0
    pp_group: Group | None = None
    ep_size: int = 1
    ep_rank: int = 0
    ep_group: Group | None = None
    dp_size: int = 1
    dp_rank: int = 0
    dp_group: Group | None = None
    sequence_parallel: bool = False
    """Activations between tensor-parallel regions are cut along the tokens."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pipeline_layers: tuple[int, ...] = ()
    """Layers per pipeline stage; empty splits evenly with the remainder on the last stages."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes log-probabilities."""
        return self.pp_rank == self.pp_size - 1


def init_single_process() -> None:
    """Start a one-rank gloo group with a store in memory, unless a group is already up."""
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def init_parallel(config: ParallelConfig, device: torch.device | str) -> ParallelContext:
    """Build the process groups for ``config``; every rank of the default group calls this.

    ``torch.distributed`` must be initialised. Groups of an earlier call are released first.

    Raises:
        ConfigError: The sizes do not divide the number of ranks.
    """
    # Imported here: it takes seconds and a plain ParallelContext() needs none of it.
    from megatron.core import parallel_state

    world = dist.get_world_size()
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    ep = config.expert_model_parallel_size
    _check_sizes(world, tp, pp, ep)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=1,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )

    def placed(group: object) -> tuple[int, int, Group | None]:
        assert isinstance(group, Group)
        size = dist.get_world_size(group)
        return size, dist.get_rank(group), group if size > 1 else None

    tp_size, tp_rank, tp_group = placed(parallel_state.get_tensor_model_parallel_group())
    pp_size, pp_rank, pp_group = placed(parallel_state.get_pipeline_model_parallel_group())
    ep_size, ep_rank, ep_group = placed(parallel_state.get_expert_model_parallel_group())
    dp_size, dp_rank, dp_group = placed(parallel_state.get_data_parallel_group())
    return ParallelContext(
        world_size=world,
        rank=dist.get_rank(),
        tp_size=tp_size,
        tp_rank=tp_rank,
        tp_group=tp_group,
        pp_size=pp_size,
        pp_rank=pp_rank,
        pp_group=pp_group,
        ep_size=ep_size,
        ep_rank=ep_rank,
        ep_group=ep_group,
        dp_size=dp_size,
        dp_rank=dp_rank,
        dp_group=dp_group,
        sequence_parallel=config.sequence_parallel and tp_size > 1,
        device=torch.device(device),
        pipeline_layers=config.pipeline_layers,
    )


def _check_sizes(world: int, tp: int, pp: int, ep: int) -> None:
    if world % (tp * pp):
        raise ConfigError(
            f"{world} ranks with tensor parallel {tp} and pipeline parallel {pp}",
            f"a multiple of {tp * pp} ranks",
        )
    if (world // pp) % ep:
        raise ConfigError(
            f"{world // pp} ranks per pipeline stage with expert parallel {ep}",
            f"expert parallel that divides {world // pp}",
        )
