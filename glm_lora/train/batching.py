"""Which sample is computed where: pure functions of sequence lengths."""

from __future__ import annotations

from collections.abc import Sequence


def assign_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Share samples over data-parallel ranks so that token counts are close.

    Longest first, each to the rank with the fewest tokens (and, among equals, the fewest samples).

    Returns:
        Sample indices per rank, ascending. A rank may be empty when there are too few samples.
    """
    loads = [(0, 0, rank) for rank in range(num_ranks)]
    result: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, samples, rank = min(loads)
        loads[rank] = (tokens + lengths[index], samples + 1, rank)
        result[rank].append(index)
    return [sorted(indices) for indices in result]


def micro_batches(
    indices: Sequence[int], lengths: Sequence[int], max_tokens: int, *, padded: bool = True
) -> list[list[int]]:
    """Cut one rank's samples into micro-batches of at most ``max_tokens`` tokens.

    Samples of similar length share a micro-batch. A padded micro-batch costs its longest sample
    times its size, a packed one the sum. A sample longer than the budget gets one of its own.
    """
    batches: list[list[int]] = []
    cost = 0
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if batches:
            longest = lengths[batches[-1][0]]
            grown = longest * (len(batches[-1]) + 1) if padded else cost + length
            if grown <= max_tokens:
                batches[-1].append(index)
                cost = grown
                continue
        batches.append([index])
        cost = length
    return [sorted(batch) for batch in batches]
