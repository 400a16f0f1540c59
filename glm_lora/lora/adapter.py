"""One adapter: the local parts of A and B, and how they start."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Switch:
    """Shared by all adapters of a set: whether they act, and whether dropout does."""

    enabled: bool = True
    training: bool = True


class Adapter:
    """``y += scaling * B A dropout(x)`` on one projection; A and B are fp32 masters.

    Args:
        a: Local A ``[r, in]``.
        b: Local B ``[out, r]``.
        scaling: alpha / rank.
        dropout: Probability of dropping an input while training.
        switch: Shared by the set.
    """

    def __init__(
        self, a: Tensor, b: Tensor, scaling: float, dropout: float, switch: Switch
    ) -> None:
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.scaling = scaling
        self._dropout, self._switch = dropout, switch

    @property
    def active(self) -> bool:
        """False while the set is switched off."""
        return self._switch.enabled

    @property
    def dropout(self) -> float:
        """Drop probability now."""
        return self._dropout if self._switch.training else 0.0


def initial_a(shape: tuple[int, int], seed: int, site: str) -> Tensor:
    """The full A of one site: Kaiming-uniform with a = sqrt(5), that is U(-1/sqrt(in), 1/sqrt(in)).

    Each site has a generator of its own on the CPU, derived from the seed and the site's name, so
    that the values depend neither on the topology nor on what else is selected.

    Args:
        shape: ``(rank, in_features)``, unsharded: the bound comes from the full fan-in.
        seed: Of the run.
        site: Disk name.
    """
    digest = hashlib.sha256(f"{seed}:{site}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    a = torch.empty(shape, dtype=torch.float32)
    return nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
