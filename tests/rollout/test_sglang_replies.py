"""The fake server's replies have the shape of those recorded from a real SGLang 0.5.23."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import pytest

from glm_lora.arch.spec import TINY
from glm_lora.lora.serving import serving_config
from glm_lora.rollout.sglang_adapters import BEGIN_ROUTE, END_ROUTE
from glm_lora.rollout.sglang_payload import STREAM_ROUTE
from tests.rollout.fake_sglang import FakeSglang
from tests.tiny_checkpoint import random_state, tiny_selection

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "sglang_replies.json"
REAL = json.loads(GOLDEN.read_text())


def shape(value, path="reply"):
    """Names and types of everything in ``value``; lists by their first two kinds of entries."""
    if isinstance(value, dict):
        return {k: shape(v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [shape(v) for v in value[:2]]
    return type(value).__name__


def assert_alike(fake, real, path="reply"):
    """Every field of the fake exists in the real reply, with the same type (None fits all)."""
    if isinstance(fake, dict):
        assert isinstance(real, dict), path
        for key, value in fake.items():
            assert key in real, f"{path}.{key} is not in SGLang's reply"
            assert_alike(value, real[key], f"{path}.{key}")
    elif isinstance(fake, list):
        assert isinstance(real, list), path
        for i, (a, b) in enumerate(zip(fake, real, strict=False)):
            assert_alike(a, b, f"{path}[{i}]")
    elif fake != real and real != "NoneType":
        assert fake == real, f"{path}: {fake} instead of {real}"


@pytest.fixture(scope="module")
def replies():
    fake = FakeSglang(TINY, api="both")
    state = random_state(tiny_selection())
    payload = base64.b64encode(pickle.dumps(dict(state.tensors))).decode()
    pairs = base64.b64encode(
        pickle.dumps([(f"recorded:{k}", t) for k, t in state.tensors.items()])
    ).decode()
    load = {
        "lora_name": "recorded",
        "config_dict": serving_config(state.selection, "x"),
        "serialized_named_tensors": [payload],
    }
    wide = {**load, "lora_name": "wide", "config_dict": {**load["config_dict"], "r": 64}}
    params = {"temperature": 1.0, "max_new_tokens": 3, "stop_token_ids": [7]}
    one = {"logprob_start_len": 0, "sampling_params": params, "input_ids": [5, 6, 7, 8]}
    two = {"logprob_start_len": -1, "sampling_params": [params] * 2, "input_ids": [[5, 6, 7]] * 2}
    calls = {
        "server_info": ("/server_info", {}),
        "generate_base": ("/generate", {**one, "lora_path": None}),
        "generate_unknown": ("/generate", {**one, "lora_path": "nobody"}),
        "load": ("/load_lora_adapter_from_tensors", load),
        "load_again": ("/load_lora_adapter_from_tensors", load),
        "load_rank": ("/load_lora_adapter_from_tensors", wide),
        "set_version": ("/update_weight_version", {"new_version": "recorded"}),
        "generate_two": ("/generate", {**two, "lora_path": ["recorded"] * 2}),
        "unload": ("/unload_lora_adapter", {"lora_name": "recorded"}),
        "unload_unknown": ("/unload_lora_adapter", {"lora_name": "nobody"}),
        "session_none": (END_ROUTE, {}),
        "session_begin": (BEGIN_ROUTE, {"sync_base": False}),
        "session_again": (BEGIN_ROUTE, {"sync_base": False}),
        "session_stream": (STREAM_ROUTE, {"serialized_named_tensors": [pairs]}),
        "session_end": (END_ROUTE, {"abort": True}),
    }
    return {name: fake.respond("POST", *call) for name, call in calls.items()}


@pytest.mark.parametrize("name", sorted(REAL))
def test_status_and_shape_are_the_real_ones(replies, name):
    status, reply = replies[name]
    assert status == REAL[name][0]
    fake, real = shape(reply), shape(REAL[name][1])
    for reply_shape in (fake, real):
        reply_shape_info = reply_shape.get("internal_states") if name == "server_info" else None
        for state in reply_shape_info or ():
            # The recording's model is a llama: the plugin accounts for glm5_next only.
            state["glm_lora_plugin"].pop("adapters")
        if isinstance(reply_shape, dict):
            reply_shape.pop("loaded_adapters", None)
    assert_alike(fake, real, name)


def test_recorded_refusals_say_success_false():
    for name in ("load_again", "load_rank", "unload_unknown"):
        assert REAL[name][1]["success"] is False
        assert REAL[name][1]["error_message"]
    for name in ("session_none", "session_again"):
        assert REAL[name][1]["success"] is False
        assert REAL[name][1]["message"]
    assert REAL["load"][1]["success"] is True
