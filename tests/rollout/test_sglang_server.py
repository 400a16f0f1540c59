"""Command line, serving view and process life; the process is a small script, not SGLang."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from glm_lora.arch.spec import FULL
from glm_lora.errors import ConfigError, RolloutError
from glm_lora.rollout.sglang_server import (
    ServerOptions,
    SglangServer,
    passed_flags,
    server_command,
    serving_view,
    start_servers,
)
from tests.support import is_running
from tests.tiny_checkpoint import tiny_selection

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
    import http.server, os, subprocess, sys
    port = int(sys.argv[sys.argv.index("--port") + 1])
    mode = os.environ.get("MODE", "")
    print("loading weights", flush=True)
    if mode == "dies":
        sys.exit("CUDA out of memory")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    asked = []
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            print("asked", self.path, flush=True)
            busy = mode == "compiles" and asked.count("/server_info") < 3
            sick = mode == "sick" or busy and self.path == "/server_info"
            locked = mode == "locked" and self.path == "/server_info"
            self.send_response(503 if sick else 401 if locked else 200)
            self.end_headers()
        def log_message(self, *args):
            pass
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def options(tmp_path):
    """A ``python`` that runs SERVER whatever module it is asked for."""
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"text_config": {"head_dim": 0}}))
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    return ServerOptions(
        checkpoint=checkpoint,
        selection=tiny_selection(FULL, rank=16),
        python=str(python),
        work_dir=tmp_path / "work",
    )


def test_command_line_of_the_recipe(options, tmp_path):
    wide = replace(
        options, tensor_parallel=8, expert_parallel=8, memory_saver=True, passed=("--x", "1")
    )
    command = server_command(wide, tmp_path / "model", 30000)
    text = " ".join(command)
    assert command[1:4] == ["-m", "sglang.launch_server", "--model-path"]
    for part in (
        "--port 30000",
        "--tp-size 8 --ep-size 8",
        "--dsa-prefill-backend tilelang --dsa-decode-backend tilelang",
        "--kv-cache-dtype bfloat16 --moe-runner-backend triton",
        "--disable-shared-experts-fusion",
        "--enable-lora --lora-backend triton --max-loras-per-batch 3 --max-lora-rank 16",
        "--lora-target-modules b_proj down_proj f_a_proj f_b_proj g_a_proj g_b_proj gate_proj "
        "k_proj kv_a_proj_with_mqa o_proj q_a_proj q_b_proj q_proj up_proj v_proj",
        "--enable-memory-saver --enable-weights-cpu-backup",
    ):
        assert part in text
    assert text.endswith("--x 1")
    assert "memory-saver" not in " ".join(server_command(options, tmp_path, 1))


def test_flags_are_passed_through_unless_they_are_ours():
    flags = ["--sglang-context-length=4096", "--sglang-disable-radix-cache"]
    assert passed_flags([*flags, "--sglang-log-level", "info"]) == (
        "--context-length",
        "4096",
        "--disable-radix-cache",
        "--log-level",
        "info",
    )
    for bad in ("--sglang-max-lora-rank=8", "--sglang-port", "--context-length", "--sglang-"):
        with pytest.raises(ConfigError):
            passed_flags([bad])
    with pytest.raises(ConfigError, match="It follows from --sglang-mem-fraction"):
        passed_flags(["--sglang-mem-fraction-static", "0.5"])


@pytest.mark.parametrize("typo", ["--sglang-colocatd", "--sglang-pyhton", "--sglang-mem-fractoin"])
def test_a_misspelt_option_of_ours_is_not_handed_to_sglang(typo):
    with pytest.raises(ConfigError, match="Did you mean '--sglang-"):
        passed_flags([typo, "x"])


def test_serving_view_completes_the_config_and_links_the_rest(options, tmp_path):
    view = serving_view(options.checkpoint, tmp_path / "view")
    config = json.loads((view / "config.json").read_text())
    assert config["text_config"] == {
        "head_dim": 0,
        "mhc": True,
        "index_kpool_compress": True,
        "num_nextn_predict_layers": 0,
    }
    assert config["language_model_only"] is True
    assert (view / "model.safetensors").resolve() == options.checkpoint / "model.safetensors"
    assert serving_view(options.checkpoint, tmp_path / "view") == view, "twice is fine"
    assert serving_view(view, tmp_path / "other") == view, "a complete one is served as it is"
    text = {**config["text_config"], "architectures": None}
    (options.checkpoint / "config.json").write_text(json.dumps({"text_config": text}))
    view = serving_view(options.checkpoint, tmp_path / "nameless")
    assert "architectures" not in json.loads((view / "config.json").read_text())["text_config"]
    (options.checkpoint / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be served"):
        serving_view(options.checkpoint, tmp_path / "third")


def test_start_wait_stop_ends_its_group_and_nothing_else(options):
    server, other = start_servers([options, replace(options, work_dir=options.work_dir / "b")])
    try:
        assert server.alive()
        child = int(server.tail().split("child ")[1].split()[0])
        assert is_running(child)
        server.stop()
        assert not is_running(child)
        assert not server.alive()
        assert other.alive()
        server.stop()
    finally:
        other.stop()
    assert not other.alive()


def test_a_server_that_ends_while_starting_shows_its_log(options):
    with pytest.raises(RolloutError, match=r"ended with code 1(?s:.*)CUDA out of memory"):
        start_servers([replace(options, env={"MODE": "dies"})])


def test_a_server_that_never_gets_healthy_is_stopped(options):
    server = SglangServer(replace(options, env={"MODE": "sick"}))
    with pytest.raises(RolloutError, match=r"not healthy after (?s:.*)loading weights"):
        server.wait(limit=2.0)
    assert not server.alive()


def test_a_server_that_is_alive_but_compiles_is_not_healthy(options):
    """Seen on a GPU: /health said 200 after a second, the schedulers answered two minutes later."""
    (server,) = start_servers([replace(options, env={"MODE": "compiles"})])
    try:
        assert server.tail().count("asked /server_info") == 3
    finally:
        server.stop()


def test_a_server_that_asks_for_a_key_is_there(options):
    """One whose own configuration file names a key does not tell strangers about itself."""
    server = SglangServer(replace(options, env={"MODE": "locked"}))
    try:
        server.wait(limit=30.0)
    finally:
        server.stop()


def test_a_server_started_by_a_rank_of_torchrun_is_not_one_of_its_ranks(options, tmp_path):
    """Seen on a GPU: told to use the agent's store, SGLang waited for it and said nothing."""
    script = tmp_path / "rank.py"
    script.write_text("""
import dataclasses, json, os, pickle, sys
from glm_lora.rollout.sglang_server import SglangServer
options = pickle.load(open(sys.argv[1], "rb"))
given = dict(os.environ)
server = SglangServer(options)
server.wait(60)
seen = open(f"/proc/{server._process.pid}/environ").read().split("\\0")
server.stop()
names = {entry.partition("=")[0] for entry in seen if entry}
json.dump([sorted(given), sorted(names)], open(sys.argv[2], "w"))
""")
    found, told = tmp_path / "names.json", tmp_path / "options"
    told.write_bytes(pickle.dumps(options))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    outside = {k: v for k, v in os.environ.items() if k != "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    done = subprocess.run(
        [*command, str(told), str(found)],
        env=outside | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    given, names = (set(x) for x in json.loads(found.read_text()))
    assert {"RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} <= given
    harmless = {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONPATH"}
    ours = {"HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED"}
    assert names - set(outside) <= harmless | ours | {"PWD", "SHLVL", "_", "OLDPWD"}


def test_one_failure_stops_all(options):
    good = replace(options, work_dir=options.work_dir / "good")
    with pytest.raises(RolloutError):
        start_servers([good, replace(options, env={"MODE": "dies"})])
    (log,) = good.work_dir.glob("*.log")
    child = int(log.read_text().split("child ")[1].split()[0])
    assert not is_running(child)


def test_an_interpreter_that_is_not_there(options):
    with pytest.raises(ConfigError, match="--sglang-python"):
        SglangServer(replace(options, python="/nowhere/python"))
