"""SGLang's protocol in front of a real model: transformers and PEFT compute what it answers.

SGLang itself serves glm5_next on a GPU only. With this server the whole job with ``--rollout-engine
sglang`` runs on a CPU: its log-probabilities are those of the adapter that was really received.
"""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.protocols import BASE, AdapterRef, AdapterState, Request, SamplingParams
from glm_lora.rollout.embedded import EmbeddedEngine
from glm_lora.targets.selection import make_selection
from tests.rollout.fake_sglang import FakeSglang


class ModelSglang(FakeSglang):
    """Serves the checkpoint in ``folder`` with adapters of one rank on every trainable site."""

    def __init__(self, folder: Path, rank: int, alpha: float) -> None:
        super().__init__(TINY, rank)
        self.flags = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        self.selection = make_selection("tiny", TINY, trainable_sites(TINY), rank=rank, alpha=alpha)
        self.engine = EmbeddedEngine(folder, self.selection, dtype=torch.float32)
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.current: AdapterRef = BASE
        self.served: dict[str | None, int] = {}
        """Completions with tokens to sample, by adapter name."""

    def _receive(self, name: str, payload: str, config: dict) -> list[str]:
        problems = super()._receive(name, payload, config)
        if not problems:
            self.tensors[name] = pickle.loads(base64.b64decode(payload))
        return problems

    def _adapter(self, name: str | None) -> AdapterRef:
        if name is None:
            return BASE
        if self.current.name != name:
            tensors = self.tensors[name]
            state = AdapterState(self.selection, tensors, 0, fingerprint_tensors(tensors))
            self.engine.push(state, name)
            self.current = state.ref(name)
        return self.current

    def _answer(
        self, prompt: list[int], params: dict, name: str | None, wants_prompt: bool
    ) -> dict:
        assert not self.released, "a request came while the memory was released"
        with self.lock:
            adapter = self._adapter(name)
            tokens, finish = list(prompt), {"type": "length", "length": params["max_new_tokens"]}
            sampled: list[list[Any]] = []
            if params["max_new_tokens"]:
                self.served[name] = self.served.get(name, 0) + 1
                stops = tuple(params.get("stop_token_ids") or ())
                sampling = SamplingParams(
                    params["max_new_tokens"],
                    params["temperature"],
                    stops,
                    params.get("sampling_seed", 0),
                )
                (sample,) = self.engine.generate([Request(tuple(prompt), sampling)], adapter)
                ids = sample.response_ids
                sampled = [[v, t, None] for v, t in zip(sample.logprobs, ids, strict=True)]
                tokens += ids
                if sample.finish == "stop":
                    finish = {"type": "stop", "matched": ids[-1]}
            scores: list[list[Any]] = []
            if wants_prompt:
                (values,) = self.engine.score([prompt], adapter)
                scores = [[None, prompt[0], None]]
                scores += [[v, t, None] for v, t in zip(_floats(values), prompt[1:], strict=True)]
        return {
            "output_ids": tokens[len(prompt) :],
            "meta_info": {
                "id": "0" * 32,
                "finish_reason": finish,
                "prompt_tokens": len(prompt),
                "weight_version": self.version,
                "num_retractions": 0,
                "input_token_logprobs": scores,
                "output_token_logprobs": sampled,
                "completion_tokens": len(sampled),
            },
        }


def _floats(values: np.ndarray) -> list[float]:
    return [float(v) for v in values]
