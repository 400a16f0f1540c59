"""Attach a selection's adapters to a pipeline stage."""

from __future__ import annotations

import torch

from glm_lora.lora.adapter import Adapter, Switch, initial_a
from glm_lora.lora.sharding import local_shape, local_slice, tp_axis
from glm_lora.lora.state import AdapterSet, Factor
from glm_lora.model.stage import Stage
from glm_lora.targets.selection import Selection


def attach_adapters(stage: Stage, selection: Selection, seed: int) -> AdapterSet:
    """Give every selected projection of ``stage`` an adapter; A random, B zero.

    Raises:
        TargetError: The selection was made for another model.
    """
    selection.check_made_for(stage.spec)
    ctx, sites, switch = stage.ctx, stage.linear_sites(), Switch()
    factors: dict[str, Factor] = {}
    for chosen in selection.adapters:
        site = sites.get(chosen.site.disk_name)
        if site is None:
            continue  # another pipeline stage has it
        a_shape = (chosen.rank, site.shape[1])
        b_shape = (site.shape[0], chosen.rank)
        a_axis, b_axis = tp_axis(site.kind, "A"), tp_axis(site.kind, "B")
        a_part = local_slice(a_shape, a_axis, ctx.tp_size, ctx.tp_rank)
        b_part = local_slice(b_shape, b_axis, ctx.tp_size, ctx.tp_rank)
        a = initial_a(a_shape, seed, site.disk_name)[a_part].contiguous().to(ctx.device)
        b = torch.zeros(local_shape(b_shape, b_axis, ctx.tp_size), device=ctx.device)
        adapter = Adapter(a, b, chosen.scaling, selection.dropout, switch)
        site.adapter = adapter
        factors[chosen.a_key] = Factor(adapter.a, a_shape, site.kind, "A", a_part)
        factors[chosen.b_key] = Factor(adapter.b, b_shape, site.kind, "B", b_part)
    return AdapterSet(selection, factors, switch)
