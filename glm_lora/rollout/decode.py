"""Cached decoding of a batch of requests on the embedded engine's model.

Each distinct prompt is prefilled once, its cache is copied to all its samples, and finished rows
leave the batch. Shape legend: B rows still running, N samples in all, P distinct prompts, S
prompt tokens (padded on the left), T response tokens, V vocabulary, L MoE layers, R experts kept
per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from glm_lora.errors import RolloutError
from glm_lora.protocols import AdapterRef, Finish, Request, Sample
from glm_lora.rollout.peft_policy import PeftPolicy
from glm_lora.rollout.sampling import draw, left_padded, uniforms

_SHRINK_BELOW = 0.75
"""Finished rows are dropped from the cache when fewer than this share are still running."""


@dataclass
class _Rows:
    """Per-sample constants and results, all ``[N]`` or ``[N, T]``."""

    request_N: np.ndarray
    prompt_N: np.ndarray
    """Row of each sample's prompt in the prefill."""
    temperature_N: torch.Tensor
    limit_N: torch.Tensor
    stops_NK: torch.Tensor
    """Stop ids, padded with -1."""
    uniform_NT: torch.Tensor
    token_NT: torch.Tensor
    logprob_NT: torch.Tensor
    length_N: torch.Tensor
    stopped_N: torch.Tensor


