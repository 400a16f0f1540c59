"""Rewards: what a response is worth. A registry of names, and the record every reward returns.

``exact`` runs in place. Rewards that parse what a model wrote, or run a user's code, run in worker
processes with a time limit (``glm_lora.rl.workers``), so that a hanging or crashing verifier costs
one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from glm_lora.errors import DataError, did_you_mean
from glm_lora.protocols import Finish, Sample


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


REWARDS: dict[str, Callable[[float], Reward]] = {"exact": lambda timeout: ExactReward()}
"""Built-in rewards by name; each takes the time limit of one call in seconds."""


def make_reward(name: str, timeout: float = 10.0) -> Reward:
    """The reward called ``name``.

    Args:
        name: A key of ``REWARDS``.
        timeout: Seconds one scoring call may take.

    Raises:
        DataError: An unknown name.
    """
    if name in REWARDS:
        return REWARDS[name](timeout)
    raise DataError(
        f"unknown reward {name!r}", "one of " + ", ".join(REWARDS), did_you_mean(name, REWARDS)
    )
