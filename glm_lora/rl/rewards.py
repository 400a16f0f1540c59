"""Rewards: what a response is worth. A registry of names, and the record every reward returns.

``exact`` runs in place. Rewards that parse what a model wrote, or run a user's code, run in worker
processes with a time limit (``glm_lora.rl.workers``), so that a hanging or crashing verifier costs
one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from glm_lora.config import RolloutConfig
from glm_lora.errors import ConfigError, DataError, did_you_mean
from glm_lora.protocols import Finish, Sample
from glm_lora.rl.answers import THINK_OPEN
from glm_lora.rl.data import Prompt


@dataclass(frozen=True)
class Answer:
    """One response to be scored."""

    prompt: str
    response: str
    """Decoded response without the stop token."""
    label: str
    finish: Finish
    metadata: Mapping[str, Any] = field(default_factory=dict)
    response_tokens: int = 0
    """Response length in tokens, the stop token included."""
    thinking: bool = False
    """Whether the prompt ended inside an open ``<think>``."""


@dataclass(frozen=True)
class Score:
    """The reward of one response; ``value`` None when it could not be scored."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components for the metrics, such as ``accuracy`` and ``format``."""
    reason: str = ""
    """Why there is no value."""


class Reward(Protocol):
    """Scores answers; one instance serves a whole run."""

    def check_label(self, label: str) -> str | None:
        """Why this label can never be matched (asked when data is loaded), or None."""
        ...

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score per answer, in order."""
        ...

    def close(self) -> None:
        """Stop what this reward started."""
        ...


class ExactReward:
    """1 when the stripped response equals the label and ended with a stop token, else 0."""

    def check_label(self, label: str) -> str | None:
        """Refuse labels that only differ from the stripped response by surrounding space."""
        return None if label.strip() else "the label is only white space"

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """Compare text; a truncated response never counts as right."""
        return [Score(float(_is_exact(a))) for a in answers]

    def close(self) -> None:
        """Nothing was started."""


def _is_exact(answer: Answer) -> bool:
    return answer.finish is Finish.STOP and answer.response.strip() == answer.label.strip()


def response_text(
    sample: Sample, decode: Callable[[Sequence[int]], str], stop_token_ids: Sequence[int]
) -> str:
    """The decoded response without the stop token that ended it.

    Args:
        sample: A sampled response.
        decode: The tokenizer's ``decode`` (special tokens are kept: ``</think>`` may be one).
        stop_token_ids: The stop ids of the request.
    """
    ids = sample.response_ids
    if ids and sample.finish is Finish.STOP and ids[-1] in stop_token_ids:
        ids = ids[:-1]
    return decode(ids)


class OverlongPenalty:
    """Adds DAPO's soft overlong punishment to another reward (Yu et al. 2025, equation 13).

    Args:
        inner: The reward of the answer itself.
        limit: Response token limit.
        buffer: Tokens before the limit over which the penalty grows from 0 to its full size.
        weight: Size of the full penalty.
    """

    def __init__(self, inner: Reward, limit: int, buffer: int, weight: float = 1.0) -> None:
        assert 0 < buffer < limit, "checked by reward_of"
        self._inner = inner
        self._limit, self._buffer, self._weight = limit, buffer, weight

    def check_label(self, label: str) -> str | None:
        """What the inner reward says."""
        return self._inner.check_label(label)

    def penalty(self, tokens: int) -> float:
        """0 up to ``limit - buffer`` tokens, then linearly down to ``-weight`` at the limit."""
        over = tokens - (self._limit - self._buffer)
        return -self._weight * min(max(over / self._buffer, 0.0), 1.0)

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """The inner scores with the penalty added and noted as the part ``overlong``."""
        return [
            score
            if score.value is None
            else replace(
                score,
                value=score.value + self.penalty(answer.response_tokens),
                parts={**score.parts, "overlong": self.penalty(answer.response_tokens)},
            )
            for answer, score in zip(answers, self._inner.score(answers), strict=True)
        ]

    def close(self) -> None:
        """Close the inner reward."""
        self._inner.close()


def make_answers(
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    decode: Callable[[Sequence[int]], str],
    stop_token_ids: Sequence[int],
) -> list[Answer]:
    """What a reward needs to know of each sample; equally many consecutive samples per prompt."""
    group = len(samples) // max(1, len(prompts))
    assert group * len(prompts) == len(samples), "equally many samples per prompt"
    answers: list[Answer] = []
    for index, prompt in enumerate(prompts):
        # The template may open the thinking; a few tokens hold its marker.
        thinking = decode(prompt.ids[-8:]).rstrip().endswith(THINK_OPEN)
        answers += [
            Answer(
                prompt=prompt.text,
                response=response_text(sample, decode, stop_token_ids),
                label=prompt.label,
                finish=sample.finish,
                metadata=prompt.metadata,
                response_tokens=len(sample.response_ids),
                thinking=thinking,
            )
            for sample in samples[index * group : (index + 1) * group]
        ]
    return answers


BUILTIN = ("exact", "math", "dapo")
"""Rewards by name; a path ending in .py or an http(s) URL names one of the user's."""


def make_reward(name: str, timeout: float = 10.0) -> Reward:
    """The reward called ``name``: a built-in, ``FILE.py`` or an http(s) URL.

    Args:
        name: Name, path or URL.
        timeout: Seconds one scoring call may take.

    Raises:
        DataError: An unknown name, or a verifier that cannot be loaded.
    """
    if name == "exact":
        return ExactReward()
    # Imported late: exact alone needs no processes and no HTTP.
    from glm_lora.rl.verifiers import HttpReward, WorkerReward, file_reward

    if name in BUILTIN:
        return WorkerReward((name,), timeout)
    if name.startswith(("http://", "https://")):
        return HttpReward(name, timeout)
    if name.endswith(".py"):
        return file_reward(Path(name), timeout)
    raise DataError(
        f"unknown reward {name!r}",
        "one of " + ", ".join(BUILTIN) + ", FILE.py or an http(s) URL",
        did_you_mean(name, BUILTIN),
    )


def reward_of(rollout: RolloutConfig) -> Reward:
    """The reward of a run, with the overlong penalty when one is configured.

    Raises:
        ConfigError: The penalty's buffer is not shorter than the response limit.
        DataError: The reward is unknown or cannot be loaded.
    """
    limit, buffer = rollout.rollout_max_response_len, rollout.overlong_buffer_len
    if buffer and buffer >= limit:
        raise ConfigError(
            f"overlong_buffer_len is {buffer}",
            f"less than rollout_max_response_len ({limit})",
        )
    reward = make_reward(rollout.reward, rollout.reward_timeout)
    if not buffer:
        return reward
    return OverlongPenalty(reward, limit, buffer, rollout.overlong_penalty)
