"""Padded micro-batches.

Padding is on the right, so a causal model needs no mask to keep real tokens clean; the mask only
says which positions count. Inside the model tokens are flat, ``[B * L, ...]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelBatch:
    """One micro-batch of right-padded sequences (B sequences, L positions)."""

    tokens_B_L: Tensor
    """int64 token ids."""
    mask_B_L: Tensor
    """bool; False on padding."""
    routed_experts: Tensor | None = None
    """int64 ``[B, L, MoE layers, top-k]``: experts to use instead of the router's own choice;
    -1 where none is given."""
    wanted_B_L: Tensor | None = None
    """bool; the tokens whose log-probability is wanted. None: every real token but the first."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return self.tokens_B_L.shape[0], self.tokens_B_L.shape[1]

    @property
    def num_tokens(self) -> int:
        """B * L, padding included."""
        return self.tokens_B_L.numel()

    @cached_property
    def padded(self) -> bool:
        """Whether any position is padding."""
        return not bool(self.mask_B_L.all())

    @cached_property
    def next_rows(self) -> Tensor | None:
        """Flat rows ``b * L + t`` whose next token is wanted; None when that is every t < L - 1."""
        if self.wanted_B_L is None and not self.padded:
            return None
        wanted = self.mask_B_L if self.wanted_B_L is None else self.wanted_B_L & self.mask_B_L
        rows = torch.zeros_like(wanted)
        rows[:, :-1] = wanted[:, 1:]
        return rows.flatten().nonzero().squeeze(-1)

    def to(self, device: torch.device | str) -> ModelBatch:
        """The same batch on ``device``."""

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        return ModelBatch(
            self.tokens_B_L.to(device),
            self.mask_B_L.to(device),
            moved(self.routed_experts),
            moved(self.wanted_B_L),
        )


def collate(
    sequences: Sequence[Sequence[int]],
    *,
    pad_token_id: int = 0,
    routed_experts: Sequence[np.ndarray | None] | None = None,
    wanted: Sequence[Sequence[bool]] | None = None,
    device: torch.device | str = "cpu",
) -> ModelBatch:
    """Pad ``sequences`` on the right to the longest.

    Without sequences the result is a batch of padding only: a rank that has nothing left to do
    runs it, because its peers' collectives wait for it.

    Args:
        sequences: Token ids, one sequence per sample.
        pad_token_id: Id written on padding; it never influences a real token.
        routed_experts: Per sample ``[tokens or fewer, MoE layers, top-k]``, or None.
        wanted: Per sample, for each token whether its log-probability is wanted.
        device: Where the tensors go.
    """
    length = max((len(s) for s in sequences), default=0)
    rows, length = max(len(sequences), 1), max(length, 2)
    tokens = np.full((rows, length), pad_token_id, dtype=np.int64)
    mask = np.zeros((rows, length), dtype=bool)
    for i, sequence in enumerate(sequences):
        tokens[i, : len(sequence)] = sequence
        mask[i, : len(sequence)] = True
    chosen = np.zeros((rows, length), dtype=bool)
    for i, flags in enumerate(wanted or ()):
        chosen[i, : len(flags)] = flags
    routed = _collate_experts(routed_experts, rows, length)
    batch = ModelBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(mask),
        None if routed is None else torch.from_numpy(routed),
        None if wanted is None else torch.from_numpy(chosen),
    )
    return batch.to(device)


def _collate_experts(
    routed_experts: Sequence[np.ndarray | None] | None, rows: int, length: int
) -> np.ndarray | None:
    given = [r for r in routed_experts or () if r is not None]
    if not given or routed_experts is None:
        return None
    out = np.full((rows, length, *given[0].shape[1:]), -1, dtype=np.int64)
    for i, chosen in enumerate(routed_experts):
        if chosen is not None:
            out[i, : len(chosen)] = chosen
    return out


def distinct(sequences: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[int]]:
    """The different sequences, in order of appearance, and for each sequence its place there.

    Samples of one prompt are often equal. Without dropout and replayed experts equal sequences
    have equal log-probabilities, so each needs to be run once: index the result with the places.
    """
    places: dict[tuple[int, ...], int] = {}
    index = [places.setdefault(tuple(s), len(places)) for s in sequences]
    return [list(s) for s in places], index
