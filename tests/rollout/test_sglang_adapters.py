"""Which adapter interface is chosen from a server's routes, and what only the streamed one does."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from glm_lora.arch.spec import TINY
from glm_lora.errors import RolloutError, SyncError
from glm_lora.protocols import BASE, Request, SamplingParams
from glm_lora.rollout.sglang import SglangEngine, attach_engine
from glm_lora.rollout.sglang_adapters import (
    BEGIN_ROUTE,
    END_ROUTE,
    REGISTER_ROUTE,
    STREAM_ROUTES,
)
from glm_lora.rollout.sglang_client import Refused, SglangClient
from glm_lora.rollout.sglang_payload import (
    STREAM_ROUTE,
    TENSORS_ROUTE,
    stream_request,
    tensor_checksums,
)
from glm_lora.sync.push import push_and_verify, record_probe
from tests.rollout.fake_sglang import FakeSglang, fake_logprobs, running
from tests.tiny_checkpoint import mixed_ranks, random_state, tiny_selection

pytestmark = pytest.mark.usefixtures("short_pauses")
TOKENS = (3, 5, 7, 11, 13)


@pytest.fixture(scope="module")
def state():
    return random_state(tiny_selection(), version=1)


@contextmanager
def engine_over(*fakes, **kwargs):
    with ExitStack() as stack:
        urls = [stack.enter_context(running(fake)) for fake in fakes]
        clients = [SglangClient(url, request_limit=10, control_limit=10) for url in urls]
        engine = SglangEngine(clients, **kwargs)
        stack.callback(engine.close)
        yield engine


def connect(*fakes):
    with engine_over(*fakes):
        pass


def sync(engine, state, key=None):
    probe = record_probe(engine, TOKENS)
    return push_and_verify(state, engine, probe, lambda t: fake_logprobs(t, key or state.digest))


def posted(fake, *paths):
    return [(path, body) for path, body in fake.requests if path in paths]


@pytest.mark.parametrize(
    ("api", "chosen"),
    [("whole", TENSORS_ROUTE), ("streamed", REGISTER_ROUTE), ("both", TENSORS_ROUTE)],
)
@pytest.mark.parametrize("described", [True, False])
def test_the_interface_is_the_one_whose_routes_the_server_has(
    state, api, chosen, described, caplog
):
    caplog.set_level(logging.INFO, "glm_lora")
    fake = FakeSglang(TINY, api=api)
    if not described:
        fake.faults.add("no description")
    with engine_over(fake) as engine:
        assert engine.capabilities().api == chosen.lstrip("/")
        fake.requests.clear()
        assert sync(engine, state).receipt.num_tensors == 86
        used = {path for path, _ in posted(fake, TENSORS_ROUTE, *STREAM_ROUTES)}
        assert used == ({TENSORS_ROUTE} if chosen == TENSORS_ROUTE else STREAM_ROUTES)
    said = "both adapter interfaces" if api == "both" else "are streamed"
    assert (said in caplog.text) == (api != "whole")


def test_a_server_without_either_interface_is_refused_with_what_it_lacks():
    with pytest.raises(RolloutError, match=r"no interface that takes adapters.*/register_lora"):
        connect(FakeSglang(TINY, api="none"))


def test_servers_with_different_interfaces_are_refused():
    class Half(FakeSglang):
        def server_info(self):
            return FakeSglang(TINY).server_info()

    fakes = FakeSglang(TINY), Half(TINY, api="streamed")
    with pytest.raises(RolloutError, match="takes adapters by register_lora_adapter"):
        connect(*fakes)


def test_the_stream_leaves_the_base_alone_and_names_every_tensor(state):
    fake = FakeSglang(TINY, api="streamed", tp=2)
    with engine_over(fake) as engine:
        fake.requests.clear()
        engine.push(state)
        served = fake.loaded_ever[0]
        calls = posted(fake, *STREAM_ROUTES, "/update_weight_version")
        assert [path for path, _ in calls] == [
            REGISTER_ROUTE,
            BEGIN_ROUTE,
            STREAM_ROUTE,
            END_ROUTE,
            "/update_weight_version",
        ]
        register, begin, update, end, version = (body for _, body in calls)
        assert register["lora_name"] == version["new_version"] == served
        assert (register["config_dict"]["r"], register["config_dict"]["lora_alpha"]) == (4, 8)
        assert begin == {"sync_base": False}
        assert not fake.base_touched
        assert update["flush_cache"] is False
        assert len(update["serialized_named_tensors"]) == 2
        assert end == {"expected_lora_checksums": {served: tensor_checksums(state.tensors)}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_bytes_are_exact(dtype):
    state = random_state(tiny_selection(), dtype=dtype)
    request = stream_request("a-1", state.tensors, copies=2)
    body = json.loads(b"".join(request.chunks))
    assert request.num_bytes == len(b"".join(request.chunks))
    for copy in body["serialized_named_tensors"]:
        pairs = pickle.loads(base64.b64decode(copy, validate=True))
        assert [name for name, _ in pairs] == [f"a-1:{key}" for key in state.tensors]
        assert all(torch.equal(t, state.tensors[n.split(":", 1)[1]]) for n, t in pairs)


@pytest.mark.parametrize(
    ("fault", "message", "aborted"),
    [
        ("stream breaks", "500", 1),
        ("accepts nothing", "expected manifest", 0),
        ("drops one tensor", "expected manifest", 0),
        ("success false with 200", "rank 1 failed", 0),
    ],
)
@pytest.mark.parametrize("staged", [True, False])
def test_a_session_that_failed_leaves_nothing_behind(state, staged, fault, message, aborted):
    old = random_state(tiny_selection(), version=0, seed=8)
    fake = FakeSglang(TINY, api="streamed", staged=staged)
    with engine_over(fake) as engine:
        sync(engine, old)
        fake.faults.add(fault)
        with pytest.raises(SyncError, match=message):
            engine.push(state)
        assert fake.stream.aborted == aborted
        assert fake.stream.session is None
        assert list(fake.adapters) == fake.loaded_ever[:1]
        fake.faults.clear()
        assert sync(engine, state).mean_difference == 0, "the next session is not in its way"


def test_a_server_that_does_not_compare_checksums_is_refused_at_once():
    fake = FakeSglang(TINY, api="streamed")
    fake.faults.add("ignores checksums")
    with pytest.raises(RolloutError, match="accepts the checksums of an adapter that was never"):
        connect(fake)
    assert fake.stream.session is None


def test_a_session_that_someone_else_has_open_is_left_to_them(state):
    fake = FakeSglang(TINY, api="streamed")
    with engine_over(fake) as engine:
        fake.stream.begin({"sync_base": False})
        with pytest.raises(SyncError, match="session is already open"):
            engine.push(state)
        assert fake.stream.session is not None
        assert fake.stream.aborted == 0
    with pytest.raises(RolloutError, match=r"already open.*no one else is updating"):
        connect(fake)


def test_a_session_that_may_have_opened_without_an_answer_is_ended(state):
    class Mute(FakeSglang):
        def respond(self, method, path, body):
            status, reply = super().respond(method, path, body)
            mute = "mute" in self.faults and path == BEGIN_ROUTE
            return (502, {"error": "bad gateway"}) if mute else (status, reply)

    fake = Mute(TINY, api="streamed")
    with engine_over(fake) as engine:
        fake.faults.add("mute")
        with pytest.raises(SyncError, match="502"):
            engine.push(state)
        assert fake.stream.session is None
        assert fake.adapters == {}


def test_ranks_per_group_are_padded_in_the_stream():
    state = random_state(mixed_ranks("kda"))
    fake = FakeSglang(TINY, api="streamed")
    with engine_over(fake) as engine:
        assert engine.push(state).digest == state.digest
        update = posted(fake, STREAM_ROUTE)[-1][1]["serialized_named_tensors"][0]
        for name, tensor in pickle.loads(base64.b64decode(update)):
            assert tensor.shape[0 if ".lora_A." in name else 1] == 4


def test_a_zero_adapter_is_streamed_and_answers_as_the_base():
    state = random_state(tiny_selection(), version=0, zero_b=True)
    fake = FakeSglang(TINY, api="streamed")
    with engine_over(fake) as engine:
        # The fake knows an adapter by its bytes; zero B adds nothing, so it answers as the base.
        fake.stream.server.base = state.digest
        sync(engine, state, key=state.digest)
        assert list(fake.adapters.values()) == [(state.digest, 86)]


@pytest.mark.parametrize("api", ["whole", "streamed"])
def test_two_versions_must_fit_into_the_server(state, api):
    with pytest.raises(RolloutError, match=r"holds 1 adapters \(--max-loaded-loras\)"):
        connect(FakeSglang(TINY, api=api, max_loaded=1))
    with engine_over(FakeSglang(TINY, api=api, max_loaded=2)) as engine:
        for version in range(4):
            sync(engine, random_state(tiny_selection(), version=version, seed=version))


def test_a_full_server_refuses_a_new_name_and_says_why(state):
    fake = FakeSglang(TINY, api="streamed", max_loaded=2)
    fake.adapters = {"of-another": ("x", 1), "of-a-third": ("y", 1)}
    with engine_over(fake) as engine, pytest.raises(SyncError, match="max-loaded-loras"):
        engine.push(state)


def test_a_name_with_a_colon_cannot_be_streamed(state):
    with (
        engine_over(FakeSglang(TINY, api="streamed")) as engine,
        pytest.raises(SyncError, match="has a colon"),
    ):
        engine.push(state, name="team:policy")


def test_attached_servers_need_the_plugin_only_where_it_keeps_the_account(state):
    fake = FakeSglang(TINY, api="streamed")
    with running(fake) as url:
        engine = attach_engine([url], TINY)
        try:
            sync(engine, state)
            params = SamplingParams(6, 1.0, (20,), seed=5)
            (sample,) = engine.generate([Request(TOKENS, params)], state.ref())
            whole = list(TOKENS + sample.response_ids)
            expected = fake_logprobs(whole, state.digest)[len(TOKENS) - 1 :]
            np.testing.assert_array_equal(np.float32(sample.logprobs), expected)
        finally:
            engine.close()
        assert fake.adapters == {}


@pytest.mark.parametrize("api", ["whole", "streamed"])
def test_every_server_is_probed_not_only_the_first(state, api):
    fakes = FakeSglang(TINY, api=api), FakeSglang(TINY, api=api)
    with engine_over(*fakes) as engine:
        probe = record_probe(engine, TOKENS)
        fakes[1].faults.add("serves the base")
        with pytest.raises(SyncError, match=r"nats per token away from http"):
            push_and_verify(state, engine, probe, lambda t: fake_logprobs(t, state.digest))
        assert [fake.adapters for fake in fakes] == [{}, {}]


def test_a_server_with_another_base_is_found_before_the_first_adapter():
    fakes = FakeSglang(TINY), FakeSglang(TINY, base="another checkpoint")
    with (
        engine_over(*fakes) as engine,
        pytest.raises(RolloutError, match=r"under the base .* nats per token away"),
    ):
        record_probe(engine, TOKENS)


def test_a_reply_is_a_refusal_only_if_it_says_so():
    fake = FakeSglang(TINY, api="streamed")
    with running(fake) as url:

        async def ask(path, body):
            client = SglangClient(url)
            try:
                return await client.command(path, body)
            finally:
                await client.close()

        with pytest.raises(Refused, match="no weight-update session is open"):
            asyncio.run(ask(END_ROUTE, {}))
        with pytest.raises(RolloutError, match="404"):
            asyncio.run(ask("/nowhere", {}))
        with pytest.raises(RolloutError, match="with success true or false"):
            asyncio.run(ask("/flush_cache", {}))


def test_the_base_is_asked_for_without_a_name(state):
    fake = FakeSglang(TINY, api="streamed")
    with engine_over(fake) as engine:
        sync(engine, state)
        np.testing.assert_array_equal(
            engine.score([TOKENS], BASE)[0], fake_logprobs(TOKENS, "base")
        )
