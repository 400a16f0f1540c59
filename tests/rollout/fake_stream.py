"""The streamed adapter interface of the fake server, from its public description.

Registration makes an adapter of zeros, which answers as the base does. Tensors named ``name:key``
are kept while a weight-update session is open and are applied, adapter by adapter, when it ends;
what was not streamed stays zero. A session is refused while another is open, and whoever opened it
must end it. With ``staged`` a name that was registered with ``defer_publish`` can be neither used
nor unloaded before its session has ended well, and is forgotten when the session does not.
"""

from __future__ import annotations

import base64
import pickle
import time
from typing import Any

from glm_lora.fingerprint import fingerprint, record_of
from glm_lora.rollout.sglang_adapters import BEGIN_ROUTE, END_ROUTE, REGISTER_ROUTE
from glm_lora.rollout.sglang_payload import STREAM_ROUTE


def answer(success: bool, message: str = "Success") -> tuple[int, dict]:
    return (200 if success else 400), {"success": success, "message": message}


class FakeStream:
    """Sessions of one server; ``server`` holds the adapters and the faults."""

    def __init__(self, server: Any, *, staged: bool = True, max_loaded: int | None = None) -> None:
        self.server, self.staged, self.max_loaded = server, staged, max_loaded
        self.configs: dict[str, dict] = {}
        self.pending: set[str] = set()
        self.session: list[dict[str, dict[str, Any]]] | None = None
        self.aborted = 0
        self.calls = {
            REGISTER_ROUTE: self.register,
            BEGIN_ROUTE: self.begin,
            STREAM_ROUTE: self.update,
            END_ROUTE: self.end,
        }

    def register(self, body: dict) -> tuple[int, dict]:
        name, config = body["lora_name"], body["config_dict"]
        server = self.server
        if "refuse" in server.faults:
            return server.update_reply(False, "no memory for another adapter")
        if ":" in name:
            return server.update_reply(False, "LoRA adapter name must not contain ':'")
        if name in self.pending:
            return server.update_reply(False, f"{name} is awaiting publication")
        full = self.max_loaded is not None and len(server.adapters) >= self.max_loaded
        if full and name not in server.adapters:
            return server.update_reply(False, "rejected: --max-loaded-loras is reached")
        if config["r"] > server.rank:
            return server.update_reply(False, "incompatible with the current LoRA memory pool")
        self.configs[name] = config
        server.adapters[name] = (fingerprint([]), 0)
        if self.staged and body.get("defer_publish"):
            self.pending.add(name)
        status, reply = server.update_reply(True, "")
        return status, reply | {"pending": name in self.pending}

    def begin(self, body: dict) -> tuple[int, dict]:
        if self.session is not None:
            return answer(False, "a weight-update session is already open")
        if body.get("sync_base", True):
            self.server.base_touched = True
        self.session = [{} for _ in range(self.server.tp)]
        return answer(True)

    def update(self, body: dict) -> tuple[int, dict]:
        faults = self.server.faults
        if self.session is None:
            return answer(False, "must run between begin_weight_update() and end_weight_update()")
        if self.pending and body.get("flush_cache", True):
            return answer(False, "a staged session cannot flush the cache")
        payloads = body["serialized_named_tensors"]
        if len(payloads) < self.server.tp:
            return 500, {"error": {"message": "list index out of range"}}
        if "stream breaks" in faults:
            return 500, {"error": {"message": "internal"}}
        for rank, (payload, stash) in enumerate(zip(payloads, self.session, strict=False)):
            if rank and "one rank silent" in faults:
                time.sleep(3600)
            pairs = pickle.loads(base64.b64decode(payload))
            if "accepts nothing" in faults:
                pairs = []
            if "drops one tensor" in faults:
                pairs = pairs[1:]
            for prefixed, tensor in pairs:
                name, key = prefixed.split(":", 1)
                stash.setdefault(name, {})[key] = tensor
        return answer(True)

    def end(self, body: dict) -> tuple[int, dict]:
        server = self.server
        if self.session is None:
            return answer(False, "no weight-update session is open")
        stashes, self.session = self.session, None
        waiting, self.pending = self.pending, set()
        if body.get("abort"):
            self.aborted += 1
            problem = ""
        elif "success false with 200" in server.faults:
            self.forget(waiting)
            return 200, {"success": False, "message": "rank 1 failed"}
        else:
            expected = body.get("expected_lora_checksums")
            problem = self.problem(stashes, waiting, expected)
        if problem or body.get("abort"):
            self.forget(waiting)
            return answer(not problem, problem or "Aborted")
        for name, tensors in stashes[0].items():
            records = [record_of(k, t) for k, t in tensors.items()]
            server.adapters[name] = (fingerprint(records), len(records))
            server.loaded_ever.append(name)
        server.most_loaded = max(server.most_loaded, len(server.adapters))
        if "dies after load" in server.faults:
            server.dead = True
        return answer(True)

    def problem(self, stashes: list[dict], waiting: set[str], expected: dict | None) -> str:
        if "ignores checksums" in self.server.faults:
            return ""
        if waiting and expected is None:
            return f"{sorted(waiting)} need expected_lora_checksums"
        for stash in stashes:
            sums = {n: {k: record_of(k, t).sha256 for k, t in v.items()} for n, v in stash.items()}
            if expected is not None and sums != expected:
                return "[LORA-CHECK] streamed adapters do not match the expected manifest"
            if not set(stash) <= set(self.configs):
                return "unregistered adapter"
        return ""

    def forget(self, names: set[str]) -> None:
        for name in names:
            self.server.adapters.pop(name, None)
