"""Lets an SGLang server run on a machine without a GPU; on PYTHONPATH of that server only.

Pinned host memory and device synchronisation need a CUDA driver, so they become plain memory and
nothing.
"""

import os

if os.environ.get("GLM_LORA_SGLANG_CPU") == "1":
    import torch

    def _unpinned(create):
        def call(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return create(*args, **kwargs)

        return call

    for _name in (
        "tensor",
        "empty",
        "zeros",
        "ones",
        "full",
        "arange",
        "empty_like",
        "zeros_like",
    ):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda *args, **kwargs: None
