"""Merged checkpoints against the formula, against PEFT, and file by file."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Glm5NextForConditionalGeneration

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.errors import ConfigError, ExportError
from glm_lora.export.merge import FP8_MAX, merge_checkpoint, quantise
from glm_lora.export.peft import export_peft
from glm_lora.targets.selection import make_selection
from tests.support import close
from tests.tiny_checkpoint import random_state, tiny_selection

TOKENS = torch.tensor([[3, 5, 7, 11, 2, 9, 30, 4]])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


@pytest.fixture(scope="module")
def sharded(base, tmp_path_factory):
    """The base in several shards, with a tokenizer file."""
    folder = tmp_path_factory.mktemp("sharded")
    model = Glm5NextForConditionalGeneration.from_pretrained(base)
    model.save_pretrained(folder, max_shard_size="200KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def state():
    return random_state(tiny_selection())


def read_all(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def test_merged_equals_peft_on_the_base(base, sharded, state, tmp_path):
    merge_checkpoint(state, sharded, tmp_path / "merged")
    merged = Glm5NextForConditionalGeneration.from_pretrained(tmp_path / "merged")
    plain = Glm5NextForConditionalGeneration.from_pretrained(base)
    adapter = export_peft(state, tmp_path / "adapter", "x")
    expected = logits(PeftModel.from_pretrained(plain, str(adapter)))
    close(logits(merged), expected, "W + BA in one product or two, fp32", atol=1e-4)
    gap = (expected - logits(Glm5NextForConditionalGeneration.from_pretrained(base))).abs().max()
    assert gap > 0.1, "the adapter must matter"


def test_only_adapted_tensors_change_and_other_shards_are_links(sharded, tmp_path):
    sites = [s for s in trainable_sites(TINY) if s.layer == 1 and s.leaf == "o_proj"]
    state = random_state(make_selection("tiny", TINY, sites, rank=2, alpha=4))
    report = merge_checkpoint(state, sharded, tmp_path / "merged")
    assert report.merged == 1
    assert len(report.written) == 1
    assert len(report.linked) > 2
    assert report.copied == []
    before, after = read_all(sharded), read_all(tmp_path / "merged")
    assert list(before) == list(after)
    changed = [k for k in before if not torch.equal(before[k], after[k])]
    assert changed == [f"{sites[0].disk_name}.weight"]
    a = state.selection.adapters[0]
    delta = a.scaling * (state.tensors[a.b_key].double() @ state.tensors[a.a_key].double())
    expected = before[changed[0]].double() + delta
    close(after[changed[0]], expected, "fp32 rounding of one addition and a sum of two", atol=1e-6)
    for name in report.linked:
        assert os.stat(tmp_path / "merged" / name).st_ino == os.stat(sharded / name).st_ino
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (sharded / name).read_bytes()
        assert os.stat(tmp_path / "merged" / name).st_ino != os.stat(sharded / name).st_ino


def test_bf16_weights_are_rounded_once(sharded, state, tmp_path):
    source = tmp_path / "bf16"
    source.mkdir()
    for path in sharded.iterdir():
        if path.suffix == ".safetensors":
            tensors = {k: v.to(torch.bfloat16) for k, v in load_file(path).items()}
            save_file(tensors, source / path.name)
        else:
            (source / path.name).write_bytes(path.read_bytes())
    merge_checkpoint(state, source, tmp_path / "merged")
    before, after = read_all(source), read_all(tmp_path / "merged")
    for a in state.selection.adapters:
        name = f"{a.site.disk_name}.weight"
        exact = before[name].double()
        exact += a.scaling * state.tensors[a.b_key].double() @ state.tensors[a.a_key].double()
        gap = (after[name].double() - exact).abs()
        # Half a unit in the last place of bf16, plus what fp32 may lose.
        assert bool((gap <= 0.5 * 2.0**-7 * exact.abs().clamp(min=1e-30) * 1.01 + 1e-6).all())


def wide_spec():
    """Projections wider than one FP8 block and not a multiple of it."""
    return replace(TINY, hidden_size=192, linear_num_heads=10)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """Some projections of a wide model in FP8 blocks; scales in a shard of their own."""
    spec = wide_spec()
    folder = tmp_path_factory.mktemp("fp8")
    generator = torch.Generator().manual_seed(3)
    weights, scales, plain = {}, {}, {}
    for site in trainable_sites(spec):
        value = torch.randn(site.shape, generator=generator) * 0.05
        if site.group != "kda":
            key = f"{site.disk_name}.weight"
            weights[key], scales[f"{key}_scale_inv"] = quantise(value)
        else:
            plain[f"{site.disk_name}.weight"] = value.to(torch.bfloat16)
    shards = {"a.safetensors": weights, "b.safetensors": scales, "c.safetensors": plain}
    shards["d.safetensors"] = {"model.language_model.norm.weight": torch.ones(192)}
    index = {}
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    config = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["x"]}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dequantised(tensors, name):
    """The definition, element by element blocks: value times the scale of its block."""
    weight = tensors[name].float().clone()
    if tensors[name].dtype is not torch.float8_e4m3fn:
        return weight
    scale = tensors[f"{name}_scale_inv"]
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scale[i, j]
    return weight


@pytest.mark.parametrize("option", ["requantise", "bf16"])
def test_fp8_is_merged_in_fp32(fp8, tmp_path, option):
    selection = tiny_selection(wide_spec())
    state = random_state(selection, scale=0.05)
    report = merge_checkpoint(state, fp8, tmp_path / "merged", fp8=option)
    before, after = read_all(fp8), read_all(tmp_path / "merged")
    quantised = [a for a in selection.adapters if a.site.group != "kda"]
    assert report.requantised == (len(quantised) if option == "requantise" else 0)
    assert report.linked == ["d.safetensors"]
    for a in quantised:
        name = f"{a.site.disk_name}.weight"
        expected = dequantised(before, name)
        expected += a.scaling * state.tensors[a.b_key] @ state.tensors[a.a_key]
        if option == "bf16":
            assert after[name].dtype is torch.bfloat16
            assert torch.equal(after[name], expected.to(torch.bfloat16))
            assert f"{name}_scale_inv" not in after
        else:
            assert after[name].dtype is torch.float8_e4m3fn
            got = dequantised(after, name)
            # e4m3 has 3 mantissa bits: half a unit is 1/16 of the value; subnormals below 2**-6.
            limit = expected.abs() / 16 + expected.abs().max() / FP8_MAX * 2.0**-9
            assert bool(((got - expected).abs() <= limit * 1.001).all())


def test_configuration_and_index_agree_with_bf16(fp8, tmp_path):
    state = random_state(tiny_selection(wide_spec()))
    merge_checkpoint(state, fp8, tmp_path / "merged", fp8="bf16")
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    after = read_all(tmp_path / "merged")
    assert set(index["weight_map"]) == set(after)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    names = config["quantization_config"]["modules_to_not_convert"]
    assert names[0] == "x"
    assert f"{trainable_sites(wide_spec())[-1].disk_name}" in names
    for shard in set(index["weight_map"].values()):
        with safe_open(tmp_path / "merged" / shard, framework="pt") as file:
            assert set(file.keys()) == {k for k, v in index["weight_map"].items() if v == shard}


def test_quantise_keeps_the_largest_value_and_zeros():
    weight = torch.zeros(130, 200)
    weight[129, 199] = -3.7
    values, scale = quantise(weight)
    assert scale.shape == (2, 2)
    assert scale[0, 0] == 1
    back = values.float()
    back[128:, 128:] *= scale[1, 1]
    close(back, weight, "the largest value of a block is exact", rtol=1e-6)


def test_a_base_that_does_not_fit_is_refused(sharded, state, tmp_path):
    other = random_state(tiny_selection(wide_spec()))
    with pytest.raises(ExportError, match="does not fit the adapter"):
        merge_checkpoint(other, sharded, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        merge_checkpoint(state, sharded, full)
    assert np.array_equal(sorted(p.name for p in full.iterdir()), ["mine"])
