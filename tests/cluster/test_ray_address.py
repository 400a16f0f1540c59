"""Addresses given as ``--ray-address``: tokens, other servers, clusters out of reach; real Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from glm_lora.cluster.ray_probe import probe
from tests.flow.processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOKEN = "0123456789abcdef" * 4
RAY = Path(sys.executable).with_name("ray")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def head(*options: str, **environment: str) -> Iterator[int]:
    """``ray start --head`` as a user would, ended with the block; gives its port."""
    port = free_port()
    command = [str(RAY), "start", "--head", "--port", str(port), "--num-cpus", "2", "--block"]
    command += ["--include-dashboard", "false", "--disable-usage-stats", *options]
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [*command, "--temp-dir", folder],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "--block" in line:
                    break
            assert process.poll() is None, "".join(lines)
            yield port
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def token(tmp_path, monkeypatch) -> Path:
    """A machine that ran a local Ray once: a token, and no mode."""
    path = tmp_path / "auth_token"
    path.write_text(TOKEN)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    return path


def address(port: int) -> str:
    from ray.util import get_node_ip_address

    return f"{get_node_ip_address()}:{port}"


def words(run: Run) -> str:
    return " ".join(run.text().replace("\u2502", " ").split())


def test_a_cluster_with_this_machines_token_is_joined(tiny_root, tmp_path, token):
    with head() as port:
        options = ["--num-rollout", "1", "--ray-address", address(port)]
        with Run(tiny_root, tmp_path / "run", *options) as run:
            assert run.wait() == 0, run.text()
        assert "InvalidAuthToken" not in run.text()
        token.write_text(TOKEN[::-1])
        with Run(tiny_root, tmp_path / "other", *options) as run:
            assert run.wait() == 2, run.text()
        text = words(run)
        assert "wants its authentication token" in text, text
        assert "RAY_AUTH_MODE=token" in text and "auth_token" in text, text
        assert not run.dir.exists()


def test_a_cluster_without_tokens_is_joined_without_one(token):
    with head(RAY_AUTH_MODE="disabled") as port:
        found = probe(address(port), lambda: None)
        assert found.joined and not found.token, found


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)


def test_another_server_is_told_apart(tiny_root, tmp_path):
    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"127.0.0.1:{server.server_port}"
    with Run(tiny_root, tmp_path / "run", "--num-rollout", "1", "--ray-address", place) as run:
        assert run.wait() == 2, run.text()
    server.shutdown()
    assert f"--ray-address {place}: " in words(run) and "next:" in words(run), run.text()
    assert not run.dir.exists()


def test_a_cluster_that_tells_addresses_out_of_reach(tiny_root, tmp_path, token):
    with head("--node-ip-address", "127.0.0.1") as port:
        options = ["--num-rollout", "1", "--ray-address", f"127.0.0.1:{port}"]
        with Run(tiny_root, tmp_path / "run", *options) as run:
            code = run.wait()
    assert code in (0, 2), run.text()
    if code == 2:
        assert "--ray-address" in words(run) and "next:" in words(run), run.text()
        assert not run.dir.exists()
