"""Between the loop's records and SGLang's: sampling parameters, samples, routed experts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import RolloutError
from glm_lora.protocols import AdapterRef, Finish, Request, Sample, SamplingParams
from glm_lora.rollout.sglang_client import Completion


def sampling(params: SamplingParams, index: int) -> dict[str, Any]:
    """SGLang's parameters for sample ``index`` of a request; each sample has a seed of its own."""
    return {
        "temperature": params.temperature,
        "max_new_tokens": params.max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "sampling_seed": (params.seed * 1_000_003 + index) % 2**62,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def routed_experts(encoded: str, length: int, spec: ModelSpec) -> np.ndarray:
    """The experts of each token but the last, from SGLang's base64 of int32.

    Args:
        encoded: ``[length - 1, layers, top-k]``, dense layers included.
        length: Prompt and response tokens.
        spec: The model's dimensions.

    Returns:
        ``[length - 1, MoE layers, top-k]`` int32.

    Raises:
        RolloutError: Another size than this model's.
    """
    values = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    shape = (length - 1, spec.num_hidden_layers, spec.num_experts_per_tok)
    if values.size != np.prod(shape):
        raise RolloutError(f"SGLang returned {values.size} routed experts", f"{shape}")
    moe = [i for i in range(spec.num_hidden_layers) if spec.is_moe(i)]
    return values.reshape(shape)[:, moe]


def check_version(completions: Sequence[Completion], served: str, url: str) -> None:
    """RolloutError unless every completion was made while ``served`` was the newest version."""
    for completion in completions:
        if completion.weight_version != served:
            raise RolloutError(
                f"{url} answered under version {completion.weight_version!r}", repr(served)
            )


def sample_of(
    request: Request, completion: Completion, adapter: AdapterRef, spec: ModelSpec | None
) -> Sample:
    """The loop's record of one completion."""
    routed = None
    if completion.routed_experts is not None and spec is not None:
        length = len(request.prompt_ids) + len(completion.token_ids)
        routed = routed_experts(completion.routed_experts, length, spec)
    finish = {"stop": Finish.STOP, "length": Finish.LENGTH}.get(completion.finish, Finish.ABORT)
    return Sample(
        prompt_ids=request.prompt_ids,
        response_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish=finish,
        adapter=adapter,
        routed_experts=routed,
    )
