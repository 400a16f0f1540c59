"""Base and adapter tensors for tests; needs no transformers, so child processes start fast."""

from __future__ import annotations

import torch

from glm_lora.arch.projections import all_params, trainable_sites
from glm_lora.arch.spec import ModelSpec
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.stage import Stage
from glm_lora.targets.selection import Selection, make_selection


def random_base(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random full base tensors by canonical key."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for key, p in all_params(spec).items():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in key and key.endswith("weight"):
            out[key] = 1 + 0.1 * noise
        else:
            out[key] = noise * (0.3 if noise.dim() == 1 else p.shape[-1] ** -0.5)
    return out


def local_base(
    base: dict[str, torch.Tensor], spec: ModelSpec, ctx: ParallelContext
) -> dict[str, torch.Tensor]:
    """The shard of each full tensor that ``ctx`` holds."""
    out = {}
    for key, param in all_params(spec).items():
        value = base[key]
        if param.tp_axis is not None:
            value = value.chunk(ctx.tp_size, dim=param.tp_axis)[ctx.tp_rank]
        if param.ep_axis is not None:
            value = value.chunk(ctx.ep_size, dim=param.ep_axis)[ctx.ep_rank]
        out[key] = value
    return out


def load(stage: Stage, base: dict[str, torch.Tensor]) -> None:
    """Fill ``stage`` with its shards of full tensors."""
    local = local_base(base, stage.spec, stage.ctx)
    stage.load_many({key: local[key] for key in stage.base_parameters()})


def everything(spec: ModelSpec, rank: int = 4, alpha: float = 8.0, **kwargs) -> Selection:
    """A selection of every trainable projection."""
    return make_selection("test", spec, trainable_sites(spec), rank=rank, alpha=alpha, **kwargs)


def random_factors(selection: Selection, seed: int = 5) -> dict[str, torch.Tensor]:
    """Full adapter tensors with A and B both non-zero."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(shape, generator=generator) / shape[1] ** 0.5 * 0.3
        for key, shape in selection.tensor_shapes().items()
    }


def random_sequences(lengths: list[int], vocab: int, seed: int = 3) -> list[list[int]]:
    """Token sequences of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
