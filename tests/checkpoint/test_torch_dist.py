"""A base loads at any layout, bit-equal, into whatever memory the model gives."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Glm5NextForConditionalGeneration

from glm_lora.arch.projections import Param, all_params
from glm_lora.arch.spec import TINY
from glm_lora.checkpoint.convert import from_memory
from glm_lora.checkpoint.prepare import PrepareResult
from glm_lora.checkpoint.torch_dist import (
    RELEASE,
    TRACKER,
    load_base,
    load_tensors,
    release_folder,
    sharded_state_dict,
)
from glm_lora.errors import CheckpointError
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.stage import build_stage

PARAMS = all_params(TINY)


@pytest.fixture(scope="module")
def full(tiny: PrepareResult) -> dict[str, Tensor]:
    """The reference: what transformers reads from the same checkpoint, under canonical keys."""
    model = Glm5NextForConditionalGeneration.from_pretrained(tiny.hf_checkpoint)
    return from_memory(model.state_dict(), PARAMS.values())


def share(param: Param, full: Tensor, tp: tuple[int, int], ep: tuple[int, int]) -> Tensor:
    """The shard by the definition of the facts table, written with torch.chunk."""
    if param.ep_axis is not None:
        return full.chunk(ep[1], param.ep_axis)[ep[0]]
    return full if param.tp_axis is None else full.chunk(tp[1], param.tp_axis)[tp[0]]


def test_the_fingerprint_is_that_of_transformers_tensors(
    tiny: PrepareResult, full: dict[str, Tensor]
) -> None:
    assert fingerprint_tensors(full) == tiny.fingerprint


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 2), (1, 8), (2, 4)])
def test_every_layout(tiny: PrepareResult, full: dict[str, Tensor], tp: int, ep: int) -> None:
    for tp_rank, ep_rank in itertools.product(range(tp), range(ep)):
        if tp_rank and ep_rank:
            continue  # a parameter is cut along one of the two only
        expected = {k: share(p, full[k], (tp_rank, tp), (ep_rank, ep)) for k, p in PARAMS.items()}
        local = {k: torch.full_like(t, torch.nan) for k, t in expected.items()}
        wanted = sharded_state_dict(
            local, PARAMS, tp_rank=tp_rank, tp_size=tp, ep_rank=ep_rank, ep_size=ep
        )
        load_tensors(tiny.ref_load / RELEASE, wanted)
        for key in local:
            assert torch.equal(local[key], expected[key]), key


def test_a_stage(tiny: PrepareResult, full: dict[str, Tensor]) -> None:
    stage = build_stage(TINY, ParallelContext(), dtype=torch.float32)
    load_base(stage, tiny.ref_load)
    held = stage.base_parameters()
    assert held.keys() == full.keys()
    for key, value in held.items():
        assert torch.equal(value, full[key]), key


def test_a_pipeline_stage_and_another_dtype(tiny: PrepareResult, full: dict[str, Tensor]) -> None:
    stage = build_stage(TINY, ParallelContext(), dtype=torch.bfloat16, layer_range=range(2, 4))
    load_base(stage, tiny.ref_load)
    held = stage.base_parameters()
    assert 0 < len(held) < len(full)
    for key, value in held.items():
        assert value.dtype is (torch.float32 if PARAMS[key].fp32 else torch.bfloat16), key
        assert torch.equal(value, full[key].to(value.dtype)), key


def test_replicas() -> None:
    keys = {
        "model.language_model.layers.0.self_attn.q_proj.weight": (0, 3),
        "model.language_model.layers.0.self_attn.f_a_proj.weight": (1, 3),
        "model.language_model.layers.3.mlp.experts.up_proj.weight": (1, 3),
    }
    local = {k: share(PARAMS[k], torch.zeros(PARAMS[k].shape), (1, 2), (0, 2)) for k in keys}
    described = sharded_state_dict(
        local, PARAMS, tp_rank=1, tp_size=2, ep_rank=0, ep_size=2, dp_rank=3
    )
    assert {k: d.replica_id for k, d in described.items()} == keys


def test_a_wrong_local_shape_is_our_own_bug() -> None:
    key = "lm_head.weight"
    with pytest.raises(AssertionError, match="lm_head"):
        sharded_state_dict({key: torch.zeros(3, 3)}, PARAMS)


def test_a_missing_key_and_a_wrong_shape(tiny: PrepareResult) -> None:
    from glm_lora.checkpoint.torch_dist import sharded_tensor

    release = tiny.ref_load / RELEASE
    with pytest.raises(CheckpointError, match=r"does not hold nothing\.weight"):
        load_tensors(release, {"a": sharded_tensor("nothing.weight", torch.zeros(2), None, 0, 1)})
    with pytest.raises(CheckpointError, match="shape mismatch"):
        wrong = sharded_tensor("lm_head.weight", torch.zeros(2, 2), None, 0, 1)
        load_tensors(release, {"a": wrong})


def test_trackers(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("12")
    with pytest.raises(CheckpointError, match=r"says '12'; expected 'release'.*ref-load.*--force"):
        release_folder(tmp_path)
    (tmp_path / TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        release_folder(tmp_path)
