"""A real SGLang server (CPU, tiny llama) is killed: it comes back as it was, with its adapters."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest

from glm_lora.cluster.engines import EnginePool
from glm_lora.cluster.ray_runtime import ray_session
from glm_lora.protocols import AdapterState, Finish, Request, SamplingParams
from tests.cluster.sglang_actor import KEY, LlamaHandle, alive
from tests.rollout.sglang_support import PYTHON, llama_checkpoint, llama_selection
from tests.support import close
from tests.tiny_checkpoint import random_state

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON.exists(), reason="run make sglang-env first"),
    pytest.mark.timeout(1500),
]
TOKENS = tuple(range(5, 25))
SAME = "one program on one machine, started again"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A pool of one engine, its handle and what the pool has noted."""
    folder = tmp_path_factory.mktemp("llama")
    notes: list[str] = []
    with ray_session("", num_cpus=2, num_gpus=0):
        handle = LlamaHandle(folder, llama_checkpoint(folder / "base"))
        handle.start()
        handle.ready()
        pool = EnginePool(
            [handle], rollout_limit=300.0, call_limit=300.0, max_restarts=2, note=notes.append
        )
        try:
            yield pool, handle, notes
        finally:
            pool.close()


def adapter(version: int) -> AdapterState:
    return random_state(llama_selection(), version=version, seed=version)


def requests(count: int, length: int) -> list[Request]:
    return [Request((9, 8, 7), SamplingParams(length, 1.0, seed=s), n=2) for s in range(count)]


def kill_the_server(handle: LlamaHandle) -> None:
    os.killpg(handle.server_pid(), signal.SIGKILL)


def check_samples(pool: EnginePool, samples, state: AdapterState, count: int) -> None:
    """Every request is answered, and under the adapter that was asked for."""
    assert len(samples) == 2 * count
    for sample in samples[:4]:
        assert sample.adapter == state.ref() and sample.prompt_ids == (9, 8, 7)
        (scored,) = pool.score([(*sample.prompt_ids, *sample.response_ids)], state.ref())
        close(np.array(sample.logprobs), scored[2:], "sampling and scoring of one model", atol=1e-4)


def test_a_server_killed_between_a_load_and_a_generate(served):
    pool, handle, notes = served
    older, newer = adapter(1), adapter(2)
    pool.push(older)
    pool.push(newer)
    before = {s.version: pool.score([TOKENS], s.ref())[0] for s in (older, newer)}
    assert np.abs(before[1] - before[2]).max() > 0.1, "the adapters do something"
    processes, first_url = handle.children, handle.url
    kill_the_server(handle)
    samples = pool.generate(requests(3, 12), newer.ref())
    assert (pool.restarts, handle.starts) == (1, 2)
    assert "engine 0 is lost and restarts: engine.generate: its server is gone" in notes[0]
    assert "engine 0 is back after" in notes[1]
    assert handle.url != first_url and not alive(processes), "nothing of the first is left"
    check_samples(pool, samples, newer, 3)
    for state in (older, newer):
        close(pool.score([TOKENS], state.ref())[0], before[state.version], SAME, atol=1e-6)


def test_a_server_killed_while_it_samples(served):
    pool, handle, _ = served
    state = adapter(3)
    pool.push(state)
    (before,) = pool.score([TOKENS], state.ref())
    starts = handle.starts

    def kill_soon() -> None:
        time.sleep(1.0)
        kill_the_server(handle)

    thread = threading.Thread(target=kill_soon)
    thread.start()
    samples = pool.generate(requests(24, 200), state.ref())
    thread.join()
    assert handle.starts == starts + 1, "it was not done before the kill"
    assert len(samples) == 48 and not [s for s in samples if s.finish is Finish.ABORT]
    assert {s.adapter for s in samples} == {state.ref()}
    close(pool.score([TOKENS], state.ref())[0], before, SAME, atol=1e-6)


def test_the_key_is_asked_for_and_stands_on_no_command_line(served):
    """As docs/security.md says: ``--config`` hides the key from ps, SGLang's log does not."""
    _, handle, _ = served
    url = f"{handle.url}/server_info"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url)
    assert (caught.value.code, caught.value.read()) == (401, b'{"error":"Unauthorized"}')
    shown = [" ".join(psutil.Process(pid).cmdline()) for pid, _ in handle.children]
    shown += [str(psutil.Process(pid).environ()) for pid, _ in handle.children]
    assert any("sglang" in line for line in shown)
    assert not [line for line in shown if KEY in line]
    assert KEY in handle.log()
    assert Path(handle.url.removeprefix("http://")).name.startswith("127.0.0.1")
