"""The engine against a fake server that speaks the real protocol: every fault ends with its reason.

No sample of another adapter than the one asked for may come out, whatever the server does.
"""

from __future__ import annotations

import base64
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from glm_lora.arch.spec import TINY
from glm_lora.errors import RolloutError, SyncError
from glm_lora.protocols import BASE, AdapterRef, Finish, Request, RolloutEngine, SamplingParams
from glm_lora.rollout.sglang import SglangEngine, attach_engine
from glm_lora.rollout.sglang_client import SglangClient
from glm_lora.rollout.sglang_samples import routed_experts
from glm_lora.sync.push import Revocable, check_base, push_and_verify, record_probe
from tests.rollout.fake_sglang import FakeSglang, fake_logprobs, running
from tests.tiny_checkpoint import mixed_ranks, random_state, tiny_selection

pytestmark = pytest.mark.usefixtures("short_pauses")
TOKENS = (3, 5, 7, 11, 13)
PARAMS = SamplingParams(6, 1.0, (20, 21, 22), seed=5)


class Cluster:
    """Fake servers with one engine over them."""

    def __init__(
        self, count: int = 1, *, api="whole", faults=(), tp: int = 1, limit: float = 30.0, **flags
    ):
        self.fakes = [FakeSglang(TINY, tp=tp, api=api) for _ in range(count)]
        for fake in self.fakes:
            fake.flags = flags
        self.fakes[-1].faults |= set(faults)
        self.stack = ExitStack()
        urls = [self.stack.enter_context(running(fake)) for fake in self.fakes]
        self.engine = SglangEngine(
            [SglangClient(u, request_limit=limit, control_limit=limit) for u in urls]
        )
        self.stack.callback(self.engine.close)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stack.close()


@pytest.fixture(params=["whole", "streamed"])
def api(request):
    """The adapter interface of the servers."""
    return request.param


def sync(cluster, state, **kwargs):
    probe = record_probe(cluster.engine, TOKENS)
    trainer = kwargs.pop("trainer", lambda t: fake_logprobs(t, state.digest))
    return push_and_verify(state, cluster.engine, probe, trainer, **kwargs)


@pytest.fixture(scope="module")
def state():
    return random_state(tiny_selection(), version=1)


def test_it_is_a_rollout_engine_and_takes_adapters_back():
    with Cluster() as cluster:
        assert isinstance(cluster.engine, RolloutEngine)
        assert isinstance(cluster.engine, Revocable)


def test_push_generate_and_score(state, api):
    with Cluster(api=api) as cluster:
        report = sync(cluster, state)
        assert report.receipt.digest == state.digest
        assert report.receipt.num_tensors == 86
        assert report.mean_difference == 0
        requests = [Request(TOKENS, PARAMS, n=3), Request((4, 4), PARAMS)]
        samples = cluster.engine.generate(requests, state.ref())
        assert [s.prompt_ids for s in samples] == [TOKENS] * 3 + [(4, 4)]
        assert len({s.response_ids for s in samples[:3]}) == 3, "each sample has its own seed"
        for sample in samples:
            assert sample.adapter == state.ref()
            whole = list(sample.prompt_ids + sample.response_ids)
            expected = fake_logprobs(whole, state.digest)[len(sample.prompt_ids) - 1 :]
            np.testing.assert_array_equal(np.float32(sample.logprobs), expected)
            stopped = sample.response_ids[-1] in PARAMS.stop_token_ids
            assert sample.finish is (Finish.STOP if stopped else Finish.LENGTH)
        assert cluster.engine.generate(requests, state.ref()) == samples


def test_every_request_names_its_adapter(state):
    with Cluster() as cluster:
        sync(cluster, state)
        cluster.engine.generate([Request(TOKENS, PARAMS, n=2)], state.ref())
        cluster.engine.generate([Request(TOKENS, PARAMS)], BASE)
        named = [b["lora_path"] for p, b in cluster.fakes[0].requests if p == "/generate"]
        served = cluster.fakes[0].loaded_ever[0]
        assert named == [[None], [served], [served, served], [None]]
        with pytest.raises(TypeError, match="lora_path"):
            SglangClient("http://x").generate([TOKENS], [{}])  # pyright: ignore


