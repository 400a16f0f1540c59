"""What the tests of the training step do with a worker."""

from __future__ import annotations

import torch

from glm_lora.protocols import TrainBatch


def gradients(worker, batch: TrainBatch, monkeypatch) -> dict[str, torch.Tensor]:
    """The synchronised gradients of one update, without applying it."""
    caught: dict[str, torch.Tensor] = {}

    def catch(scale: float = 1.0) -> None:
        caught.update({k: p.grad.clone() for k, p in worker.optimizer.parameters.items()})
        worker.optimizer.zero_grad()

    monkeypatch.setattr(worker.optimizer, "step", catch)
    worker.step(batch)
    monkeypatch.undo()
    return caught


def randomise_b(worker) -> None:
    generator = torch.Generator().manual_seed(1)
    for key, parameter in worker.adapters.parameters().items():
        if key.endswith("lora_B.weight"):
            parameter.data.normal_(0, 0.05, generator=generator)
