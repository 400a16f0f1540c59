"""Which engine a run uses."""

from __future__ import annotations

from glm_lora.config import TrainConfig
from glm_lora.protocols import RolloutEngine
from glm_lora.targets.selection import Selection


def build_engine(config: TrainConfig, selection: Selection) -> RolloutEngine:
    """Start the engine that ``config`` asks for, in this process (a server is a child of it)."""
    import torch

    from glm_lora.rollout.embedded import EmbeddedEngine

    cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
    if not cuda:
        # The tiny shapes that run on a CPU are too small to share between threads.
        torch.set_num_threads(1)
    return EmbeddedEngine(
        config.hf_checkpoint,
        selection,
        dtype=getattr(torch, config.dtype),
        device="cuda" if cuda else "cpu",
        seed=config.seed,
        return_routed_experts=config.rollout.enable_r3,
    )