def test_only_loaded_versions_are_served(state):
    with Cluster() as cluster:
        with pytest.raises(RolloutError, match="version 1 is not loaded; expected one of: none"):
            cluster.engine.generate([Request(TOKENS, PARAMS)], state.ref())
        sync(cluster, state)
        with pytest.raises(RolloutError, match=r"version 2 is not loaded.*'policy' version 1"):
            cluster.engine.score([TOKENS], AdapterRef("policy", 2))
        with pytest.raises(SyncError, match="loaded already"):
            cluster.engine.push(state)


def test_at_most_two_versions_are_loaded_each_under_its_own_name(api):
    with Cluster(2, api=api) as cluster:
        for version in range(1, 6):
            sync(cluster, random_state(tiny_selection(), version=version, seed=version))
        for fake in cluster.fakes:
            assert fake.most_loaded == 2
            assert len(set(fake.loaded_ever)) == 5
            assert fake.version == fake.loaded_ever[-1]
        cluster.engine.score([TOKENS], AdapterRef("policy", 4))
        with pytest.raises(RolloutError, match="version 3 is not loaded"):
            cluster.engine.score([TOKENS], AdapterRef("policy", 3))
    assert all(fake.adapters == {} for fake in cluster.fakes), "close takes our adapters back"


def test_an_old_version_is_unloaded_after_its_last_request(api):
    states = [random_state(tiny_selection(), version=v, seed=v) for v in (1, 2, 3)]
    with Cluster(api=api, faults=["slow"]) as cluster:
        cluster.engine.push(states[0])
        cluster.engine.push(states[1])
        got = []
        thread = threading.Thread(
            target=lambda: got.extend(
                cluster.engine.generate([Request(TOKENS, PARAMS)], states[0].ref())
            )
        )
        thread.start()
        time.sleep(0.1)
        cluster.engine.push(states[2])
        thread.join()
        whole = list(TOKENS + got[0].response_ids)
        expected = fake_logprobs(whole, states[0].digest)[len(TOKENS) - 1 :]
        np.testing.assert_array_equal(np.float32(got[0].logprobs), expected)


