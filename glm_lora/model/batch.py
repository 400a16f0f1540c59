"""Micro-batches, padded or packed.

Padding is on the right, so a causal model needs no mask to keep real tokens clean; the mask only
says which positions count. A packed batch is one row of sequences behind each other. Inside the
model tokens are flat, ``[B * L, ...]``; ``by_sequence`` gives a function whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """How sequences lie in the one row of a packed batch; all tensors on the batch's device."""

    lengths: tuple[int, ...]
    place: Tensor
    """int32 ``[L]``, position of each token in its own sequence."""
    next_rows: Tensor
    """int64, the positions whose next token's log-probability is wanted."""
    score_places: Tensor
    """int64, for each of them its place in the flat ``[sequences, longest]`` result."""

    def to(self, device: torch.device | str) -> Packing:
        """The same on ``device``."""
        tensors = (self.place, self.next_rows, self.score_places)
        return Packing(self.lengths, *(x.to(device, non_blocking=True) for x in tensors))


@dataclass(frozen=True)
class ModelBatch:
    """One micro-batch: B right-padded sequences of L positions, or one row of packed ones."""

    tokens_B_L: Tensor
    """int64 token ids."""
    mask_B_L: Tensor
    """bool; False on padding."""
    routed_experts: Tensor | None = None
    """int64 ``[B, L, MoE layers, top-k]``: experts to use instead of the router's own choice;
    -1 where none is given."""
    wanted_B_L: Tensor | None = None
    """bool; the tokens whose log-probability is wanted. None: every real token but the first."""
    packing: Packing | None = None
    """Set when the one row holds several sequences."""

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
        return self.packing is None and not bool(self.mask_B_L.all())

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Flat start, number and length of each run of equally long sequences."""
        if self.packing is None:
            return ((0, *self.shape),)
        runs: list[tuple[int, int, int]] = []
        start = 0
        for length in self.packing.lengths:
            if runs and runs[-1][2] == length:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
            else:
                runs.append((start, 1, length))
            start += length
        return tuple(runs)

    @cached_property
    def place(self) -> Tensor:
        """int32 ``[B * L]``, position of each flat token in its own sequence."""
        if self.packing is not None:
            return self.packing.place
        rows, length = self.shape
        device = self.tokens_B_L.device
        return torch.arange(length, dtype=torch.int32, device=device).repeat(rows)

    @cached_property
    def bounds(self) -> Tensor:
        """int64 on the CPU: where each sequence starts in the flat tokens, and their number."""
        lengths = [length for _, number, length in self.runs for _ in range(number)]
        return torch.tensor([0, *lengths]).cumsum(0)

    @cached_property
    def device_bounds(self) -> Tensor:
        """``bounds`` on the batch's device."""
        return self.bounds.to(self.tokens_B_L.device, non_blocking=True)

    @property
    def score_shape(self) -> tuple[int, int]:
        """Sequences and longest length: log-probabilities are ``[sequences, longest - 1]``."""
        if self.packing is None:
            return self.shape
        return len(self.packing.lengths), max(self.packing.lengths)

    @cached_property
    def next_rows(self) -> Tensor | None:
        """Flat rows ``b * L + t`` whose next token is wanted; None when that is every t < L - 1."""
        if self.packing is not None:
            return self.packing.next_rows
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
            None if self.packing is None else self.packing.to(device),
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


def pack(
    sequences: Sequence[Sequence[int]],
    *,
    routed_experts: Sequence[np.ndarray | None] | None = None,
    wanted: Sequence[Sequence[bool]] | None = None,
    device: torch.device | str = "cpu",
) -> ModelBatch:
    """Lay ``sequences`` behind each other in one row; nothing crosses from one to the next.

    Costs the sum of the lengths where ``collate`` costs the longest times their number. Without
    sequences the result is ``collate([])``.

    Args:
        sequences: Token ids, one sequence per sample, each of one token or more.
        routed_experts: As for ``collate``.
        wanted: As for ``collate``.
        device: Where the tensors go.
    """
    if not sequences:
        return collate([], device=device)
    lengths = [len(s) for s in sequences]
    counted = np.array(lengths)
    place = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    flags = np.ones(len(place), dtype=bool)
    if wanted is not None:
        flags = np.concatenate([np.asarray(w, dtype=bool) for w in wanted])
    follows = np.append(place[1:] > 0, False) & np.append(flags[1:], False)
    next_rows = follows.nonzero()[0]
    owner = np.repeat(np.arange(len(lengths)), counted)
    score_places = owner[next_rows] * int(counted.max()) + place[next_rows]
    routed = _collate_experts(routed_experts, len(lengths), int(counted.max()))
    if routed is not None:
        routed = np.concatenate([routed[i, :n] for i, n in enumerate(lengths)])[None]
    tokens = np.concatenate([np.asarray(s, dtype=np.int64) for s in sequences])[None]
    packing = Packing(
        tuple(lengths), *(torch.from_numpy(x) for x in (place, next_rows, score_places))
    )
    return ModelBatch(
        torch.from_numpy(tokens),
        torch.ones(tokens.shape, dtype=torch.bool),
        None if routed is None else torch.from_numpy(routed),
        packing=packing,
    ).to(device)


def by_sequence(batch: ModelBatch, function: Callable[..., Tensor], *flat: Tensor) -> Tensor:
    """Apply a function of whole sequences to flat tensors.

    Args:
        batch: Says where sequences begin.
        function: Called with ``[sequences, length, ...]`` of each tensor, once per run of equally
            long sequences; returns ``[sequences, length, ...]``.
        flat: Each ``[B * L, ...]``.

    Returns:
        The results behind each other, ``[B * L, ...]``.
    """
    if len(batch.runs) == 1:
        _, number, length = batch.runs[0]
        return function(*(x.unflatten(0, (number, length)) for x in flat)).flatten(0, 1)
    parts = []
    for start, number, length in batch.runs:
        part = slice(start, start + number * length)
        result = function(*(x[part].unflatten(0, (number, length)) for x in flat))
        parts.append(result.flatten(0, 1))
    return torch.cat(parts)


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
