"""Numbers about a rollout and an update, under the recipe's names, and the bands they belong in.

NaN and infinity are counted and left out of means, never turned into zero: a mean over nothing is
NaN, which the sinks write as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from glm_lora.errors import TrainingError
from glm_lora.protocols import (
    BASE,
    LOGPROB_DIFF,
    LOGPROB_LIMITS,
    Finish,
    Sample,
    TrainSample,
)
from glm_lora.rl.batch import BatchReport
from glm_lora.rl.rewards import Score

LOGPROB_NONFINITE = "train/train_rollout_logprob_nonfinite"


def mean(values: Sequence[float] | np.ndarray) -> float:
    """Mean of the finite values; NaN when there is none."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    return float(array.mean()) if array.size else math.nan


def logprob_difference(
    trainer: Sequence[np.ndarray], samples: Sequence[TrainSample]
) -> dict[str, float]:
    """How far the trainer's and the engine's log-probabilities of the same tokens are apart.

    Args:
        trainer: The trainer's log-probability of each response token, per sample.
        samples: The samples of the batch, with the engine's values.

    Returns:
        Mean and maximum of ``|trainer - engine|`` over response tokens (nats), and how many
        differences are not finite (they are in neither).
    """
    assert len(trainer) == len(samples), "one array per sample"
    parts = [
        np.abs(np.asarray(t, dtype=np.float64) - np.asarray(s.rollout_logprobs))
        for t, s in zip(trainer, samples, strict=True)
    ]
    differences = np.concatenate(parts) if parts else np.zeros(0)
    finite = differences[np.isfinite(differences)]
    largest = float(finite.max()) if finite.size else math.nan
    return {
        LOGPROB_DIFF: mean(finite),
        f"{LOGPROB_DIFF}_max": largest,
        LOGPROB_NONFINITE: float(differences.size - finite.size),
    }


def check_logprob_difference(metrics: Mapping[str, float], limit: float | None, dtype: str) -> None:
    """Stop the run when trainer and engine no longer compute the same model.

    Args:
        metrics: What ``logprob_difference`` returned.
        limit: Largest allowed mean difference; None takes the default of ``dtype``.
        dtype: Compute dtype of the less exact side, ``float32`` or ``bfloat16``.

    Raises:
        TrainingError: The mean is above the limit, or a difference is not finite.
    """
    limit = LOGPROB_LIMITS[dtype] if limit is None else limit
    value, bad = metrics[LOGPROB_DIFF], metrics[LOGPROB_NONFINITE]
    if bad:
        what = f"{int(bad)} token log-probabilities of trainer or engine are not finite"
    elif value > limit:
        what = f"trainer and engine differ by {value:.3g} nats per token ({LOGPROB_DIFF})"
    else:
        return
    raise TrainingError(
        what,
        f"at most {limit:g} in {dtype}, and only finite values",
        "Compare first what the two sides compute differently: the adapter's version and digest, "
        "then the expert choice of the MoE layers (--enable-r3), the indexer of the "
        "sparse-attention layers, and the recurrent state of the KDA layers; "
        "docs/when-it-breaks lists the checks",
    )


def rollout_metrics(
    samples: Sequence[Sample], scores: Sequence[Score], report: BatchReport, step: int
) -> dict[str, float]:
    """Rewards, lengths, ends, groups and staleness of one rollout, as ``rollout/...`` scalars."""
    lengths = np.array([len(s.response_ids) for s in samples], dtype=np.float64)
    count = max(1, len(samples))
    values = np.array([math.nan if s.value is None else s.value for s in scores])
    finite = values[np.isfinite(values)]
    result = {
        "rollout/raw_reward": mean(finite),
        "rollout/reward_std": float(finite.std()) if finite.size else math.nan,
        "rollout/unscored": float(report.unscored),
        "rollout/response_length": mean(lengths),
        "rollout/response_length_max": float(lengths.max()) if lengths.size else math.nan,
        "rollout/response_tokens": float(lengths.sum()),
        "rollout/truncated_ratio": report.truncated / count,
        "rollout/stop_ratio": sum(s.finish is Finish.STOP for s in samples) / count,
        "rollout/aborted": float(report.aborted),
        "rollout/empty_responses": float(report.empty),
        "rollout/truncated_masked": float(report.masked),
        "rollout/groups": float(report.groups),
        "rollout/zero_std_groups": float(report.zero_std_groups),
        "rollout/logprob_nonfinite": float(
            sum(not math.isfinite(p) for s in samples for p in s.logprobs)
        ),
    }
    result |= _part_means(scores)
    result |= advantage_metrics(report)
    return result | staleness(samples, step)


def _part_means(scores: Sequence[Score]) -> dict[str, float]:
    """Means of the named parts of the scores (``rollout/reward_accuracy``, ...)."""
    names = sorted({name for s in scores for name in s.parts})
    return {
        f"rollout/reward_{name}": mean([s.parts[name] for s in scores if name in s.parts])
        for name in names
    }


def advantage_metrics(report: BatchReport) -> dict[str, float]:
    """Statistics of the advantages of the samples that train."""
    values = report.advantages[list(report.kept)]
    empty = not values.size
    return {
        "rollout/advantage_mean": mean(values),
        "rollout/advantage_std": math.nan if empty else float(values.std()),
        "rollout/advantage_min": math.nan if empty else float(values.min()),
        "rollout/advantage_max": math.nan if empty else float(values.max()),
        "rollout/advantage_nonzero": float(np.count_nonzero(values)),
    }


def staleness(samples: Sequence[Sample], step: int) -> dict[str, float]:
    """How many updates old the adapters were that made the samples (0: on-policy)."""
    ages = [float(step - s.adapter.version) for s in samples if s.adapter != BASE]
    return {
        "rollout/staleness": mean(ages),
        "rollout/staleness_max": max(ages) if ages else math.nan,
    }


@dataclass(frozen=True)
class Band:
    """The healthy range of one metric, and what to read first outside of it."""

    metric: str
    low: float
    high: float
    read_first: str

    def complaint(self, metrics: Mapping[str, float]) -> str | None:
        """A line when the metric is there and outside the band (NaN counts as outside)."""
        value = metrics.get(self.metric)
        if value is None or self.low <= value <= self.high:
            return None
        return (
            f"{self.metric} is {value:.4g}; healthy is {self.low:g} to {self.high:g}. "
            f"{self.read_first}."
        )


HEALTH_BANDS = (
    Band(LOGPROB_DIFF, 0.0, 0.03, "Read docs/when-it-breaks: trainer and engine differ"),
    Band(LOGPROB_NONFINITE, 0, 0, "Read docs/when-it-breaks: NaN in log-probabilities"),
    Band("train/ppo_kl", -0.01, 0.01, "The update is large: lower --lr or --updates-per-rollout"),
    Band("train/grad_norm", 1e-8, 10.0, "Check the reward's scale, --lr and --clip-grad"),
    Band("train/clip_fraction", 0.0, 0.2, "The update is large: lower --lr"),
    Band("rollout/truncated_ratio", 0.0, 0.5, "Raise --rollout-max-response-len"),
    Band("rollout/unscored", 0, 0, "The verifier's reasons stand above"),
    Band("rollout/staleness_max", 0, 1, "Samples come from older adapters than they should"),
)
"""Bands around a healthy run."""


def health_lines(metrics: Mapping[str, float], bands: Sequence[Band] = HEALTH_BANDS) -> list[str]:
    """One line per metric outside its band: which number, which band, what to read first."""
    return [line for band in bands if (line := band.complaint(metrics)) is not None]
