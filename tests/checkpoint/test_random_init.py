"""Random values: a function of key, seed and position only, with sane statistics."""

import itertools

import numpy as np
import pytest
import torch

from glm_lora.arch.projections import Param, all_params
from glm_lora.arch.spec import FULL, TINY
from glm_lora.checkpoint.base_build import build_base, plan_base
from glm_lora.checkpoint.random_init import RandomSource, fill_random, init_random, value_range
from glm_lora.checkpoint.torch_dist import load_base
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.stage import build_stage

PARAMS = all_params(TINY)
Q = PARAMS["model.language_model.layers.0.self_attn.q_proj.weight"]
UP = PARAMS["model.language_model.layers.3.mlp.experts.up_proj.weight"]


def whole(param: Param, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(param.shape, dtype=dtype)
    fill_random(param, seed, out)
    return out


def by_definition(param: Param, seed: int, row: int, column: int) -> np.float32:
    """One value computed alone, with unbounded integers, straight from the documented formula."""
    import hashlib

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    key = hashlib.sha256(f"{seed}\0{param.key}".encode()).digest()
    a, b = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:8], "little")
    bits = mix((column * 0x9E3779B9 % 2**32) ^ mix((row * 0x9E3779B9 % 2**32) ^ a) ^ b)
    signed = (bits - 2**32 if bits >= 2**31 else bits) >> 8
    low, high = value_range(param)
    return np.float32(signed) * np.float32((high - low) / 2**24) + np.float32((high + low) / 2)


@pytest.mark.parametrize("param", [Q, UP], ids=["matrix", "experts"])
def test_against_the_formula(param: Param) -> None:
    values = whole(param, seed=3).flatten(1)
    for row, column in [(0, 0), (1, 5), (7, 33), (values.shape[0] - 1, values.shape[1] - 1)]:
        assert values[row, column].item() == by_definition(param, 3, row, column)


def test_any_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(Q)
    monkeypatch.setattr("glm_lora.checkpoint.random_init._CPU_BLOCK", 40)
    for first, column in itertools.product((0, 3, 17), (0, 5, 32)):
        out = torch.empty(11, 29)
        fill_random(Q, 0, out, first, column)
        assert torch.equal(out, expected[first : first + 11, column : column + 29])
    out = torch.empty(3, *UP.shape[1:])
    fill_random(UP, 0, out, 2)
    monkeypatch.undo()
    assert torch.equal(out, whole(UP)[2:5])


def test_seed_and_key_matter() -> None:
    other = PARAMS["model.language_model.layers.1.self_attn.q_proj.weight"]
    assert not torch.equal(whole(Q, 0), whole(Q, 1))
    assert not torch.equal(whole(Q), whole(other))
    assert torch.equal(whole(Q, dtype=torch.bfloat16), whole(Q).bfloat16())


def test_statistics() -> None:
    # 2**21 values: the standard error of mean and standard deviation is 0.02 / 1448 = 1.4e-5.
    param = all_params(FULL)["model.language_model.layers.0.self_attn.q_proj.weight"]
    out = torch.empty(512, 4096)
    fill_random(param, 0, out, 100)
    assert abs(out.mean()) < 7e-5 and abs(out.std() - 0.02) < 7e-5
    x = out / out.std()
    n = x.numel() ** -0.5
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[1:, 1:], x[:-1, :-1])):
        assert abs((a * b).mean()) < 5 * n, "neighbours are correlated"
    assert out.unique().numel() > 0.9 * x.numel() * (1 - x.numel() / 2**25)


def test_every_parameter_has_a_range() -> None:
    constants = {p.row.path for p in all_params(FULL).values() if len(set(value_range(p))) == 1}
    drawn = {p.row.path for p in all_params(FULL).values() if len(set(value_range(p))) == 2}
    assert all("norm" in c or "hc_" in c or "_ape" in c or "_gate" in c or c.endswith("A_log")
               or "correction_bias" in c for c in constants)  # fmt: skip
    assert {"self_attn.q_proj", "mlp.gate", "hc_attn_fn", "lm_head", "self_attn.dt_bias"} <= drawn


def test_a_stage_equals_the_base_on_disk(tmp_path) -> None:
    source = RandomSource(7)
    manifest = build_base(plan_base(tmp_path / "base", TINY, source, source.describe()))
    assert {r.dtype for r in manifest.tensors} == {"float32", "bfloat16"}
    loaded, made = (build_stage(TINY, ParallelContext(), dtype=torch.float32) for _ in range(2))
    load_base(loaded, tmp_path / "base")
    init_random(made, 7)
    expected = loaded.base_parameters()
    for key, value in made.base_parameters().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 2), (1, 8)])
def test_shards_of_a_stage(tp: int, ep: int) -> None:
    full = build_stage(TINY, ParallelContext(), dtype=torch.bfloat16)
    init_random(full, 1)
    table = full.base_parameters()
    for tp_rank, ep_rank in ((0, 0), (tp - 1, ep - 1)):
        ctx = ParallelContext(
            world_size=8, tp_size=tp, tp_rank=tp_rank, ep_size=ep, ep_rank=ep_rank,
            sequence_parallel=tp > 1,
        )  # fmt: skip
        stage = build_stage(TINY, ctx, dtype=torch.bfloat16)
        init_random(stage, 1)
        for key, value in stage.base_parameters().items():
            axis = PARAMS[key].ep_axis if PARAMS[key].row.expert else PARAMS[key].tp_axis
            rank, size = (ep_rank, ep) if PARAMS[key].row.expert else (tp_rank, tp)
            expected = table[key] if axis is None else table[key].chunk(size, axis)[rank]
            assert torch.equal(value, expected), key
