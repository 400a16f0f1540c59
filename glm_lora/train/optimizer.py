"""AdamW on the adapters' fp32 masters, with a learning-rate schedule that counts applied steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from glm_lora.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of applied step ``step`` (from 0) of ``total_steps``.

    Linear warm-up from ``lr / warmup`` to ``lr``, then constant, linear to zero, or half a cosine
    to zero (Loshchilov and Hutter 2017, eq. 5 without restarts).
    """
    warmup = config.lr_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    if config.lr_schedule == "linear":
        return config.lr * max(0.0, 1.0 - done)
    if config.lr_schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return config.lr


class AdapterOptimizer:
    """torch's AdamW over named adapter tensors (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        parameters: Local fp32 adapter tensors by serving key.
        config: Rate, betas, decay.
        total_steps: Steps that the schedule is laid out for.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        total_steps: int,
    ) -> None:
        if not parameters:
            raise ValueError("the optimizer got no parameters: nothing would train")
        self.config = config
        self.total_steps = total_steps
        self.parameters = dict(parameters)
        self.applied_steps = 0
        self._adam = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )

    @property
    def lr(self) -> float:
        """The rate that the next step will use."""
        return learning_rate(self.config, self.applied_steps, self.total_steps)

    def step(self, clip_scale: float = 1.0) -> None:
        """Apply the gradients in ``.grad``, scaled by ``clip_scale``, and clear them."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if clip_scale != 1.0:
            torch._foreach_mul_(gradients, clip_scale)
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        # Not every implementation in torch counts its writes (the fused one does not), and the
        # products go by the count to tell whether their copies are old (model.linear).
        torch.autograd.graph.increment_version(self.parameters.values())
        self.zero_grad()
        self.applied_steps += 1

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._adam.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, torch.Tensor]:
        """First and second moments by ``<serving key>.exp_avg`` and ``.exp_avg_sq``.

        Moments that do not exist yet (no step applied) are zeros, which is what AdamW starts from.
        """
        result = {}
        for key, parameter in self.parameters.items():
            state = self._adam.state.get(parameter, {})
            for name in ("exp_avg", "exp_avg_sq"):
                value = state.get(name)
                result[f"{key}.{name}"] = torch.zeros_like(parameter) if value is None else value
        return result

    def load_moments(self, moments: Mapping[str, torch.Tensor], applied_steps: int) -> None:
        """Restore what ``moments`` returned after ``applied_steps`` steps, all keys present."""
        expected = {f"{k}.{n}" for k in self.parameters for n in ("exp_avg", "exp_avg_sq")}
        if set(moments) != expected:
            raise ValueError(
                f"moments do not fit: {len(expected - set(moments))} missing, "
                f"{len(set(moments) - expected)} unknown"
            )
        self.applied_steps = applied_steps
        for key, parameter in self.parameters.items():
            if applied_steps == 0:
                self._adam.state.pop(parameter, None)
                continue
            state: dict[str, Any] = {"step": torch.tensor(float(applied_steps))}
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = moments[f"{key}.{name}"].detach().clone().to(parameter.device)
            self._adam.state[parameter] = state
