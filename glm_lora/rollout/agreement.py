"""Several engines or servers that hold one adapter must say the same of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from glm_lora.errors import RolloutError
from glm_lora.protocols import LOGPROB_LIMITS, AdapterRef


def check_agreement(
    names: Sequence[str],
    answers: Sequence[Sequence[np.ndarray]],
    adapter: AdapterRef,
    dtype: str,
) -> None:
    """Compare everyone's log-probabilities with those of the first.

    Args:
        names: Who answered.
        answers: Per name, the log-probabilities of the same sequences.
        adapter: What they were asked for.
        dtype: Compute dtype, which decides the limit of the mean difference.

    Raises:
        RolloutError: One differs by more than the limit, or in the number of tokens.
    """
    limit = LOGPROB_LIMITS[dtype]
    for name, answer in zip(names[1:], answers[1:], strict=True):
        for first, other in zip(answers[0], answer, strict=True):
            same_shape = first.shape == other.shape
            if same_shape and not first.size:  # a sequence of one token
                continue
            gap = float(np.abs(first - other).mean()) if same_shape else np.inf
            if not gap <= limit:
                raise RolloutError(
                    f"{name} scores a sequence under {adapter} {gap:.4g} nats per token away from "
                    f"{names[0]}",
                    f"at most {limit:g}",
                    "Check that all serve the same checkpoint",
                )
