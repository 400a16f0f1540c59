"""Topologies and memory, for the shapes of the recipe and for shapes that cannot work."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from glm_lora.arch.projections import all_params, trainable_sites
from glm_lora.arch.spec import FULL, TINY
from glm_lora.config import ParallelConfig
from glm_lora.errors import ConfigError
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.linear import ProjectionGroup, fuse
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.plan import (
    check_topology,
    expert_parallel_sizes,
    layer_ranges,
    plan_memory,
    tensor_parallel_sizes,
)
from glm_lora.model.stage import build_stage
from glm_lora.targets.selection import make_selection
from tests.model.weights import everything

SLICE = FULL.first_layers(4)


def parallel(tp=1, pp=1, ep=1, **kwargs):
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("spec", "config", "world"),
    [
        (FULL, parallel(8, 1, 24), 24),
        (FULL, parallel(8, 4, 16), 64),
        (FULL, parallel(8, 4, 8), 32),
        (SLICE, parallel(2, 2, 2), 8),
        (TINY, parallel(), 1),
        (TINY, parallel(4, 1, 2), 4),
    ],
)
def test_the_recipes_shapes_are_accepted(spec, config, world):
    check_topology(spec, config, world)


@pytest.mark.parametrize(
    ("spec", "config", "world", "message"),
    [
        (FULL, parallel(tp=6), 6, r"tensor parallel 6 .* 64 KDA heads.*one of 1, 2, 4, 8, 16"),
        (FULL, parallel(ep=5), 5, r"expert parallel 5 does not divide 288.*2, 3, 4, 6, 8"),
        (FULL, parallel(8, 1, 24), 32, r"expert parallel 24 with 32 ranks per pipeline stage"),
        (FULL, parallel(8, 4), 24, "24 ranks with tensor parallel 8.*a multiple of 32 ranks"),
        (SLICE, parallel(pp=5), 5, "4 layers over 5 stages"),
        (FULL, parallel(pp=2, pipeline_layers=(40, 4)), 2, "add up to 45"),
        (FULL, parallel(tp=2, sequence_parallel=False), 2, "sequence_parallel = true"),
    ],
)
def test_shapes_that_cannot_work_are_refused_with_those_that_do(spec, config, world, message):
    with pytest.raises(ConfigError, match=message):
        check_topology(spec, config, world)


@pytest.mark.parametrize(
    ("layers", "stages", "given", "want"),
    [
        (45, 4, (), [11, 11, 11, 12]),
        (4, 1, (), [4]),
        (45, 2, (), [22, 23]),
        (5, 3, (1, 1, 3), [1, 1, 3]),
    ],
)
def test_layer_ranges(layers, stages, given, want):
    ranges = layer_ranges(layers, stages, given)
    assert [len(r) for r in ranges] == want
    assert [i for r in ranges for i in r] == list(range(layers))


def test_possible_sizes():
    assert tensor_parallel_sizes(FULL) == [1, 2, 4, 8, 16, 32, 64]
    assert expert_parallel_sizes(TINY) == [1, 2, 4, 8]


def test_one_rank_holds_the_whole_base():
    selection = make_selection("m", FULL, trainable_sites(FULL), rank=16, alpha=32)
    plan = plan_memory(FULL, selection, parallel(), 1)
    assert plan.base == sum(p.numel * (4 if p.fp32 else 2) for p in all_params(FULL).values())
    assert plan.optimizer == 8 * 65_955_840
    assert plan.adapters > 10 * 65_955_840, "masters, gradients and copies"
    assert plan.total > plan.base


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_take_what_the_plan_says(tp):
    """Masters, as many gradients, and the copies that a pass has made."""
    selection = everything(TINY)
    ctx = ParallelContext(tp_size=tp, sequence_parallel=tp > 1)
    stage = build_stage(TINY, ctx, dtype=torch.float32)
    adapters = attach_adapters(stage, selection, seed=0)
    masters = sum(p.nbytes for p in adapters.parameters().values())
    copies = 0
    for group in (m for m in stage.modules() if isinstance(m, ProjectionGroup)):
        live = [(s, s.adapter) for s in group.sites if s.adapter]
        if live:
            fused = fuse(live, group.weight.shape[0], torch.float32)
            copies += fused.a.nbytes + fused.b.nbytes
    plan = plan_memory(TINY, selection, parallel(tp), tp, bytes_per_value=4)
    assert plan.adapters == 2 * masters + copies


def test_more_ranks_need_less_memory_each_and_recomputation_less_activation():
    selection = make_selection("m", FULL, trainable_sites(FULL), rank=16, alpha=32)
    plans = [
        plan_memory(FULL, selection, parallel(8, pp, ep), world)
        for pp, ep, world in ((1, 8, 8), (1, 24, 24), (4, 16, 64))
    ]
    assert plans[0].base > plans[1].base > plans[2].base
    modes = [
        plan_memory(FULL, selection, parallel(8, 1, 8, recompute=mode), 8).activations
        for mode in ("full", "mlp", "none")
    ]
    assert modes == sorted(modes)


def test_recomputation_counts_the_attention_it_keeps_above_index_topk():
    selection = make_selection("m", FULL, trainable_sites(FULL), rank=16, alpha=32)
    short, long = (
        plan_memory(FULL, selection, parallel(8, 1, 8, max_tokens_per_gpu=n), 8).activations / n
        for n in (2048, 4096)
    )
    # 11 layers of 64 heads x 256 values of 2 bytes, cut over 8 ranks.
    assert long - short == 11 * 64 * 256 * 2 // 8


def test_planning_needs_no_torch():
    code = "import sys, glm_lora.model.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
