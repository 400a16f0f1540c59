"""A server that speaks SGLang's protocol without a model; faults can be switched on.

Its log-probabilities are a fixed function of the tokens and of the adapter's digest, which a test
computes for itself as "the trainer". ``test_sglang_replies.py`` compares the shape of its replies
with those recorded from a real server; of the streamed interface (``fake_stream.py``) only the
sessions could be recorded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from glm_lora.fingerprint import TensorRecord, fingerprint, record_of
from glm_lora.rollout.sglang_client import UNLOAD_ROUTE, VERSION_ROUTE
from glm_lora.rollout.sglang_payload import TENSORS_ROUTE
from glm_lora.rollout.sglang_plugin.hooks import find_problems
from glm_lora.rollout.sglang_plugin.widths import (
    MODULES,
    TARGETS,
    adapter_shapes,
    fused_parts,
    module_names,
)
from tests.rollout.fake_stream import FakeStream

VOCAB = 50


def fake_logprobs(tokens, key: str) -> np.ndarray:
    """Log-probability of tokens 1.. under ``key`` (an adapter's digest, or ``base``)."""
    values = []
    for i in range(1, len(tokens)):
        text = f"{key}:{','.join(map(str, tokens[: i + 1]))}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        values.append(-5.0 * number / 2**32 - 0.1)
    return np.asarray(values, dtype=np.float32)


class FakeSglang:
    """One server's state; ``faults`` are names that the handlers look for.

    ``api`` is ``whole`` (released SGLang with the plugin), ``streamed`` (without it), ``both`` or
    ``none``.
    """

    def __init__(
        self,
        spec,
        rank: int = 8,
        tp: int = 1,
        *,
        api: str = "whole",
        staged: bool = True,
        max_loaded: int | None = None,
        base: str = "base",
    ) -> None:
        self.spec, self.rank, self.tp, self.api, self.base = spec, rank, tp, api, base
        self.stream = FakeStream(self, staged=staged, max_loaded=max_loaded)
        self.base_touched = False
        self.key = ""
        """Its API key; requests without it are refused as the real server does."""
        self.refused: list[str] = []
        self.faults: set[str] = set()
        self.adapters: dict[str, tuple[str, int]] = {}
        self.version = "default"
        self.requests: list[tuple[str, Any]] = []
        self.dead = False
        self.loaded_ever: list[str] = []
        self.most_loaded = 0
        self.using: dict[str, int] = {}
        self.released = False
        self.flags: dict[str, Any] = {}
        self.lock = threading.Lock()

    def server_info(self) -> dict:
        report: dict[str, Any] = {
            "version": "0.1.0",
            "prepared": "no plugin" not in self.faults,
            "targets": list(TARGETS),
            "target_modules": sorted(MODULES),
            "max_lora_rank": self.rank,
            "modules": len(module_names(self.spec)) - ("one module lost" in self.faults),
            "adapters": {
                name: {"digest": digest, "num_tensors": count}
                for name, (digest, count) in self.adapters.items()
            },
        }
        common = {
            "dtype": "float32",
            "enable_lora": "no lora" not in self.faults,
            "max_lora_rank": self.rank,
            "lora_target_modules": list(TARGETS),
            "tp_size": self.tp,
            "enable_memory_saver": False,
            "enable_weights_cpu_backup": False,
            "enable_return_routed_experts": False,
            "max_loaded_loras": self.stream.max_loaded,
            **self.flags,
        }
        state = common if self.api == "streamed" else {**common, "glm_lora_plugin": report}
        return {"version": "0.5.23", **common, "internal_states": [state]}

    def routes(self) -> list[str]:
        """Those that take a POST."""
        whole = [TENSORS_ROUTE] * (self.api in ("whole", "both"))
        streamed = [*self.stream.calls] * (self.api in ("streamed", "both"))
        return [*whole, *streamed, UNLOAD_ROUTE, VERSION_ROUTE, "/generate"]

    def load(self, body: dict) -> tuple[int, dict]:
        name = body["lora_name"]
        payloads = body["serialized_named_tensors"]
        if "refuse" in self.faults:
            return self.update_reply(False, "no memory for another adapter")
        if "success false with 200" in self.faults:
            return 200, self.update_reply(False, "rank 1 failed")[1]
        if len(payloads) < self.tp:
            return 500, {"error": {"message": "list index out of range"}}
        problems = []
        for rank, payload in enumerate(payloads[: self.tp]):
            if rank and "one rank silent" in self.faults:
                time.sleep(3600)
            problems += self._receive(name, payload, body["config_dict"])
        if name in self.adapters and name in self.loaded_ever:
            problems.append(f"Failed to load LoRA adapter {name} because it is already loaded")
        if problems:
            return self.update_reply(False, "glm-lora: " + "; ".join(problems))
        self.loaded_ever.append(name)
        self.most_loaded = max(self.most_loaded, len(self.adapters))
        if "dies after load" in self.faults:
            self.dead = True
        return self.update_reply(True, "")

    def _receive(self, name: str, payload: str, config: dict) -> list[str]:
        tensors = pickle.loads(base64.b64decode(payload))
        if "accepts nothing" in self.faults:
            self.adapters[name] = (fingerprint([]), 0)
            return []
        if "drops one tensor" in self.faults:
            tensors.pop(next(iter(tensors)))
            records = [record_of(k, t) for k, t in tensors.items()]
            self.adapters[name] = (fingerprint(records), len(records))
            return []
        records: list[TensorRecord] = [record_of(k, t) for k, t in tensors.items()]
        digest = fingerprint(records)
        shapes, parts = adapter_shapes(self.spec, config["r"]), fused_parts(self.spec)
        problems = find_problems(records, shapes, parts)
        if config["r"] > self.rank:
            problems.append("incompatible with the current LoRA memory pool")
        if config.get("glm_lora_digest", digest) != digest:
            problems.append("received another digest")
        if not problems:
            self.adapters[name] = (digest, len(records))
        return problems

    def update_reply(self, success: bool, message: str) -> tuple[int, dict]:
        reply = {
            "rid": None,
            "http_worker_ipc": None,
            "success": success,
            "error_message": message,
            "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__"),
        }
        return (200 if success else 400), reply

    def unload(self, body: dict) -> tuple[int, dict]:
        name = body["lora_name"]
        if name in self.stream.pending:
            return self.update_reply(False, f"{name} is awaiting publication")
        if name not in self.adapters:
            return self.update_reply(False, f"LoRA with name {name} does not exist")
        while self.using.get(name):
            time.sleep(0.01)
        del self.adapters[name]
        return self.update_reply(True, "")

    def generate(self, body: dict) -> tuple[int, Any]:
        batched = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if batched else [body["input_ids"]]
        params = body["sampling_params"] if batched else [body["sampling_params"]]
        names = body["lora_path"] if batched else [body["lora_path"]]
        for name in names:
            if name in self.stream.pending:
                return 400, {"error": {"message": f"{name} is awaiting publication"}}
            if name is not None and name not in self.adapters:
                return 400, {
                    "error": {"message": f"Got LoRA adapter that has never been loaded: {name}"}
                }
            with self.lock:
                self.using[name] = self.using.get(name, 0) + 1
        if "slow" in self.faults:
            time.sleep(0.3)
        try:
            wants_prompt = body.get("logprob_start_len") == 0
            answers = [
                self._answer(p, s, n, wants_prompt)
                for p, s, n in zip(prompts, params, names, strict=True)
            ]
        finally:
            with self.lock:
                for name in names:
                    self.using[name] -= 1
        return 200, answers if batched else answers[0]

    def _key(self, name: str | None) -> str:
        if name is None or "serves the base" in self.faults:
            return self.base
        if "keeps the old version" in self.faults:
            name = self.loaded_ever[0]
        digest, count = self.adapters[name]
        return digest if count else self.base

    def _answer(
        self, prompt: list[int], params: dict, name: str | None, wants_prompt: bool
    ) -> dict:
        key = self._key(name)
        seed = int(hashlib.sha256(f"{key}{prompt}{params}".encode()).hexdigest()[:8], 16)
        sampled = np.random.default_rng(seed).integers(10, VOCAB, params["max_new_tokens"])
        tokens = [int(t) for t in sampled]
        stops = params.get("stop_token_ids") or []
        stop_at = next((i for i, t in enumerate(tokens) if t in stops), None)
        finish: dict[str, Any] = {"type": "length", "length": len(tokens)}
        if stop_at is not None:
            tokens = tokens[: stop_at + 1]
            finish = {"type": "stop", "matched": tokens[-1]}
        if "aborts" in self.faults:
            finish = {"type": "abort", "message": "Abort in waiting queue"}
        logprobs = fake_logprobs(prompt + tokens, key)
        if "nan" in self.faults:
            logprobs[:] = np.nan
        at = len(prompt) - 1
        prompt_entries = [[None, prompt[0], None]] + [
            [float(v), t, None] for v, t in zip(logprobs[:at], prompt[1:], strict=True)
        ]
        output = [[float(v), t, None] for v, t in zip(logprobs[at:], tokens, strict=True)]
        return {
            "output_ids": tokens,
            "meta_info": {
                "id": "0" * 32,
                "finish_reason": finish,
                "prompt_tokens": len(prompt),
                "weight_version": "old" if "wrong version" in self.faults else self.version,
                "num_retractions": 0,
                "input_token_logprobs": prompt_entries if wants_prompt else [],
                "output_token_logprobs": output,
                "completion_tokens": len(tokens),
            },
        }

    def admits(self, method: str, path: str, authorization: str | None) -> bool:
        open_to_all = not self.key or method == "OPTIONS" or path.startswith("/health")
        if open_to_all or authorization == f"Bearer {self.key}":
            return True
        self.refused.append(path)
        return False

    def respond(self, method: str, path: str, body: dict) -> tuple[int, Any]:
        if method == "OPTIONS":
            return (405 if path in self.routes() else 404), {"detail": "Method Not Allowed"}
        self.requests.append((path, body))
        if path == "/openapi.json" and "no description" not in self.faults:
            return 200, {"openapi": "3.1.0", "paths": {p: {"post": {}} for p in self.routes()}}
        if path == "/health":
            return 200, None
        if path == "/server_info":
            return 200, self.server_info()
        if path == "/generate":
            if "500" in self.faults:
                return 500, {"error": {"message": "internal"}}
            if "500 twice" in self.faults:
                done = sum(p == "/generate" for p, _ in self.requests)
                if done % 3:
                    return 500, {"error": {"message": "internal"}}
            return self.generate(body)
        if path not in self.routes() and path in {TENSORS_ROUTE, *self.stream.calls}:
            return 404, {"detail": "Not Found"}
        if path == TENSORS_ROUTE:
            return self.load(body)
        if path in self.stream.calls:
            return self.stream.calls[path](body)
        if path == UNLOAD_ROUTE:
            return self.unload(body)
        if path == VERSION_ROUTE:
            if "version refused" in self.faults:
                return 400, {"success": False, "message": "Failed to update weight version: x"}
            self.version = body["new_version"]
            message = f"Weight version updated to {self.version}"
            return 200, {"success": True, "message": message, "new_version": self.version}
        if path in ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"):
            self.released = path.startswith("/release")
            return 200, None
        return 404, {"detail": "Not Found"}


@contextmanager
def running(fake: FakeSglang):
    """Serve ``fake`` on a free port; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            if fake.dead or ("reset" in fake.faults and self.path == "/generate"):
                self.close_connection = True
                self.connection.close()
                return
            status, reply = 401, {"error": "Unauthorized"}
            if fake.admits(self.command, self.path, self.headers.get("Authorization")):
                status, reply = fake.respond(self.command, self.path, body)
            data = b"" if reply is None else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status == 405:
                self.send_header("Allow", "POST")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_OPTIONS = _handle

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
