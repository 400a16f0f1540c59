"""The reference for adapters: plain transformers with alpha/r B A written into the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from glm_lora.protocols import AdapterState


class MergedModel:
    """A checkpoint of any architecture in fp32; ``state`` None is the base."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        config = AutoConfig.from_pretrained(checkpoint)
        several = hasattr(config, "vision_config")
        loader = AutoModelForImageTextToText if several else AutoModelForCausalLM
        self.model = loader.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.base = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def logprobs(
        self, tokens: Sequence[int], state: AdapterState | None = None, temperature: float = 1.0
    ) -> np.ndarray:
        """Log-probability of tokens 1.. of ``tokens``."""
        weights = dict(self.model.named_parameters())
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(self.base[name])
            for a in state.selection.adapters if state else ():
                delta = state.tensors[a.b_key].float() @ state.tensors[a.a_key].float()
                weights[f"{a.site.name}.weight"] += a.scaling * delta
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
