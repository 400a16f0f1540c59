"""A real SGLang server on CPU with a tiny llama: client, sync protocol, versions, refusals."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from glm_lora.errors import RolloutError, SyncError
from glm_lora.lora.serving import serving_config
from glm_lora.protocols import BASE, AdapterRef, Finish, Request, SamplingParams
from glm_lora.rollout import sglang_server
from glm_lora.rollout.sglang import SglangEngine
from glm_lora.rollout.sglang_adapters import REGISTER_ROUTE, ROUTES, StreamedApi
from glm_lora.rollout.sglang_client import SglangClient
from glm_lora.rollout.sglang_info import read_routes
from glm_lora.rollout.sglang_payload import request_with_bytes
from glm_lora.rollout.sglang_server import SglangServer
from glm_lora.sync.push import check_base, push_and_verify, record_probe
from tests.merged_model import MergedModel
from tests.rollout import record_sglang
from tests.rollout.sglang_support import (
    PYTHON,
    llama_checkpoint,
    llama_options,
    llama_selection,
)
from tests.rollout.test_sglang_replies import REAL, assert_alike, shape
from tests.support import close
from tests.tiny_checkpoint import random_state

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON.exists(), reason="run make sglang-env first"),
    pytest.mark.timeout(600),
]
TOKENS = tuple(range(5, 25))
FP32 = "two fp32 implementations of one llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def server(folder):
    patch = pytest.MonkeyPatch()
    # A llama needs no glm5_next configuration.
    patch.setattr(sglang_server, "serving_view", lambda checkpoint, view: checkpoint)
    server = SglangServer(llama_options(folder / "work", llama_checkpoint(folder / "base")))
    try:
        server.wait(480)
        yield server
    finally:
        server.stop()
        patch.undo()


@pytest.fixture(scope="module")
def trainer(server, folder):
    return MergedModel(folder / "base")


@pytest.fixture(params=["bytes", "folder"])
def engine(server, request):
    engine = SglangEngine([SglangClient(server.url)], transport=request.param)
    yield engine
    engine.close()


def test_push_probe_generate_score_and_unload(engine, trainer):
    probe = record_probe(engine, TOKENS)
    close(probe.base_logprobs, trainer.logprobs(TOKENS), FP32, atol=1e-4)
    for version in (1, 2, 3):
        state = random_state(llama_selection(), version=version, seed=version)

        def expected(tokens, state=state):
            return trainer.logprobs(tokens, state)

        report = push_and_verify(state, engine, probe, expected)
        assert report.max_difference < 1e-4
        assert report.receipt.num_tensors == 28
    # The llama's own end of text, 2, is among them: SGLang stops there whatever is asked for.
    stops = {2, *range(0, 128, 3)}
    stop = SamplingParams(12, 0.7, tuple(stops))
    samples = engine.generate([Request(TOKENS, stop, n=4), Request((9, 8), stop)], state.ref())
    assert [s.prompt_ids for s in samples] == [TOKENS] * 4 + [(9, 8)]
    for sample in samples:
        whole = sample.prompt_ids + sample.response_ids
        at = len(sample.prompt_ids) - 1
        scored = trainer.logprobs(whole, state, temperature=0.7)[at:]
        close(np.array(sample.logprobs), scored, FP32 + ", at the sampling temperature", atol=1e-4)
        ended = [t in stops for t in sample.response_ids]
        assert not any(ended[:-1]), "nothing is sampled after a stop token"
        assert (sample.finish is Finish.STOP) == ended[-1], "the stop token is the last one"
    old = AdapterRef("policy", 2)
    close(
        engine.score([TOKENS], old)[0],
        trainer.logprobs(TOKENS, random_state(llama_selection(), version=2, seed=2)),
        "the version before is still loaded, " + FP32,
        atol=1e-4,
    )
    with pytest.raises(RolloutError, match="version 1 is not loaded"):
        engine.score([TOKENS], AdapterRef("policy", 1))
    check_base(engine, probe)


def test_capabilities_are_read(engine):
    capabilities = engine.capabilities()
    assert (capabilities.version, capabilities.dtype) == ("0.5.23", "float32")
    assert capabilities.max_rank == 4
    assert "gate_proj" in capabilities.target_leaves
    assert engine.info.plugin["version"], "the plugin reports from inside the scheduler"
    assert not engine.info.verifies, "but it does not concern itself with a llama"


async def with_client(server, work):
    client = SglangClient(server.url)
    try:
        return await work(client)
    finally:
        await client.close()


def test_routes_are_found_in_the_description_and_by_asking(server, engine):
    async def both(client):
        described = await read_routes(client, ROUTES)
        return described, {path for path in ROUTES if await client.takes_post(path)}

    described, asked = asyncio.run(with_client(server, both))
    assert described == asked == ROUTES - {REGISTER_ROUTE}
    assert engine.capabilities().api == "load_lora_adapter_from_tensors"


def test_sessions_that_ignore_checksums_are_not_enough_to_stream(server, engine):
    """This SGLang has sessions and drops the fields it does not know: just what must be noticed."""
    before = engine.score([TOKENS], BASE)[0]
    with pytest.raises(RolloutError, match="accepts the checksums of an adapter that was never"):
        asyncio.run(with_client(server, StreamedApi(1, "llama").check))
    with pytest.raises(SyncError, match="no weight-update session is open"):
        asyncio.run(with_client(server, lambda client: client.command("/end_weight_update", {})))
    assert np.array_equal(engine.score([TOKENS], BASE)[0], before)


def test_the_server_itself_refuses_what_we_must_not_send(engine):
    state = random_state(llama_selection(rank=8), version=7)
    with pytest.raises(SyncError, match=r"rank 8.*at most 4"):
        engine.push(state)


def test_a_checksum_mismatch_is_refused_and_the_server_goes_on(server, engine):
    """Stock SGLang ends here; the plugin turns the exception into a refusal."""
    state = random_state(llama_selection(), version=1)
    config = serving_config(state.selection, "llama")
    request = request_with_bytes("mismatch", state.tensors, config, checksums=True)
    head, rest = request.chunks[0], request.chunks[1:]
    start = head.index(b'"expected_checksums"')
    digest = head[start:].split(b'": "')[1][:64]
    body = head.replace(digest, b"0" * 64) + b"".join(rest)
    status, reply = record_sglang.call(server.url, request.path, body)
    assert status == 400
    assert "MISMATCH" in reply["error_message"]
    assert engine.score([TOKENS], BASE)[0].shape == (len(TOKENS) - 1,)


def test_the_recorded_replies_are_still_the_real_ones(server):
    now = json.loads(json.dumps(record_sglang.main(server.url)))
    assert now.keys() == REAL.keys()
    for name, (status, reply) in now.items():
        assert status == REAL[name][0], name
        for answer in (reply, REAL[name][1]):
            if isinstance(answer, dict):
                answer.pop("loaded_adapters", None)
        assert_alike(shape(REAL[name][1]), shape(reply), name)
