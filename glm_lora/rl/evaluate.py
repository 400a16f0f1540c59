"""Evaluation on a prompt file: pass@1, pass@k and lengths of the base and of an adapter.

Both are served by the same engine with the same prompts and seeds; nothing is merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from glm_lora.errors import RolloutError
from glm_lora.protocols import (
    BASE,
    AdapterRef,
    Finish,
    Request,
    RolloutEngine,
    Sample,
    SamplingParams,
)
from glm_lora.rl.data import Prompt
from glm_lora.rl.metrics import mean
from glm_lora.rl.rewards import Reward, Score, make_answers
from glm_lora.rl.stream import request_seed

EVAL_STREAM = -1
"""Stands for the rollout number in the seeds of evaluation requests."""
PASS_VALUE = 0.5
"""A sample passes when its accuracy (or, without one, its reward) is at least this."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of ``k`` samples passes.

    ``1 - C(n - c, k) / C(n, k)``: Chen et al. 2021 (arXiv:2107.03374), equation 1.

    Args:
        samples: Samples drawn (n), at least ``k``.
        passed: How many of them passed (c).
        k: Samples allowed.
    """
    assert 0 <= passed <= samples and 1 <= k <= samples, "k of n samples"
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def passes(score: Score) -> bool | None:
    """Whether a sample passed; None when it was not scored."""
    if score.value is None:
        return None
    return score.parts.get("accuracy", score.value) >= PASS_VALUE


def evaluate(
    engine: RolloutEngine,
    adapter: AdapterRef,
    prompts: Sequence[Prompt],
    reward: Reward,
    decode: Callable[[Sequence[int]], str],
    *,
    sampling: SamplingParams,
    samples_per_prompt: int = 1,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Sample and score every prompt with one adapter (or ``BASE``).

    Args:
        engine: Where to sample.
        adapter: The adapter to evaluate.
        prompts: All prompts of the evaluation.
        reward: Scores the responses.
        decode: Tokens to text.
        sampling: Limits, temperature and stop tokens; the seed in it is not used.
        samples_per_prompt: n of pass@k; k are the powers of two up to n, and n itself.
        seed: Seeds the requests; equal seeds mean equal requests for every adapter.
        note: Hears of samples without a score, and why the first has none.

    Returns:
        ``eval/...`` scalars. Samples without a score count in ``eval/unscored`` and in nothing
        else; a prompt with fewer than k scored samples is left out of pass@k.
    """
    samples, scores = _sampled(
        engine, adapter, prompts, reward, decode, sampling, samples_per_prompt, seed
    )
    missing = _reasons(scores)
    if missing:
        note(f"{len(missing)} of {len(scores)} responses have no reward: {missing[0]}")
    return _summary(samples, scores, samples_per_prompt)


def _sampled(
    engine: RolloutEngine,
    adapter: AdapterRef,
    prompts: Sequence[Prompt],
    reward: Reward,
    decode: Callable[[Sequence[int]], str],
    sampling: SamplingParams,
    samples_per_prompt: int,
    seed: int,
) -> tuple[list[Sample], list[Score]]:
    requests = [
        Request(
            prompt.ids,
            replace(sampling, seed=request_seed(seed, EVAL_STREAM, index)),
            samples_per_prompt,
        )
        for index, prompt in enumerate(prompts)
    ]
    samples = engine.generate(requests, adapter)
    return samples, reward.score(make_answers(prompts, samples, decode, sampling.stop_token_ids))


def compare(
    engine: RolloutEngine,
    adapter: AdapterRef,
    prompts: Sequence[Prompt],
    reward: Reward,
    decode: Callable[[Sequence[int]], str],
    *,
    sampling: SamplingParams,
    samples_per_prompt: int = 1,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, float]]:
    """``evaluate`` of the base and of ``adapter``, by the names ``base`` and ``adapter``.

    ``note`` hears of samples without a score, and why the first has none.

    Raises:
        RolloutError: Not one sample of the base, or of the adapter, has a score.
    """
    result: dict[str, dict[str, float]] = {}
    for name, ref in (("base", BASE), ("adapter", adapter)):
        samples, scores = _sampled(
            engine, ref, prompts, reward, decode, sampling, samples_per_prompt, seed
        )
        missing = _reasons(scores)
        if missing and len(missing) == len(scores):
            raise RolloutError(
                f"none of the {len(scores)} responses of the {name} could be scored: {missing[0]}",
                "a reward for most of them",
                "Try the reward on one answer by hand",
            )
        if missing:
            note(f"{name}: {len(missing)} of {len(scores)} responses have no reward: {missing[0]}")
        result[name] = _summary(samples, scores, samples_per_prompt)
    return result


def _reasons(scores: Sequence[Score]) -> list[str]:
    return [score.reason or "no reason was given" for score in scores if score.value is None]


def _summary(samples: Sequence[Sample], scores: Sequence[Score], n: int) -> dict[str, float]:
    verdicts = [passes(score) for score in scores]
    groups = [verdicts[i : i + n] for i in range(0, len(verdicts), n)]
    known = [[v for v in group if v is not None] for group in groups]
    result = {
        "eval/raw_reward": mean([s.value for s in scores if s.value is not None]),
        "eval/response_length": mean([len(s.response_ids) for s in samples]),
        "eval/truncated_ratio": mean([s.finish is Finish.LENGTH for s in samples]),
        "eval/unscored": float(verdicts.count(None)),
        "eval/prompts": float(len(groups)),
    }
    for k in sorted({1, n, *(2**i for i in range(n.bit_length()) if 2**i <= n)}):
        result[f"eval/pass@{k}"] = mean(
            [pass_at_k(len(g), sum(g), k) for g in known if len(g) >= k]
        )
    return result
