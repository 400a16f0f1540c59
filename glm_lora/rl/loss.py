"""The policy loss over token log-probabilities. Pure functions on tensors.

Every function takes padded ``[B, T]`` tensors of response tokens with a mask. ``policy_loss``
returns sums, never means: micro-batches and data-parallel ranks add their sums, and the optimizer
step divides once by ``loss_denominator`` of the whole batch, so that the result does not depend on
how samples were spread. Values at masked positions are ignored, NaN included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from glm_lora.config import AlgorithmConfig
from glm_lora.errors import ConfigError
from glm_lora.protocols import TrainSample

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here so that one absurd token cannot overflow the exponential."""


@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of one micro-batch."""

    loss: torch.Tensor
    """Scalar with gradient; divide by ``loss_denominator`` of the whole batch."""
    tokens: torch.Tensor
    """Tokens that count (scalar)."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Detached per-token sums by metric name; divide by the tokens of the whole batch."""


def token_weights(
    mask_BT: torch.Tensor, aggregation: str, length_limit: int | None = None
) -> torch.Tensor:
    """Weight of each token's loss before the division by ``loss_denominator``.

    * ``token-mean``: 1, every token of the batch counts the same (Yu et al. 2025, DAPO,
      arXiv:2503.14476, section 3.3).
    * ``sequence-mean``: 1 / tokens of the sequence, every sequence counts the same (DeepSeekMath,
      equation 3).
    * ``constant``: 1 / ``length_limit``, without the bias towards long wrong answers (Liu et al.
      2025, Dr. GRPO, arXiv:2503.20783, section 3.2).
    """
    mask_BT = mask_BT.to(torch.float32)
    if aggregation == "token-mean":
        return mask_BT
    if aggregation == "sequence-mean":
        return mask_BT / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    if aggregation == "constant":
        if not length_limit or length_limit < 1:
            raise ConfigError(
                f"loss aggregation 'constant' with length limit {length_limit}",
                "the response length limit (rollout_max_response_len)",
            )
        return mask_BT / length_limit
    raise ConfigError(
        f"unknown loss aggregation {aggregation!r}", "token-mean, sequence-mean or constant"
    )


def loss_denominator(samples: Iterable[TrainSample], aggregation: str) -> int:
    """What the summed loss of a whole batch is divided by; 0 when nothing counts.

    Tokens for ``token-mean``, else sequences; only what the loss mask keeps is counted, so masked
    (truncated) responses change neither numerator nor denominator.
    """
    counts = [sum(s.loss_mask) for s in samples]
    return sum(counts) if aggregation == "token-mean" else sum(c > 0 for c in counts)


def clipped_objective(
    log_ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, dual: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token loss ``-min(r A, clip(r, 1 - low, 1 + high) A)`` and where the clip was active.

    Clip-higher is DAPO's decoupled range (Yu et al. 2025, section 3.1) in PPO's objective (Schulman
    et al. 2017, equation 7). With ``dual`` > 1 the loss of a negative advantage is at most
    ``-dual * A`` (Ye et al. 2020, arXiv:1912.09729, equation 6).
    """
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantage
    clipped = -ratio.clamp(1 - low, 1 + high) * advantage
    loss = torch.maximum(plain, clipped)
    active = clipped > plain
    if dual > 0:
        bound = -dual * advantage
        bounded = (advantage < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        active = active | bounded
    return loss, active


def kl_k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference): ``exp(d) - d - 1`` with ``d = ref - policy``.

    Schulman 2020, "Approximating KL divergence", estimator k3: unbiased and never negative.
    """
    delta = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return delta.exp() - delta - 1


def importance_weights(
    trainer: torch.Tensor, engine: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated weights ``min(p_trainer / p_engine, cap)`` and where they were cut; no gradient.

    They correct for tokens drawn by an engine whose probabilities differ from the trainer's
    (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    training").
    """
    ratio = (trainer - engine).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio.clamp(max=cap), ratio > cap


def policy_loss(
    logprobs_BT: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BT: torch.Tensor,
    algorithm: AlgorithmConfig,
    *,
    old_logprobs_BT: torch.Tensor | None = None,
    rollout_logprobs_BT: torch.Tensor | None = None,
    reference_logprobs_BT: torch.Tensor | None = None,
    entropy_BT: torch.Tensor | None = None,
    length_limit: int | None = None,
) -> LossSums:
    """Sum of the policy loss (and KL and entropy terms) over one micro-batch.

    Args:
        logprobs_BT: The policy's log-probabilities of the response tokens, with gradient.
        advantage_B: One advantage per sequence.
        mask_BT: True or 1 where a token counts.
        algorithm: Clip distances, coefficients and aggregation.
        old_logprobs_BT: The trainer's values before the first update on this batch; None means the
            present ones (ratio 1, exact for a single update per batch).
        rollout_logprobs_BT: The engine's values; needed for ``importance_cap``, else metrics only.
        reference_logprobs_BT: The base's values; needed when ``kl_coef`` is positive.
        entropy_BT: Entropy of each token's distribution; needed when ``entropy_coef`` is positive.
        length_limit: Response length limit, for the ``constant`` aggregation.

    Returns:
        The sums; divide ``loss`` by ``loss_denominator`` and the metric sums by the tokens.

    Raises:
        ConfigError: A coefficient asks for values that were not given.
    """
    _require("kl_coef", algorithm.kl_coef, reference_logprobs_BT)
    _require("entropy_coef", algorithm.entropy_coef, entropy_BT)
    _require("importance_cap", algorithm.importance_cap, rollout_logprobs_BT)
    mask_BT = mask_BT.bool()

    def kept(values_BT: torch.Tensor) -> torch.Tensor:
        # Replaced before any arithmetic, so that padding cannot poison values or gradients.
        return torch.where(mask_BT, values_BT.float(), 0.0)

    logprobs = kept(logprobs_BT)
    old = logprobs.detach() if old_logprobs_BT is None else kept(old_logprobs_BT)
    advantage = advantage_B.to(logprobs).unsqueeze(-1) * mask_BT
    loss, clipped = clipped_objective(
        logprobs - old, advantage, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    )
    sums = {"ppo_kl": (old - logprobs).detach(), "clip_fraction": clipped.float()}
    if rollout_logprobs_BT is not None:
        engine = kept(rollout_logprobs_BT)
        cap = algorithm.importance_cap or float("inf")
        weight, cut = importance_weights(old, engine, cap)
        sums |= {"importance_weight": weight, "importance_capped": cut.float()}
        if algorithm.importance_cap > 0:
            loss = loss * weight
    if reference_logprobs_BT is not None:
        kl = kl_k3(logprobs, kept(reference_logprobs_BT))
        sums["kl"] = kl.detach()
        loss = loss + algorithm.kl_coef * kl
    if entropy_BT is not None:
        entropy = kept(entropy_BT)
        sums["entropy"] = entropy.detach()
        loss = loss - algorithm.entropy_coef * entropy
    weights = token_weights(mask_BT, algorithm.loss_aggregation, length_limit)
    return LossSums(
        loss=(loss * weights).sum(),
        tokens=mask_BT.sum(),
        sums={name: (values * mask_BT).sum() for name, values in sums.items()},
    )


def _require(name: str, coefficient: float, values: torch.Tensor | None) -> None:
    if coefficient > 0 and values is None:
        raise ConfigError(f"{name} is {coefficient} but its log-probabilities were not computed")
