"""Placement is pure: every shape of the recipe, what cannot be cut, what does not fit a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_lora.cluster.placement import Host, check_fit, place
from glm_lora.errors import ConfigError
from tests.cluster.shapes import FOLDER, SHAPES, config_of, lines_of


@pytest.mark.parametrize("name", SHAPES)
def test_dry_run_prints_the_recorded_plan(name):
    assert lines_of(name) == (FOLDER / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("name", [n for n in SHAPES if "tiny" not in n])
def test_every_gpu_has_one_rank_and_at_most_one_engine(name):
    config = config_of(name)
    placement = place(config, gpus=True)
    ranks = Counter((s.part.machine, g) for s in placement.ranks for g in s.part.gpus)
    engines = Counter((p.machine, g) for s in placement.engines for p in s.parts for g in p.gpus)
    assert set(ranks.values()) == {1} and set(engines.values()) == {1}
    assert len(ranks) == config.num_nodes * config.num_gpus_per_node == len(placement.ranks)
    for machine, gpu in [*ranks, *engines]:
        assert 0 <= gpu < placement.machines[machine].gpus
    shared = bool(ranks.keys() & engines.keys())
    assert shared == config.sglang.sglang_colocated
    if not shared:
        assert len(engines) == config.sglang.rollout_num_gpus
    tp = config.parallel.tensor_model_parallel_size
    if tp <= config.num_gpus_per_node:
        for first in range(0, len(placement.ranks), tp):
            group = placement.ranks[first : first + tp]
            assert len({seat.part.machine for seat in group}) == 1, "a TP group on one machine"


def test_the_recipes_engines():
    """Two of 4 GPUs for the slice; of 8 for the model, over two machines where they hold 4."""
    for name, count, parts in (
        ("slice_1x8", 2, 1), ("slice_2x4", 2, 1), ("full_3x8", 3, 1), ("full_8x4", 4, 2),
        ("full_16x4", 8, 2), ("slice_1x4_separate", 1, 1), ("full_3x8_separate", 2, 1),
        ("full_8x4_separate", 2, 2),
    ):  # fmt: skip
        engines = place(config_of(name), gpus=True).engines
        assert len(engines) == count, name
        assert {len(seat.parts) for seat in engines} == {parts}, name


def test_without_gpus_only_processes_are_counted():
    placement = place(config_of("tiny_2_ranks"), gpus=False)
    assert placement.bundles() == [{"CPU": 3.0}]
    assert all(not seat.part.gpus for seat in placement.ranks)


@pytest.mark.parametrize(
    ("sglang", "said"),
    [
        ({"rollout_num_gpus_per_engine": 3}, "divisor or a multiple of 8"),
        ({"rollout_num_gpus_per_engine": 16}, "do not fit"),
        ({"rollout_num_gpus_per_engine": 4, "rollout_num_engines": 3}, "at most 2 engines"),
        ({"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 8}, "--rollout-num-gpus"),
    ],
)
def test_engines_that_cannot_be_cut_are_refused(sglang, said):
    config = config_of("slice_1x8")
    config = config.model_copy(update={"sglang": config.sglang.model_copy(update=sglang)})
    with pytest.raises(ConfigError) as caught:
        place(config, gpus=True)
    assert said in str(caught.value)


def test_a_cluster_that_is_too_small_is_told_what_is_there_and_what_is_missing():
    placement = place(config_of("full_3x8"), gpus=True)
    hosts = [Host("10.0.0.1", 8, 64), Host("10.0.0.2", 4, 64)]
    with pytest.raises(ConfigError) as caught:
        check_fit(placement, hosts)
    text = str(caught.value)
    assert "10.0.0.1 with 8 GPU(s) and 64 CPU(s)" in text
    assert "10.0.0.2 with 4 GPU(s)" in text
    assert "missing: 2 with 8 GPU(s) and 9 CPU(s)" in text
    check_fit(placement, [Host(str(n), 8, 9) for n in range(3)])
    with pytest.raises(ConfigError, match="3 with 8 GPU"):
        check_fit(placement, [])


def test_small_machines_may_share_a_large_host():
    check_fit(place(config_of("slice_2x4"), gpus=True), [Host("a", 8, 64)])


@given(
    nodes=st.integers(1, 6),
    per_node=st.sampled_from([1, 2, 4, 8]),
    size=st.sampled_from([1, 2, 4, 8, 16]),
    own=st.sampled_from([0, 4, 8, 12, 16]),
)
def test_any_shape_is_seated_without_overlap_or_refused(nodes, per_node, size, own):
    config = config_of("slice_1x8").model_copy(
        update={"num_nodes": nodes, "num_gpus_per_node": per_node}
    )
    changes = {"rollout_num_gpus_per_engine": size, "rollout_num_gpus": own}
    config = config.model_copy(update={"sglang": config.sglang.model_copy(update=changes)})
    try:
        placement = place(config, gpus=True)
    except ConfigError:
        return
    used = [(p.machine, g) for s in placement.engines for p in s.parts for g in p.gpus]
    assert len(used) == len(set(used)) == size * len(placement.engines)
    assert all(gpu < placement.machines[machine].gpus for machine, gpu in used)
    assert placement.gpus == nodes * per_node + own
    check_fit(placement, [Host(str(i), m.gpus, m.cpus) for i, m in enumerate(placement.machines)])


def test_placement_needs_neither_ray_nor_torch():
    script = (
        "import sys, glm_lora.cluster.placement, glm_lora.cluster.dry_run\n"
        "assert not {'ray', 'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
