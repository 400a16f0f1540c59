"""Several engines as one, on real Ray actors whose processes are really killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.cluster.engines import EnginePool
from glm_lora.cluster.ray_runtime import ray_session
from glm_lora.errors import RolloutError
from glm_lora.protocols import BASE, AdapterState, Request, SamplingParams
from glm_lora.targets.selection import make_selection
from tests.cluster.actors import WaitingHandle

SELECTION = make_selection("tiny", TINY, trainable_sites(TINY), rank=8, alpha=16.0)


@pytest.fixture(scope="module", autouse=True)
def session():
    with ray_session("", num_cpus=2, num_gpus=0):
        yield


@pytest.fixture
def pool_of(request):
    pools = []

    def make(*handles, rollout_limit=30.0, call_limit=30.0, max_restarts=2):
        notes: list[str] = []
        pool = EnginePool(
            handles,
            rollout_limit=rollout_limit,
            call_limit=call_limit,
            max_restarts=max_restarts,
            note=notes.append,
        )
        pools.append(pool)
        return pool, notes

    yield make
    for pool in pools:
        pool.close()


def requests(count: int, n: int = 2) -> list[Request]:
    return [Request((1, 2), SamplingParams(4, seed=seed), n) for seed in range(count)]


def state(version: int) -> AdapterState:
    return AdapterState(SELECTION, {"a": torch.zeros(2)}, version, f"digest{version}")


def expected(count: int, n: int = 2) -> list[tuple[int, int]]:
    return [(seed, i) for seed in range(count) for i in range(n)]


def tokens(samples):
    return [sample.response_ids for sample in samples]


@pytest.mark.parametrize(("engines", "lanes", "count"), [(1, 1, 5), (3, 1, 5), (2, 4, 3)])
def test_samples_come_back_in_request_order(pool_of, engines, lanes, count):
    pool, _ = pool_of(*(WaitingHandle(lanes) for _ in range(engines)))
    assert tokens(pool.generate(requests(count), BASE)) == expected(count)


def test_a_killed_engine_gets_its_adapters_back_and_only_its_share_is_redone(pool_of, tmp_path):
    handles = [WaitingHandle(seconds=1.0, folder=str(tmp_path)) for _ in range(2)]
    pool, notes = pool_of(*handles)
    for version in (1, 2, 3):
        pool.push(state(version))
    victim, held, _ = handles[0].state()
    other = handles[1].state()[0]
    assert [ref.version for ref in held] == [2, 3]
    threading.Timer(0.4, os.kill, (victim, signal.SIGKILL)).start()
    samples = pool.generate(requests(6), state(3).ref())
    assert tokens(samples) == expected(6)
    reborn, held, _ = handles[0].state()
    assert reborn != victim and [ref.version for ref in held] == [2, 3]
    assert handles[1].state()[0] == other and handles[1].starts == 1
    batches = [path.read_text().count("generate") for path in tmp_path.glob("*.log")]
    assert sum(batches) == 3, "two shares, one of them twice"
    assert pool.restarts == 1 and "is lost and restarts" in notes[0]


def test_an_engine_lost_while_released_comes_back_released(pool_of):
    handle = WaitingHandle()
    pool, _ = pool_of(handle)
    pool.push(state(1))
    pool.release()
    os.kill(handle.state()[0], signal.SIGKILL)
    time.sleep(0.2)
    pool.capabilities()
    assert handle.state()[2] is True
    pool.resume()
    assert handle.state()[2] is False


def test_a_silent_engine_is_replaced_after_its_limit(pool_of):
    handle = WaitingHandle()
    pool, notes = pool_of(handle, rollout_limit=2.0)
    process = psutil.Process(handle.state()[0])
    process.suspend()
    start = time.monotonic()
    try:
        assert tokens(pool.generate(requests(2), BASE)) == expected(2)
    finally:
        if process.is_running():
            process.kill()
    assert time.monotonic() - start >= 2.0
    assert "did not finish within 2 s" in notes[0]


def test_an_engine_that_keeps_dying_ends_with_its_reason(pool_of):
    handle = WaitingHandle(seconds=60)
    pool, notes = pool_of(handle, rollout_limit=1.0, max_restarts=2)
    with pytest.raises(RolloutError, match="engine 0 was lost 3 times in a row"):
        pool.generate(requests(1), BASE)
    assert handle.starts == 3 and sum("is back" in note for note in notes) == 2


def test_an_error_of_the_engine_is_no_loss(pool_of):
    handle = WaitingHandle()
    pool, notes = pool_of(handle)
    with pytest.raises(RolloutError, match="not held"):
        pool.generate(requests(1), state(9).ref())
    assert handle.starts == 1 and not notes


def test_a_receipt_that_differs_on_any_engine_is_the_one_that_counts(pool_of):
    class Forgetful(WaitingHandle):
        def submit(self, name, *args):
            if name == "push":
                held = ray.get(args[0])
                args = (AdapterState(held.selection, held.tensors, held.version, "other"), "policy")
            return super().submit(name, *args)

    pool, _ = pool_of(WaitingHandle(), Forgetful())
    assert pool.push(state(1)).digest == "other"


def test_a_closed_pool_starts_no_engine_again(pool_of, tmp_path):
    handle = WaitingHandle(seconds=30)
    pool, _ = pool_of(handle)
    failure: list[BaseException] = []

    def sample() -> None:
        try:
            pool.generate(requests(1), BASE)
        except RolloutError as error:
            failure.append(error)
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    time.sleep(0.5)
    handle.actor.call.remote("close")
    pool._closed = True
    handle.end()
    thread.join(20)
    assert failure and handle.starts == 1


def test_many_versions_leave_no_process_and_no_file_descriptor(pool_of, tmp_path: Path):
    """100 times sync and sample: what the driver holds does not grow."""
    pool, _ = pool_of(WaitingHandle(), WaitingHandle())
    me = psutil.Process()
    for version in range(100):
        pool.push(state(version))
        pool.generate(requests(4), state(version).ref())
        if version == 20:
            before = me.num_fds(), me.num_threads(), me.memory_info().rss
    after = me.num_fds(), me.num_threads(), me.memory_info().rss
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 2
    assert after[2] <= before[2] * 1.02, f"{before[2]} bytes after 20, {after[2]} after 100"