def test_requests_are_spread_over_all_servers(state):
    with Cluster(3) as cluster:
        sync(cluster, state)
        cluster.engine.generate([Request(TOKENS, PARAMS)] * 6, state.ref())
        counts = [
            sum(p == "/generate" and "max_new_tokens" in str(b) for p, b in f.requests)
            for f in cluster.fakes
        ]
        assert min(counts) >= 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", "no memory for another adapter"),
        ("success false with 200", "rank 1 failed"),
        ("accepts nothing", "received digest|expected manifest"),
        ("drops one tensor", "received digest|expected manifest"),
        ("version refused", "Failed to update weight version"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_push_that_did_not_arrive_stops_and_leaves_no_server_with_it(
    state, fault, message, count, api
):
    old = random_state(tiny_selection(), version=0, seed=8)
    with Cluster(count, api=api) as cluster:
        sync(cluster, old)
        cluster.fakes[-1].faults.add(fault)
        with pytest.raises(SyncError, match=message):
            sync(cluster, state)
        served = cluster.fakes[0].loaded_ever[:1]
        assert [list(fake.adapters) for fake in cluster.fakes] == [served] * count
        assert [fake.stream.session for fake in cluster.fakes] == [None] * count
        cluster.fakes[-1].faults.clear()
        np.testing.assert_array_equal(
            cluster.engine.score([TOKENS], old.ref())[0], fake_logprobs(TOKENS, old.digest)
        )


@pytest.mark.parametrize("count", [1, 2])
def test_after_a_failed_push_the_old_version_goes_on_sampling(state, count, api):
    old = random_state(tiny_selection(), version=0, seed=8)
    requests = [Request(TOKENS, PARAMS)] * count
    with Cluster(count, api=api) as cluster:
        sync(cluster, old)
        before = cluster.engine.generate(requests, old.ref())
        with pytest.raises(SyncError, match="trainer and engine differ"):
            sync(cluster, state, trainer=lambda t: fake_logprobs(t, "another adapter"))
        assert cluster.engine.generate(requests, old.ref()) == before
        cluster.fakes[-1].faults.add("refuse")
        with pytest.raises(SyncError, match="no memory"):
            sync(cluster, random_state(tiny_selection(), version=2))
        assert cluster.engine.generate(requests, old.ref()) == before


def test_one_silent_rank_of_two_is_a_timeout_not_a_hang(state, api):
    with Cluster(api=api, tp=2, limit=0.5) as cluster:
        sync(cluster, state)
        cluster.fakes[0].faults.add("one rank silent")
        start = time.monotonic()
        with pytest.raises(SyncError, match="Timeout"):
            sync(cluster, random_state(tiny_selection(), version=2))
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("fault", ["serves the base", "keeps the old version", "nan"])
def test_a_server_that_serves_something_else_is_found_by_the_probe(state, fault, api):
    with Cluster(api=api) as cluster:
        sync(cluster, random_state(tiny_selection(), version=0, seed=8))
        probe = record_probe(cluster.engine, TOKENS)
        cluster.fakes[0].faults.add(fault)
        with pytest.raises(SyncError, match=r"trainer and engine differ|not finite"):
            push_and_verify(state, cluster.engine, probe, lambda t: fake_logprobs(t, state.digest))
        assert len(cluster.fakes[0].adapters) == 1, "the new version was taken back"


def test_a_server_that_dies_between_load_and_generate(state, api):
    with Cluster(api=api, limit=5) as cluster:
        probe = record_probe(cluster.engine, TOKENS)
        cluster.fakes[0].faults.add("dies after load")
        with pytest.raises(SyncError, match=r"did not arrive|did not take"):
            push_and_verify(state, cluster.engine, probe, lambda t: fake_logprobs(t, state.digest))


@pytest.mark.parametrize(("fault", "message"), [("500", "status 500"), ("reset", "failed 3 times")])
def test_a_server_that_keeps_failing_gives_no_sample(state, fault, message):
    with Cluster() as cluster:
        sync(cluster, state)
        cluster.fakes[0].faults.add(fault)
        with pytest.raises(RolloutError, match=message):
            cluster.engine.generate([Request(TOKENS, PARAMS)], state.ref())


def test_passing_failures_are_retried(state):
    with Cluster() as cluster:
        sync(cluster, state)
        before = cluster.engine.generate([Request(TOKENS, PARAMS)], state.ref())
        cluster.fakes[0].requests.clear()
        cluster.fakes[0].faults.add("500 twice")
        assert cluster.engine.generate([Request(TOKENS, PARAMS)], state.ref()) == before
        assert len(cluster.fakes[0].requests) == 3


def test_answers_under_another_version_are_refused(state):
    with Cluster() as cluster:
        sync(cluster, state)
        cluster.fakes[0].faults.add("wrong version")
        with pytest.raises(RolloutError, match="under version 'old'"):
            cluster.engine.generate([Request(TOKENS, PARAMS)], state.ref())


def test_aborted_samples_say_so(state):
    with Cluster(faults=["aborts"]) as cluster:
        cluster.engine.push(state)
        (sample,) = cluster.engine.generate([Request(TOKENS, PARAMS)], state.ref())
        assert sample.finish is Finish.ABORT


def test_capabilities_come_from_the_server(state):
    with Cluster() as cluster:
        capabilities = cluster.engine.capabilities()
        assert (capabilities.engine, capabilities.version) == ("sglang", "0.5.23")
        assert (capabilities.max_rank, capabilities.dtype) == (8, "float32")
        assert {"f_a_proj", "q_proj", "kv_a_proj_with_mqa"} <= capabilities.target_leaves
        cluster.engine.require_plugin(TINY)
        with pytest.raises(SyncError, match=r"rank 9.*at most 8"):
            cluster.engine.push(random_state(tiny_selection(rank=9)))


@pytest.mark.parametrize(
    ("fault", "message"), [("no plugin", "not active"), ("one module lost", "wraps 31 modules")]
)
def test_the_plugin_must_be_there_and_whole(fault, message):
    with Cluster(faults=[fault]) as cluster, pytest.raises(RolloutError, match=message):
        cluster.engine.require_plugin(TINY)


def test_servers_without_adapters_or_that_differ_are_refused():
    with pytest.raises(RolloutError, match="serves no adapters"):
        Cluster(faults=["no lora"])
    with ExitStack() as stack:
        fakes = [FakeSglang(TINY, rank=8), FakeSglang(TINY, rank=4)]
        urls = [stack.enter_context(running(f)) for f in fakes]
        with pytest.raises(RolloutError, match="max_rank is 4 at"):
            SglangEngine([SglangClient(u) for u in urls])
    with pytest.raises(RolloutError, match="ConnectError"):
        SglangEngine([SglangClient("http://127.0.0.1:9")])


def test_memory_is_released_only_where_it_comes_back(state):
    with Cluster() as cluster, pytest.raises(RolloutError, match="--enable-weights-cpu-backup"):
        cluster.engine.release()
    with Cluster(enable_memory_saver=True, enable_weights_cpu_backup=True) as cluster:
        sync(cluster, state)
        probe = record_probe(cluster.engine, TOKENS)
        cluster.engine.release()
        assert cluster.fakes[0].released
        with pytest.raises(RolloutError, match="released"):
            cluster.engine.generate([Request(TOKENS, PARAMS)], state.ref())
        cluster.engine.resume()
        assert not cluster.fakes[0].released
        check_base(cluster.engine, probe)


def test_ranks_per_group_are_padded_for_the_server():
    state = random_state(mixed_ranks("kda"))
    with Cluster() as cluster:
        receipt = cluster.engine.push(state)
        assert receipt.digest == state.digest
        body = next(b for p, b in cluster.fakes[0].requests if "from_tensors" in p)
        assert (body["config_dict"]["r"], body["config_dict"]["lora_alpha"]) == (4, 8)


def test_one_copy_per_rank_travels(state, api):
    with Cluster(api=api, tp=2) as two, Cluster(api=api) as one:
        ratio = two.engine.push(state).bytes / one.engine.push(state).bytes
        assert 1.9 < ratio < 2.0


def test_routed_experts_are_decoded_and_checked():
    everything = np.arange(6 * 4 * 2, dtype=np.int32).reshape(6, 4, 2)
    encoded = base64.b64encode(everything.tobytes()).decode()
    got = routed_experts(encoded, 7, TINY)
    np.testing.assert_array_equal(got, everything[:, 3:])
    with pytest.raises(RolloutError, match=r"48 routed experts; expected \(7, 4, 2\)"):
        routed_experts(encoded, 8, TINY)


def test_attach_checks_the_plugin_and_leaves_the_server_running(state):
    fake = FakeSglang(TINY)
    with running(fake) as url:
        engine = attach_engine([url + "/"], TINY)
        engine.push(state)
        engine.close()
        assert fake.adapters == {}
        fake.faults.add("no plugin")
        with pytest.raises(RolloutError, match="not active"):
            attach_engine([url], TINY)


def test_a_closed_engine_says_so(state):
    with Cluster() as cluster:
        cluster.engine.close()
        with pytest.raises(RolloutError, match="closed"):
            cluster.engine.score([TOKENS], BASE)
