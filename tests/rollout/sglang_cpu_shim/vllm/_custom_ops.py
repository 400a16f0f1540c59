"""The one operator that SGLang takes from vllm on CPU: rotary embedding, in place."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Rotate the first dimensions of every head of ``query`` and ``key`` (Su et al. 2021)."""
    cos, sin = cos_sin_cache.float()[positions.flatten()].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = 2 * cos.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        part = heads[..., :width].float()
        if is_neox:
            x, y = part.chunk(2, dim=-1)
        else:
            x, y = part[..., 0::2], part[..., 1::2]
        turned = (x * cos - y * sin, y * cos + x * sin)
        joined = torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
        heads[..., :width] = joined.to(heads.dtype)
