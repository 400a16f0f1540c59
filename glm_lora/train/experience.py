"""One rollout's experience: sample the prompts with one adapter, check and score the samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glm_lora.config import TrainConfig
from glm_lora.errors import RolloutError
from glm_lora.protocols import (
    AdapterRef,
    Finish,
    Request,
    RolloutEngine,
    Sample,
    TrainBatch,
)
from glm_lora.report.history import Scored
from glm_lora.rl.batch import BatchReport, make_batch
from glm_lora.rl.chat import ChatFormat
from glm_lora.rl.data import Prompt
from glm_lora.rl.dynamic import gather
from glm_lora.rl.metrics import rollout_metrics
from glm_lora.rl.rewards import Answer, Reward, Score, make_answers
from glm_lora.rl.stream import PromptStream, request_seed


@dataclass(frozen=True)
class Experience:
    """The batch of one update and what is known about its rollout."""

    batch: TrainBatch
    metrics: dict[str, float]
    groups: list[list[Scored]]
    """The scored responses of each prompt as text, for the report."""
    unscored: tuple[str, ...] = ()
    """Why samples have no reward, each reason once."""


@dataclass(frozen=True)
class Explorer:
    """Collects experience: prompts, engine, reward.

    Args:
        config: Group size, limits, temperature, seed.
        engine: Samples.
        prompts: Where the next prompts come from.
        reward: Scores.
        chat: Stop tokens, and text of tokens.
    """

    config: TrainConfig
    engine: RolloutEngine
    prompts: PromptStream
    reward: Reward
    chat: ChatFormat

    def collect(self, step: int, adapter: AdapterRef) -> Experience:
        """Sample and score the prompts of rollout ``step``; replaces groups that teach nothing.

        Raises:
            RolloutError: The engine failed, or returned samples that another adapter made.
        """
        rollout = self.config.rollout
        seconds = {"time/rollout": 0.0, "time/reward": 0.0}
        groups: list[list[Scored]] = []

        def draw(count: int, first: int) -> tuple[list[Sample], list[Score]]:
            start = time.perf_counter()
            prompts = self.prompts.take(count)
            samples = self._sample(prompts, adapter, step, first)
            sampled = time.perf_counter()
            answers = make_answers(prompts, samples, self.chat.decode, self.chat.stop_token_ids)
            scores = self.reward.score(answers)
            seconds["time/rollout"] += sampled - start
            seconds["time/reward"] += time.perf_counter() - sampled
            groups.extend(_texts(answers, scores, rollout.n_samples_per_prompt))
            return samples, scores

        group = rollout.n_samples_per_prompt
        limit = self.config.algorithm.dynamic_sampling_limit
        gathered = gather(draw, rollout.rollout_batch_size, group, limit)
        unscored = unscored_reasons(gathered.all_scores, step)
        batch, report = self._batch(gathered.samples, gathered.scores, step)
        if gathered.dropped_groups:
            # Rewards and lengths are those of everything sampled, not of what was kept.
            _, report = self._batch(gathered.all_samples, gathered.all_scores, step)
        metrics = rollout_metrics(gathered.all_samples, gathered.all_scores, report, step)
        tokens = metrics["rollout/response_tokens"]
        rate = {"rollout/tokens_per_second": tokens / max(seconds["time/rollout"], 1e-9)}
        return Experience(batch, metrics | gathered.metrics() | seconds | rate, groups, unscored)

    def _batch(
        self, samples: Sequence[Sample], scores: Sequence[Score], step: int
    ) -> tuple[TrainBatch, BatchReport]:
        return make_batch(
            samples,
            [score.value for score in scores],
            self.config.rollout.n_samples_per_prompt,
            algorithm=self.config.algorithm,
            step=step,
            temperature=self.config.rollout.rollout_temperature,
        )

    def _sample(
        self, prompts: Sequence[Prompt], adapter: AdapterRef, step: int, first: int
    ) -> list[Sample]:
        rollout = self.config.rollout
        requests = [
            Request(
                prompt.ids,
                self.chat.sampling(rollout, request_seed(self.config.seed, step, first + index)),
                rollout.n_samples_per_prompt,
            )
            for index, prompt in enumerate(prompts)
        ]
        samples = self.engine.generate(requests, adapter)
        check_samples(samples, requests, adapter)
        return samples


def _texts(
    answers: Sequence[Answer], scores: Sequence[Score], group: int
) -> Iterator[list[Scored]]:
    """What was scored, prompt by prompt."""
    for first in range(0, len(answers), group):
        yield [
            Scored(a.prompt, a.label, a.response, s.value, a.response_tokens, a.finish.value)
            for a, s in zip(
                answers[first : first + group], scores[first : first + group], strict=True
            )
            if s.value is not None
        ]


def unscored_reasons(scores: Sequence[Score], step: int) -> tuple[str, ...]:
    """Why samples of rollout ``step`` have no reward, each reason once.

    Raises:
        RolloutError: Not one has a reward: the verifier is broken, and nothing could be learned.
    """
    missing = [score.reason for score in scores if score.value is None]
    reasons = tuple(dict.fromkeys(reason or "no reason was given" for reason in missing))
    if scores and len(missing) == len(scores):
        raise RolloutError(
            f"none of the {len(scores)} responses of rollout {step} could be scored: {reasons[0]}",
            "a reward for most of them",
            "Try the reward on one answer by hand; --reward-timeout limits each call",
        )
    return reasons


def check_samples(
    samples: Sequence[Sample], requests: Sequence[Request], adapter: AdapterRef
) -> None:
    """Every request has its samples, in order, made by the adapter that was asked for.

    Raises:
        RolloutError: Another number of samples, another adapter or version, other prompts, or
            tokens without log-probabilities.
    """
    expected = [r.prompt_ids for r in requests for _ in range(r.n)]
    if len(samples) != len(expected):
        raise RolloutError(
            f"the engine returned {len(samples)} samples", f"{len(expected)} samples"
        )
    for sample, prompt_ids in zip(samples, expected, strict=True):
        if sample.adapter != adapter:
            raise RolloutError(
                f"a sample was made by {sample.adapter}",
                str(adapter),
                "The engine serves another adapter than it was asked for; see its log",
            )
        if sample.prompt_ids != prompt_ids:
            raise RolloutError("the engine returned samples of other prompts than it was asked")
        if len(sample.logprobs) != len(sample.response_ids) and sample.finish is not Finish.ABORT:
            raise RolloutError(
                f"a sample has {len(sample.response_ids)} tokens and {len(sample.logprobs)} "
                "log-probabilities",
                "one log-probability per response token",
            )
