"""What travels to SGLang: padding, both ways to send, exact bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.lora.serving import padded_tensors, serving_config, total_bytes
from glm_lora.rollout.sglang_payload import (
    _Base64Writer,
    request_with_bytes,
    request_with_folder,
)
from glm_lora.targets.selection import make_selection
from tests.support import close
from tests.tiny_checkpoint import random_state, tiny_selection


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_pieces_of_base64_join_to_the_base64_of_the_whole(parts):
    writer = _Base64Writer()
    for part in parts:
        assert writer.write(part) == len(part)
    assert b"".join(writer.finish()) == base64.b64encode(b"".join(parts))


@pytest.fixture(scope="module")
def mixed():
    sites = trainable_sites(TINY)
    ranks = {s.disk_name: 2 for s in sites if s.group == "dsa"}
    return random_state(make_selection("tiny", TINY, sites, rank=4, alpha=6, ranks=ranks))


def test_padding_keeps_b_times_a_and_the_scaling(mixed):
    padded = padded_tensors(mixed)
    config = serving_config(mixed.selection, "x")
    for a in mixed.selection.adapters:
        assert padded[a.a_key].shape == (4, a.site.in_features)
        assert padded[a.b_key].shape == (a.site.out_features, 4)
        served = config["lora_alpha"] / config["r"] * padded[a.b_key] @ padded[a.a_key]
        own = a.scaling * mixed.tensors[a.b_key] @ mixed.tensors[a.a_key]
        close(served, own, "zeros add nothing, fp32", atol=1e-6)
        if a.rank == 4:
            assert padded[a.a_key] is mixed.tensors[a.a_key], "no copy where none is needed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_hold_every_copy_exactly(dtype):
    state = random_state(tiny_selection(), dtype=dtype)
    config = serving_config(state.selection, "x")
    request = request_with_bytes("a", state.tensors, config, copies=3, checksums=True)
    body = json.loads(b"".join(request.chunks))
    assert request.num_bytes == len(b"".join(request.chunks))
    assert (body["lora_name"], body["config_dict"]) == ("a", config)
    assert len(body["serialized_named_tensors"]) == 3
    for copy in body["serialized_named_tensors"]:
        sent = pickle.loads(base64.b64decode(copy, validate=True))
        assert list(sent) == list(state.tensors)
        assert all(torch.equal(sent[k], t) for k, t in state.tensors.items())
    for name, digest in body["expected_checksums"].items():
        raw = state.tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(raw).hexdigest() == digest
    assert body["expected_checksums"].keys() == state.tensors.keys()
    assert request.tensor_bytes == total_bytes(state.tensors)


def test_a_folder_is_an_adapter_of_its_own(tmp_path):
    state = random_state(tiny_selection(), dtype=torch.bfloat16)
    config = serving_config(state.selection, "x")
    request = request_with_folder("a", state.tensors, config, tmp_path / "v1")
    body = json.loads(b"".join(request.chunks))
    assert body == {"lora_name": "a", "lora_path": str(tmp_path / "v1")}
    stored = load_file(tmp_path / "v1" / "adapter_model.safetensors")
    assert all(torch.equal(stored[k], t) for k, t in state.tensors.items())
    assert json.loads((tmp_path / "v1" / "adapter_config.json").read_text()) == config
    with pytest.raises(FileExistsError):
        request_with_folder("a", state.tensors, config, tmp_path / "v1")
