"""Advantages of a group of samples of one prompt, from their rewards. Pure numpy.

A missing reward is NaN: it takes no part in the group's statistics and its own advantage is 0. A
group whose known rewards are all equal, or that has fewer than two of them, has no learning signal
and gets exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from glm_lora.errors import ConfigError, did_you_mean


def grpo(rewards_N: np.ndarray) -> np.ndarray:
    """``(r - mean) / std`` with the sample standard deviation (n - 1).

    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), section 4.1.2.
    """
    return (rewards_N - rewards_N.mean()) / rewards_N.std(ddof=1)


def grpo_no_std(rewards_N: np.ndarray) -> np.ndarray:
    """``r - mean``: group-relative without the division that favours easy and hard prompts.

    Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.1.
    """
    return rewards_N - rewards_N.mean()


def rloo(rewards_N: np.ndarray) -> np.ndarray:
    """``r - mean of the other samples``, an unbiased leave-one-out baseline.

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740), section 2.3.
    """
    others = (rewards_N.sum() - rewards_N) / (len(rewards_N) - 1)
    return rewards_N - others


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "rloo": rloo,
    # Dr. GRPO differs from grpo_no_std in the loss (aggregation "constant"), not here.
    "dr_grpo": grpo_no_std,
}


def group_advantages(rewards_N: np.ndarray, kind: str) -> np.ndarray:
    """Advantages ``[N]`` of one group's rewards ``[N]`` (NaN where a reward is missing).

    Args:
        rewards_N: Rewards of the samples of one prompt.
        kind: A key of ``ADVANTAGES``.

    Returns:
        fp64 advantages; always finite when the known rewards are.

    Raises:
        ConfigError: An unknown kind.
    """
    if kind not in ADVANTAGES:
        raise ConfigError(
            f"unknown advantage {kind!r}",
            "one of " + ", ".join(ADVANTAGES),
            did_you_mean(kind, ADVANTAGES),
        )
    rewards_N = np.asarray(rewards_N, dtype=np.float64)
    result_N = np.zeros_like(rewards_N)
    known_N = ~np.isnan(rewards_N)
    if has_spread(rewards_N):
        result_N[known_N] = ADVANTAGES[kind](rewards_N[known_N])
    return result_N


def has_spread(rewards_N: np.ndarray) -> bool:
    """Whether the known rewards of a group differ (else the group teaches nothing)."""
    known = np.asarray(rewards_N, dtype=np.float64)
    known = known[~np.isnan(known)]
    # Compared exactly: a tiny std from rounding would otherwise be blown up to a full advantage.
    return len(known) >= 2 and bool(known.max() != known.min())
