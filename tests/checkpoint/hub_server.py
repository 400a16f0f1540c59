"""A local HTTP server with the hub's routes, which can drop connections and damage files.

Routes (Hugging Face Hub API): ``/api/{models,datasets}/REPO/revision/REV`` describes a repository,
``/[datasets/]REPO/resolve/REV/FILE`` serves a file, whole or from an offset (``Range``).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" * 6 + "c0ff"
LARGE = (".safetensors", ".parquet", ".jsonl")


@dataclass
class Hub:
    """What the server serves and what it was asked for."""

    repos: dict[str, Path]
    """Folder of every repository, by ``models/owner/name`` or ``datasets/owner/name``."""
    gated: set[str] = field(default_factory=set)
    drop_after: int = 0
    """Close the connection after so many bytes of a large file, every other time; 0 never."""
    damage: str = ""
    """Name of a file that is served with a wrong byte."""
    served: Counter[str] = field(default_factory=Counter)
    """Bytes sent by file name."""
    ranges: list[str] = field(default_factory=list)
    drops: int = 0
    url: str = ""

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(send=True)

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def _answer(self, send: bool) -> None:
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/(.+)", path):
            self._describe(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind = "datasets" if match[1] else "models"
            self._file(f"{kind}/{match[2]}", match[3], match[4], send)
        else:
            self._error(404, "EntryNotFound")

    def _describe(self, kind: str, repo: str, revision: str) -> None:
        key = f"{kind}/{repo}"
        if not self._allowed(key, revision):
            return
        siblings = []
        for path in sorted(self.hub.repos[key].iterdir()):
            entry: dict[str, object] = {"rfilename": path.name, "size": path.stat().st_size}
            if path.name.endswith(LARGE):
                sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": entry["size"], "pointerSize": 134}
            siblings.append(entry)
        body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, key: str, revision: str, name: str, send: bool) -> None:
        if not self._allowed(key, revision):
            return
        path = self.hub.repos[key] / name
        if not path.exists():
            self._error(404, "EntryNotFound")
            return
        data = bytearray(path.read_bytes())
        etag = hashlib.sha256(data).hexdigest()
        if name == self.hub.damage:
            data[len(data) // 2] ^= 1
        start = 0
        if send and (value := self.headers.get("Range")):
            start = int(value.removeprefix("bytes=").split("-")[0])
            self.hub.ranges.append(name)
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if send:
            self._send(name, memoryview(data)[start:])

    def _send(self, name: str, data: memoryview) -> None:
        limit = self.hub.drop_after
        if limit and name.endswith(LARGE) and len(data) > limit:
            self.hub.drops += 1
            data = data[:limit]
            self.close_connection = True
        self.wfile.write(data)
        self.hub.served[name] += len(data)
        if self.close_connection:
            self.wfile.flush()
            self.connection.close()

    def _allowed(self, key: str, revision: str) -> bool:
        if key in self.hub.gated:
            self._error(403, "GatedRepo")
        elif key not in self.hub.repos:
            self._error(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._error(404, "RevisionNotFound")
        else:
            return True
        return False

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
