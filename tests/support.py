"""Helpers that several test folders share."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
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


def close_as_a_whole(actual, expected, why: str, rtol: float) -> None:
    """Assert that two arrays differ by at most ``rtol`` of the norm of ``expected``.

    For parameters after steps of AdamW, which divides a gradient by its own size: where it is of
    the size of rounding, an element moves anywhere within the learning rate, so single elements
    say nothing, and differ from one kind of processor to the next.
    """
    got, want = _array(actual), _array(expected)
    assert got.shape == want.shape, f"shape {got.shape} instead of {want.shape}: {why}"
    gap, norm = np.linalg.norm(got - want), np.linalg.norm(want)
    assert gap <= rtol * norm, f"differs by {gap:.4g}, of {norm:.4g}; rtol {rtol:g}: {why}"


def load_whole(folder: Path):
    """The model that transformers reads from ``folder``, which holds every weight and no other."""
    from transformers import Glm5NextForConditionalGeneration

    model, info = Glm5NextForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def words(text: str) -> str:
    """``text`` without the frame of an error message and its line breaks."""
    return " ".join(text.replace("\u2502", " ").split())


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A disk in memory, mounted on ``folder`` with ``options``; skips where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _array(value) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.float64)