class Decoder:
    """Samples batches of requests with one policy.

    Args:
        policy: The model, its adapter already switched as wanted.
        seed: Mixed into every request's own seed.
        routing: Whether to record the experts of each token.
    """

    def __init__(self, policy: PeftPolicy, seed: int, routing: bool) -> None:
        self._policy = policy
        self._seed = seed
        self._routing = routing

    def run(self, requests: Sequence[Request], adapter: AdapterRef) -> list[list[Sample]]:
        """All samples of each request; RolloutError when the logits are not finite."""
        prompts = list(dict.fromkeys(r.prompt_ids for r in requests))
        rows = self._rows(requests, {ids: i for i, ids in enumerate(prompts)})
        trace = _RoutingTrace(self._policy.num_moe_layers) if self._routing else None
        with self._policy.recorded_routing(trace.calls if trace else None):
            self._decode(prompts, rows, trace)
        return _collect(requests, rows, trace, prompts, adapter)

    def _rows(self, requests: Sequence[Request], prompt_row: dict[tuple[int, ...], int]) -> _Rows:
        counts = [r.n for r in requests]
        request_N = np.repeat(np.arange(len(requests)), counts)
        longest = max(r.sampling.max_new_tokens for r in requests)
        widest = max(1, *(len(r.sampling.stop_token_ids) for r in requests))
        stops = np.full((len(requests), widest), -1, dtype=np.int64)
        uniform = np.zeros((len(request_N), longest))
        first = 0
        for i, request in enumerate(requests):
            params = request.sampling
            stops[i, : len(params.stop_token_ids)] = params.stop_token_ids
            block = uniforms(self._seed, params.seed, request.n, params.max_new_tokens)
            uniform[first : first + request.n, : params.max_new_tokens] = block
            first += request.n
        temperature = np.array([r.sampling.temperature for r in requests], dtype=np.float32)
        limit = np.array([r.sampling.max_new_tokens for r in requests])
        prompt_N = np.array([prompt_row[r.prompt_ids] for r in requests])[request_N]
        device, shape = self._policy.device, (len(request_N), longest)
        return _Rows(
            request_N=request_N,
            prompt_N=prompt_N,
            temperature_N=torch.from_numpy(temperature[request_N]).to(device),
            limit_N=torch.from_numpy(limit[request_N]).to(device),
            stops_NK=torch.from_numpy(stops[request_N]).to(device),
            uniform_NT=torch.from_numpy(uniform).to(device),
            token_NT=torch.zeros(shape, dtype=torch.int64, device=device),
            logprob_NT=torch.zeros(shape, dtype=torch.float32, device=device),
            length_N=torch.zeros(shape[0], dtype=torch.int64, device=device),
            stopped_N=torch.zeros(shape[0], dtype=torch.bool, device=device),
        )

    def _decode(
        self, prompts: Sequence[tuple[int, ...]], rows: _Rows, trace: _RoutingTrace | None
    ) -> None:
        policy, device = self._policy, self._policy.device
        ids_PS, mask_PS = left_padded(prompts, device)
        cache = policy.new_cache()
        logits_PV = policy.logits(policy.hidden(ids_PS, mask_PS, cache)[:, -1])
        if trace:
            trace.prefilled(ids_PS.shape)
        expand_N = torch.from_numpy(rows.prompt_N).to(device)
        policy.select_rows(cache, expand_N)
        logits_BV = logits_PV.index_select(0, expand_N)
        # ``row_B`` names the sample in each row of the cache; rows that finished keep decoding
        # (unread) until the batch is shrunk.
        row_B = torch.arange(len(rows.request_N), device=device)
        for t in range(rows.token_NT.shape[1]):
            token_B, running_B = self._sample(rows, row_B, t, logits_BV)
            running = int(running_B.sum())
            if running == 0:
                return
            if running < _SHRINK_BELOW * len(row_B):
                keep_B = running_B.nonzero().squeeze(-1)
                policy.select_rows(cache, keep_B)
                row_B, token_B = row_B[keep_B], token_B[keep_B]
            logits_BV = policy.logits(policy.hidden(token_B.unsqueeze(-1), None, cache)[:, -1])
            if trace:
                trace.decoded(row_B)

    def _sample(
        self, rows: _Rows, row_B: torch.Tensor, t: int, logits_BV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw token ``t`` of the rows and note it; returns it and which rows go on."""
        if not torch.isfinite(logits_BV).all():
            raise RolloutError(
                f"the engine's logits are not finite at response token {t}",
                "finite numbers",
                "Look at the adapter's last update (train/grad_norm) and at the checkpoint",
            )
        alive_B = ~rows.stopped_N[row_B] & (rows.limit_N[row_B] > t)
        token_B, logprob_B = draw(logits_BV, rows.temperature_N[row_B], rows.uniform_NT[row_B, t])
        live_B = row_B[alive_B]
        rows.token_NT[live_B, t] = token_B[alive_B]
        rows.logprob_NT[live_B, t] = logprob_B[alive_B]
        rows.length_N[live_B] = t + 1
        stop_B = (token_B.unsqueeze(-1) == rows.stops_NK[row_B]).any(-1) & alive_B
        rows.stopped_N[row_B] |= stop_B
        return token_B, alive_B & ~stop_B & (rows.limit_N[row_B] > t + 1)


class _RoutingTrace:
    """The experts of every MoE call of one decoding, by step."""

    def __init__(self, layers: int) -> None:
        self.calls: list[torch.Tensor] = []
        self._layers = layers
        self._prompt_PSLR = np.zeros((0, 0, 0, 0), dtype=np.int16)
        self._steps: list[tuple[dict[int, int], np.ndarray]] = []

    def _take(self) -> np.ndarray:
        """The calls since the last take: ``[tokens, L, R]``."""
        stacked = torch.stack(self.calls, dim=1).to(torch.int16).cpu().numpy()
        assert stacked.shape[1] == self._layers, "one router call per MoE layer"
        self.calls.clear()
        return stacked

    def prefilled(self, shape: torch.Size) -> None:
        """Note the prompts' pass over ``[P, S]`` tokens."""
        self._prompt_PSLR = self._take().reshape(*shape, self._layers, -1)

    def decoded(self, row_B: torch.Tensor) -> None:
        """Note one decoding step of the samples ``row_B``."""
        where = {row: i for i, row in enumerate(row_B.tolist())}
        self._steps.append((where, self._take()))

    def of(self, row: int, prompt_row: int, prompt_length: int, response_length: int) -> np.ndarray:
        """Experts of every token one sample fed to the model: ``[prompt + response - 1, L, R]``."""
        prompt_SLR = self._prompt_PSLR[prompt_row, -prompt_length:]
        steps = [chosen[where[row]] for where, chosen in self._steps[: response_length - 1]]
        return np.concatenate([prompt_SLR, np.stack(steps)]) if steps else prompt_SLR.copy()


def _collect(
    requests: Sequence[Request],
    rows: _Rows,
    trace: _RoutingTrace | None,
    prompts: Sequence[tuple[int, ...]],
    adapter: AdapterRef,
) -> list[list[Sample]]:
    tokens, logprobs = rows.token_NT.tolist(), rows.logprob_NT.tolist()
    lengths, stopped = rows.length_N.tolist(), rows.stopped_N.tolist()
    result: list[list[Sample]] = [[] for _ in requests]
    for row, (request, prompt) in enumerate(
        zip(rows.request_N.tolist(), rows.prompt_N.tolist(), strict=True)
    ):
        length, prompt_ids = lengths[row], prompts[prompt]
        sample = Sample(
            prompt_ids=prompt_ids,
            response_ids=tuple(tokens[row][:length]),
            logprobs=tuple(logprobs[row][:length]),
            finish=Finish.STOP if stopped[row] else Finish.LENGTH,
            adapter=adapter,
            routed_experts=trace.of(row, prompt, len(prompt_ids), length) if trace else None,
        )
        result[request].append(sample)
    return result
