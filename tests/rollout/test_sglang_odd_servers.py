"""Servers and addresses the engine was not made for: each is refused, with its reason."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from glm_lora.arch.spec import TINY
from glm_lora.errors import ConfigError, RolloutError, SyncError
from glm_lora.protocols import AdapterRef, Capabilities, Request, SamplingParams
from glm_lora.rollout.agreement import check_agreement
from glm_lora.rollout.sglang import SglangEngine, attach_engine
from glm_lora.rollout.sglang_client import SglangClient, server_urls
from glm_lora.sync.push import push_and_verify, record_probe
from tests.rollout.fake_sglang import FakeSglang, fake_logprobs, running
from tests.tiny_checkpoint import random_state, tiny_selection

pytestmark = pytest.mark.usefixtures("short_pauses")
TOKENS = (3, 5, 7, 11, 13)


@pytest.fixture
def attach():
    """Attach to fake servers until the test ends."""
    with ExitStack() as stack:

        def start(*fakes):
            urls = [stack.enter_context(running(fake)) for fake in fakes]
            engine = attach_engine(urls, TINY)
            stack.callback(engine.close)
            return engine

        yield start


class Answering(FakeSglang):
    """Changes what it says of itself."""

    def __init__(self, change, **kwargs):
        super().__init__(TINY, **kwargs)
        self.change = change

    def server_info(self):
        info = super().server_info()
        return self.change(info) or info


def overwrite(**values):
    def change(info):
        info.update(values)
        for state in info["internal_states"]:
            state.update(values)

    return change


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host:30000/", "http://host:30000"),
        (" HTTPS://Host:30000 ", "https://host:30000"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("http://host/engine/0/", "http://host/engine/0"),
    ],
)
def test_addresses_are_taken_as_people_write_them(text, url):
    assert server_urls([text]) == [url]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([""], "'' is no server's URL"),
        (["host:30000"], "'host:30000' is no server's URL"),
        (["http://"], "is no server's URL"),
        (["http://host:port"], "is no server's URL"),
        (["http://host:99999"], "is no server's URL"),
        (["ftp://host"], "is no server's URL"),
        (["http://host/?x=1"], "is no server's URL"),
        (["http://a:1 http://b:1"], "is no server's URL"),
        (["http://host\x00"], "is no server's URL"),
        (["http://me:secret@host:1"], "carries a password"),
        (["http://host:1", "http://HOST:1/"], "http://host:1 is named twice"),
        (["http://host:80", "http://host"], "http://host is named twice"),
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_asked(texts, message):
    with pytest.raises(ConfigError, match=message) as caught:
        attach_engine(texts, TINY)
    assert "secret" not in str(caught.value)


def test_a_path_in_the_address_is_kept():
    class Prefixed(FakeSglang):
        def respond(self, method, path, body):
            assert path.startswith("/engine/0/")
            return super().respond(method, path.removeprefix("/engine/0"), body)

    with running(Prefixed(TINY)) as url:
        engine = attach_engine([url + "/engine/0"], TINY)
        engine.push(random_state(tiny_selection()))
        engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: ["a", "list"], "the answer of an SGLang server"),
        (lambda info: "text", "the answer of an SGLang server"),
        (lambda info: info.pop("version") and None, "lacks KeyError"),
        (overwrite(max_lora_rank=None), "the answer of an SGLang server"),
        (overwrite(dtype="float16"), r"computes in float16; expected one of float32, bfloat16"),
        (overwrite(glm_lora_plugin=["odd"]), "the glm-lora plugin is not active"),
        (overwrite(max_loaded_loras=1), "holds 1 adapters"),
    ],
)
def test_a_server_that_describes_itself_oddly_is_refused(attach, change, message):
    with pytest.raises(RolloutError, match=message):
        attach(Answering(change))


def test_a_dtype_is_known_by_its_torch_name_too(attach):
    engine = attach(Answering(overwrite(dtype="torch.bfloat16")))
    assert engine.capabilities().dtype == "bfloat16"


def test_targets_given_as_one_word_are_one_target(attach):
    engine = attach(Answering(overwrite(lora_target_modules="all")))
    probe = record_probe(engine, TOKENS)
    with pytest.raises(SyncError, match=r"does not adapt .*expected some of all.*target-modules"):
        push_and_verify(random_state(tiny_selection()), engine, probe, lambda t: None)


def test_a_tensor_parallel_server_gets_a_copy_for_each_rank(attach):
    fake = FakeSglang(TINY, tp=4)
    engine = attach(fake)
    engine.push(random_state(tiny_selection()))
    body = next(b for p, b in fake.requests if "from_tensors" in p)
    assert len(body["serialized_named_tensors"]) == 4
    with pytest.raises(RolloutError, match="tensor_parallel is 1 at"):
        attach(FakeSglang(TINY, tp=4), FakeSglang(TINY, tp=1))


@pytest.mark.parametrize("first", [True, False])
def test_every_server_must_have_the_plugin(attach, first):
    fakes = [FakeSglang(TINY), FakeSglang(TINY)]
    fakes[0 if first else 1].faults.add("no plugin")
    with pytest.raises(RolloutError, match=r"verifies is|plugin is not active"):
        attach(*fakes)
    fakes[0 if first else 1].faults = {"one module lost"}
    with pytest.raises(RolloutError, match="wraps 31 modules"):
        attach(*fakes)


class ZeroIsBase:
    """The fake knows adapters by their bytes; a real server answers as its base under a zero B."""

    def __init__(self, engine, answer):
        self._engine, self._answer = engine, answer

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def score(self, sequences, adapter):
        self._engine.score(sequences, adapter)
        return [self._answer]


@pytest.mark.parametrize("api", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("base", "answer", "message"),
    [
        ("another checkpoint", "another checkpoint", r"adapter is zero.*the bases differ"),
        ("base", "another adapter", r"adapter is zero, yet .*it serves another"),
    ],
)
def test_a_wrong_answer_under_the_first_adapter_says_what_is_wrong(
    attach, api, base, answer, message
):
    engine = attach(FakeSglang(TINY, api=api, base=base))
    probe = record_probe(engine, TOKENS)
    served = ZeroIsBase(engine, fake_logprobs(TOKENS, answer))
    state = random_state(tiny_selection(), version=0, zero_b=True)
    with pytest.raises(SyncError, match=message):
        push_and_verify(state, served, probe, lambda t: fake_logprobs(t, "base"))


@pytest.mark.parametrize("api", ["whole", "streamed"])
def test_what_must_not_be_sent_is_not_sent(attach, api):
    fake = FakeSglang(TINY, api=api)
    engine = attach(fake)
    probe = record_probe(engine, TOKENS)
    fake.requests.clear()
    broken = random_state(tiny_selection())
    next(iter(broken.tensors.values()))[0, 0] = float("nan")
    with pytest.raises(SyncError, match="not finite"):
        push_and_verify(broken, engine, probe, lambda t: None)
    with pytest.raises(SyncError, match=r"rank 9.*at most 8"):
        push_and_verify(random_state(tiny_selection(rank=9)), engine, probe, lambda t: None)
    assert [path for path, _ in fake.requests] == []


def test_nothing_is_pushed_into_released_memory():
    fake = FakeSglang(TINY)
    fake.flags = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    with running(fake) as url:
        engine = SglangEngine([SglangClient(url)])
        engine.release()
        with pytest.raises(RolloutError, match="released"):
            engine.push(random_state(tiny_selection()))
        engine.resume()
        engine.push(random_state(tiny_selection()))
        engine.close()


class Mangled(FakeSglang):
    """Changes its answers to requests."""

    mangle = staticmethod(lambda reply: None)

    def generate(self, body):
        status, reply = super().generate(body)
        for answer in reply if isinstance(reply, list) else [reply]:
            self.mangle(answer)
        return status, reply


def put(key, value):
    def change(reply):
        reply["meta_info"][key] = value

    return change


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (lambda reply: reply.pop("meta_info"), "sent an answer without KeyError"),
        (put("output_token_logprobs", None), "sent an answer without TypeError"),
        (put("output_token_logprobs", [[None, 3, None]]), "sent an answer without TypeError"),
        (put("output_token_logprobs", [[-1.0, float("inf"), None]]), "OverflowError"),
        (put("output_token_logprobs", [[float("nan"), 3, None]]), "1 of 1 .* not finite"),
        (put("output_token_logprobs", [[-1.0, 3], [-float("inf"), 4]]), "1 of 2 .* not finite"),
        (put("finish_reason", None), "sent an answer without TypeError"),
        (put("finish_reason", "stop"), "sent an answer without TypeError"),
    ],
)
def test_answers_that_are_none_make_no_sample(attach, mangle, message):
    fake = Mangled(TINY)
    engine = attach(fake)
    state = random_state(tiny_selection())
    engine.push(state)
    fake.mangle = mangle
    with pytest.raises(RolloutError, match=message):
        engine.generate([Request(TOKENS, SamplingParams(4))], state.ref())


def test_agreement_compares_everyone_with_the_first():
    ref, one = AdapterRef("policy", 3), np.float32([-1.0, -2.0])
    check_agreement(["a", "b"], [[one, one[:0]], [one + 5e-4, one[:0]]], ref, "float32")
    for other in (one + 0.01, one[:1], one * np.nan):
        with pytest.raises(RolloutError, match=r"c scores .*'policy' version 3"):
            check_agreement(["a", "b", "c"], [[one], [one], [other]], ref, "float32")


def test_capabilities_name_the_interface(attach):
    capabilities = attach(FakeSglang(TINY)).capabilities()
    assert isinstance(capabilities, Capabilities)
    assert capabilities.api == "load_lora_adapter_from_tensors"
