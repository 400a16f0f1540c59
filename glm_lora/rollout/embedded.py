"""The embedded rollout engine: samples with transformers + PEFT in this process.

It implements ``protocols.RolloutEngine``. One adapter is held at a time; every sample carries the
name and version that really were loaded, and asking for any other is an error. Shape legend: B
rows (samples being decoded), P distinct prompts, S prompt tokens, T response tokens, V vocabulary,
L MoE layers, R experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

from glm_lora.arch.projections import trainable_sites
from glm_lora.errors import RolloutError, SyncError
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.lora.serving import total_bytes
from glm_lora.protocols import (
    BASE,
    AdapterRef,
    AdapterState,
    Capabilities,
    Receipt,
    Request,
    Sample,
)
from glm_lora.rollout.decode import Decoder
from glm_lora.rollout.peft_policy import PeftPolicy
from glm_lora.rollout.sampling import token_logprobs
from glm_lora.targets.selection import Selection

MAX_ROWS = 256
"""Samples decoded at once."""
MAX_PADDED_TOKENS = 65536
"""Rows times longest sequence of one forward pass or one decoding batch, at most."""


class EmbeddedEngine:
    """Samples and scores with transformers' glm5_next and a stock PEFT adapter.

    Args:
        hf_checkpoint: Folder with ``config.json`` and safetensors.
        selection: The projections the adapters will cover.
        dtype: ``torch.float32`` or ``torch.bfloat16``; logits are always fp32.
        device: Where the model computes.
        seed: Mixed into every request's own seed.
        return_routed_experts: Whether samples carry the experts of each token.

    Raises:
        CheckpointError: The checkpoint cannot be loaded or lacks weights.
        TargetError: The selection was made for another model.
    """

    def __init__(
        self,
        hf_checkpoint: Path,
        selection: Selection,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        return_routed_experts: bool = False,
    ) -> None:
        self._policy = PeftPolicy(hf_checkpoint, selection, dtype=dtype, device=device)
        self._decoder = Decoder(self._policy, seed, return_routed_experts)
        self._loaded: AdapterRef | None = None
        self._closed = self._released = False

    def push(self, state: AdapterState, name: str = "policy") -> Receipt:
        """Replace the adapter by ``state``, served as ``state.ref(name)`` from now on.

        The receipt is computed from the tensors as they lie in the PEFT model afterwards.

        Raises:
            SyncError: Another selection, or a tensor that is missing, unknown or of a wrong shape;
                the adapter that was loaded stays loaded.
        """
        start = time.perf_counter()
        if state.selection.hash != self._policy.selection.hash:
            raise SyncError(
                f"the adapter was trained for {state.selection.num_sites} projections at rank "
                f"{state.selection.rank}",
                f"the engine's own selection ({self._policy.selection.num_sites} at rank "
                f"{self._policy.selection.rank})",
                "Start the engine with the run's selection.json",
            )
        self._policy.load_adapter(state.tensors)
        held = self._policy.adapter_tensors()
        self._loaded = state.ref(name)
        return Receipt(
            ref=self._loaded,
            digest=fingerprint_tensors(held),
            num_tensors=len(held),
            bytes=total_bytes(held),
            seconds=time.perf_counter() - start,
        )

    def generate(self, requests: Sequence[Request], adapter: AdapterRef) -> list[Sample]:
        """Sample every request with ``adapter`` (``BASE``: the model without one).

        Returns:
            ``sum(r.n)`` samples in request order.

        Raises:
            RolloutError: Another adapter than the loaded one was asked for, a request is empty or
                out of range, or the model produced logits that are not finite.
        """
        for request in requests:
            self._check_request(request)
        active = self._check_adapter(adapter)
        samples: dict[int, list[Sample]] = {}
        with torch.inference_mode(), self._policy.adapter(active):
            for chunk in _chunks(requests):
                made = self._decoder.run([requests[i] for i in chunk], adapter)
                samples.update(zip(chunk, made, strict=True))
        return [sample for i in range(len(requests)) for sample in samples[i]]

    def score(self, sequences: Sequence[Sequence[int]], adapter: AdapterRef) -> list[np.ndarray]:
        """Log-probability (temperature 1) of tokens 1.. of each sequence given those before.

        Returns:
            One fp32 array ``[len(sequence) - 1]`` per sequence.

        Raises:
            RolloutError: Another adapter than the loaded one was asked for, or a sequence is empty.
        """
        if any(len(s) == 0 for s in sequences):
            raise RolloutError("an empty sequence cannot be scored", "at least one token each")
        active = self._check_adapter(adapter)
        result: dict[int, np.ndarray] = {}
        with torch.inference_mode(), self._policy.adapter(active):
            for chunk in _packed([(len(s), 1) for s in sequences]):
                scored = token_logprobs(self._policy, [sequences[i] for i in chunk])
                result.update(zip(chunk, scored, strict=True))
        return [result[i] for i in range(len(sequences))]

    def capabilities(self) -> Capabilities:
        """What the model that was loaded can do."""
        spec = self._policy.spec
        return Capabilities(
            engine="embedded",
            version=f"transformers {transformers.__version__}, peft {peft.__version__}",
            max_rank=self._policy.selection.rank,
            target_leaves=frozenset(site.leaf for site in trainable_sites(spec)),
            dtype=str(self._policy.dtype).removeprefix("torch."),
            routed_experts=self._policy.num_moe_layers > 0,
            api="peft",
        )

    def release(self) -> None:
        """Move the weights off the device; no request is served until ``resume``."""
        self._released = True
        self._policy.release()

    def resume(self) -> None:
        """Move the weights back to the device."""
        self._policy.resume()
        self._released = False

    def close(self) -> None:
        """Refuse further requests; the weights go with the object."""
        self._closed = True

    def _check_adapter(self, adapter: AdapterRef) -> bool:
        """Whether ``adapter`` needs the adapter on; RolloutError if it is not the one held."""
        if self._closed:
            raise RolloutError("the embedded engine was closed")
        if self._released:
            raise RolloutError("the embedded engine is released", next_step="Call resume first")
        if adapter == BASE:
            return False
        if adapter != self._loaded:
            held = self._loaded or "no adapter"
            raise RolloutError(
                f"{adapter} was asked for but the engine holds {held}",
                "the adapter pushed last",
                "Push the adapter before sampling with it",
            )
        return True

    def _check_request(self, request: Request) -> None:
        params, vocab = request.sampling, self._policy.spec.vocab_size
        wrong = ""
        if not request.prompt_ids:
            wrong = "the prompt is empty"
        elif not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab:
            wrong = f"the prompt has a token outside 0..{vocab - 1}"
        elif request.n < 1 or params.max_new_tokens < 1:
            wrong = (
                f"n is {request.n} and max_new_tokens {params.max_new_tokens}; both must be >= 1"
            )
        elif not params.temperature > 0:
            wrong = f"temperature is {params.temperature}; it must be positive"
        if wrong:
            raise RolloutError(f"a request cannot be sampled: {wrong}")


def _chunks(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Indices of the requests that are decoded together."""
    return _packed([(len(r.prompt_ids) + r.sampling.max_new_tokens, r.n) for r in requests])


def _packed(sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Split items of (length, rows) into batches within both limits, similar lengths together."""
    batch: list[int] = []
    rows = 0
    for index in sorted(range(len(sizes)), key=lambda i: sizes[i][0]):
        length, count = sizes[index]
        total = rows + count
        # Sorted by length, so the newest item is the longest of its batch.
        if batch and (total > MAX_ROWS or total * length > MAX_PADDED_TOKENS):
            yield batch
            batch, total = [], count
        batch.append(index)
        rows = total
    if batch:
        yield batch
