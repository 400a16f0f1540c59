"""Helpers that several test folders share."""

from __future__ import annotations

import numpy as np
import torch


def close(actual, expected, why: str, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Assert that two arrays agree; a failure prints maximum, mean and the worst index.

    Args:
        actual: Tensor or array.
        expected: Reference of the same shape.
        why: Where the tolerance comes from.
        atol: Absolute tolerance.
        rtol: Tolerance relative to ``expected``.
    """
    got, want = _array(actual), _array(expected)
    assert got.shape == want.shape, f"shape {got.shape} instead of {want.shape}: {why}"
    if got.size == 0:
        return
    gap = np.abs(got - want)
    bad = ~(gap <= atol + rtol * np.abs(want))
    worst = np.unravel_index(int(np.nanargmax(np.where(bad, np.inf, gap))), gap.shape)
    assert not bad.any(), (
        f"{int(bad.sum())} of {gap.size} differ (max {np.nanmax(gap):.4g}, mean "
        f"{np.nanmean(gap):.4g}, at {tuple(map(int, worst))}: {got[worst]:.8g} instead of "
        f"{want[worst]:.8g}); atol {atol:g}, rtol {rtol:g}: {why}"
    )


def _array(value) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.float64)
