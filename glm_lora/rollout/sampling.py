"""Drawing tokens: one uniform number per token, inverted through the cumulative distribution.

The numbers of a request depend on its seed alone, so a request gives the same samples in any batch
(up to the last bit of the logits, which decides only when a number falls within rounding of a
boundary). Shape legend: B rows, N samples of a request, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from glm_lora.rollout.peft_policy import PeftPolicy

_LOGITS_AT_ONCE = 2**26
"""Elements of the largest logits tensor that scoring builds (256 MiB in fp32)."""


def uniforms(engine_seed: int, request_seed: int, count: int, length: int) -> np.ndarray:
    """The numbers in [0, 1) that ``count`` samples of up to ``length`` tokens use: ``[N, T]`` fp64.

    Sample i uses row i, token t column t; asking for more samples keeps the first ones.
    """
    # Philox takes 128 bits of key: half for the engine's seed, half for the request's.
    key = (engine_seed % 2**64) << 64 | request_seed % 2**64
    return np.random.Generator(np.random.Philox(key=key)).random((count, length))


def draw(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row from ``softmax(logits / temperature)``.

    Args:
        logits_BV: fp32 logits.
        temperature_B: Positive temperatures.
        uniform_B: fp64 numbers in [0, 1).

    Returns:
        Token ids ``[B]`` (int64) and their log-probabilities ``[B]`` (fp32) over the whole
        vocabulary at the given temperature.
    """
    logprobs_BV = torch.log_softmax(logits_BV / temperature_B.unsqueeze(-1), dim=-1)
    cumulative_BV = logprobs_BV.double().exp_().cumsum_(dim=-1)
    # Scaling by the total makes rounding of the sum harmless: the last token is always reachable.
    threshold_B1 = uniform_B.unsqueeze(-1) * cumulative_BV[:, -1:]
    # right=True never picks a token of probability zero, whose boundary equals the one before.
    token_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
    token_B1 = token_B1.clamp_(max=logits_BV.shape[-1] - 1)
    return token_B1.squeeze(-1), logprobs_BV.gather(-1, token_B1).squeeze(-1)


def left_padded(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids ``[B, S]`` padded with 0 on the left, and their mask (None without padding)."""
    width = max(map(len, sequences))
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    mask = np.zeros((len(sequences), width), dtype=bool)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = sequence
        mask[row, width - len(sequence) :] = True
    mask_BS = None if mask.all() else torch.from_numpy(mask).to(device)
    return torch.from_numpy(ids).to(device), mask_BS


def token_logprobs(policy: PeftPolicy, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Log-probabilities of tokens 1.. of each sequence at temperature 1, fp32."""
    ids_BS, mask_BS = left_padded(sequences, policy.device)
    hidden_BSH = policy.hidden(ids_BS, mask_BS)
    parts: list[torch.Tensor] = []
    vocab = policy.spec.vocab_size
    step = max(1, _LOGITS_AT_ONCE // (vocab * len(sequences)))
    for start in range(0, ids_BS.shape[1] - 1, step):
        stop = min(start + step, ids_BS.shape[1] - 1)
        logprobs = torch.log_softmax(policy.logits(hidden_BSH[:, start:stop]), dim=-1)
        target = ids_BS[:, start + 1 : stop + 1].unsqueeze(-1)
        parts.append(logprobs.gather(-1, target).squeeze(-1))
    if not parts:
        return [np.zeros(0, dtype=np.float32) for _ in sequences]
    scored_BS = torch.cat(parts, dim=1).cpu().numpy()
    return [scored_BS[row, scored_BS.shape[1] + 1 - len(s) :] for row, s in enumerate(sequences)]
