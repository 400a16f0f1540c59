"""Record the replies of a real SGLang server that serves the tiny llama, for the fake one's test.

    python tests/rollout/record_sglang.py http://127.0.0.1:PORT > tests/golden/sglang_replies.json

Every reply is kept as status and JSON; long lists are cut, the startup configuration is cut to the
fields that the client reads.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm_lora.lora.serving import serving_config
from glm_lora.rollout.sglang_payload import request_with_bytes, stream_request
from tests.rollout.sglang_support import llama_selection
from tests.tiny_checkpoint import random_state

INFO = (
    "version",
    "dtype",
    "enable_lora",
    "max_lora_rank",
    "max_loaded_loras",
    "lora_target_modules",
    "tp_size",
    "enable_memory_saver",
    "enable_weights_cpu_backup",
    "enable_return_routed_experts",
    "glm_lora_plugin",
)


def call(url: str, path: str, body: bytes | dict | None) -> list:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return [status, json.loads(text) if text else None]


def info(url: str) -> list:
    status, reply = call(url, "/server_info", None)
    state = {k: reply["internal_states"][0][k] for k in INFO if k in reply["internal_states"][0]}
    return [status, {k: reply[k] for k in INFO if k in reply} | {"internal_states": [state]}]


def body_of(request) -> bytes:
    return b"".join(request.chunks)


def main(url: str) -> dict:
    state = random_state(llama_selection(), version=1)
    config = serving_config(state.selection, "llama")
    good = request_with_bytes("recorded", state.tensors, config, checksums=True)
    wide = request_with_bytes("wide", state.tensors, {**config, "r": 64})
    params = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True}
    one = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": params}
    one["input_ids"] = [5, 6, 7, 8]
    two = {**one, "input_ids": [[5, 6, 7], [5, 6, 7]], "sampling_params": [params, params]}
    two["logprob_start_len"] = -1
    replies = {"server_info": info(url)}
    replies["generate_base"] = call(url, "/generate", {**one, "lora_path": None})
    replies["generate_unknown"] = call(url, "/generate", {**one, "lora_path": "nobody"})
    replies["load"] = call(url, good.path, body_of(good))
    replies["load_again"] = call(url, good.path, body_of(good))
    replies["load_rank"] = call(url, wide.path, body_of(wide))
    replies["set_version"] = call(
        url, "/update_weight_version", {"new_version": "recorded", "abort_all_requests": False}
    )
    replies["generate_two"] = call(url, "/generate", {**two, "lora_path": ["recorded"] * 2})
    replies["unload"] = call(url, "/unload_lora_adapter", {"lora_name": "recorded"})
    replies["unload_unknown"] = call(url, "/unload_lora_adapter", {"lora_name": "nobody"})
    # A weight-update session as the streamed interface uses it. This server has sessions, but no
    # registration: it ignores the fields it does not know and the tensors of no parameter of its.
    stream = stream_request("recorded", state.tensors)
    replies["session_none"] = call(url, "/end_weight_update", {})
    replies["session_begin"] = call(url, "/begin_weight_update", {"sync_base": False})
    replies["session_again"] = call(url, "/begin_weight_update", {"sync_base": False})
    replies["session_stream"] = call(url, stream.path, body_of(stream))
    replies["session_end"] = call(url, "/end_weight_update", {"abort": True})
    return replies


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(main(sys.argv[1]), indent=1))
