"""One rollout's experience: sample the prompts, score the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm_lora.config import TrainConfig
from glm_lora.errors import RolloutError
from glm_lora.protocols import AdapterRef, Finish, Request, RolloutEngine, Sample, SamplingParams
from glm_lora.rl.data import Prompt
from glm_lora.rl.rewards import Reward, Score, make_answers
from glm_lora.rl.stream import request_seed


@dataclass(frozen=True)
class Sampler:
    """Asks an engine for a group of samples per prompt.

    Args:
        config: Group size, length limit, temperature, seed.
        stop_token_ids: Tokens that end a response.
    """

    config: TrainConfig
    stop_token_ids: tuple[int, ...]

    def sample(
        self, engine: RolloutEngine, prompts: Sequence[Prompt], adapter: AdapterRef, step: int
    ) -> list[Sample]:
        """All samples of one rollout, group after group.

        Raises:
            RolloutError: The engine returned another number of samples, or samples that another
                adapter or version made.
        """
        rollout = self.config.rollout
        requests = [
            Request(
                prompt.ids,
                SamplingParams(
                    max_new_tokens=rollout.rollout_max_response_len,
                    temperature=rollout.rollout_temperature,
                    stop_token_ids=self.stop_token_ids,
                    seed=request_seed(self.config.seed, step, index),
                ),
                rollout.n_samples_per_prompt,
            )
            for index, prompt in enumerate(prompts)
        ]
        samples = engine.generate(requests, adapter)
        check_samples(samples, requests, adapter)
        return samples


def check_samples(
    samples: Sequence[Sample], requests: Sequence[Request], adapter: AdapterRef
) -> None:
    """Every request has its samples, in order, made by the adapter that was asked for."""
    expected = [r.prompt_ids for r in requests for _ in range(r.n)]
    if len(samples) != len(expected):
        raise RolloutError(
            f"the engine returned {len(samples)} samples", f"{len(expected)} samples"
        )
    for sample, prompt_ids in zip(samples, expected, strict=True):
        if sample.adapter != adapter:
            raise RolloutError(
                f"a sample was made by adapter {sample.adapter.name!r} version "
                f"{sample.adapter.version}",
                f"{adapter.name!r} version {adapter.version}",
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


def score_samples(
    reward: Reward,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    decode: Callable[[Sequence[int]], str],
    stop_token_ids: Sequence[int],
) -> list[Score]:
    """One score per sample; ``samples`` holds equally many consecutive samples per prompt."""
    return reward.score(make_answers(prompts, samples, decode, stop_token_ids))
