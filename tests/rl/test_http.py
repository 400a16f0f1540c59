"""HTTP rewards: odd answers of a real server, addresses that cannot work, and what is sent."""

from __future__ import annotations

import datetime
import http.server
import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from glm_lora.errors import DataError
from glm_lora.protocols import Finish
from glm_lora.rl.data import load_prompts
from glm_lora.rl.rewards import Answer, make_reward
from glm_lora.rl.verifiers import HttpReward, file_reward


def answer(response="", metadata=None) -> Answer:
    return Answer("p", response, "5", Finish.STOP, metadata or {})


class _Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the bytes that stand in the response to be scored."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append(body)  # type: ignore[attr-defined]
        reply = json.loads(body)["response"].encode() or b'{"reward": 1}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def url(server):
    return f"http://127.0.0.1:{server.server_port}/score"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ('{"reward": 1' + "0" * 400 + "}", "too large"),
        ('{"reward": 1' + "0" * 5000 + "}", "digits"),
        ("[" * 100_000, "RecursionError"),
        ('{"reward": NaN}', "nan"),
        ('{"reward": 1e999}', "inf"),
        ('{"reward": null}', "NoneType"),
        ("[]", "TypeError"),
        ("7", "TypeError"),
    ],
)
def test_an_odd_answer_costs_that_sample_only(url, reply, why):
    scores = HttpReward(url, 10.0).score([answer(), answer(reply), answer()])
    assert [s.value for s in scores] == [1.0, None, 1.0]
    assert why in scores[1].reason, scores[1].reason


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:0/",
        "http://[::1",
        "http://",
        "http:///score",
        "http://host:port/",
        "http://a..b/",
        "http://" + "a" * 70 + ".com/",
        "http://\x00/",
    ],
)
def test_an_address_that_can_never_work_is_refused_at_once(address):
    with pytest.raises(DataError, match="cannot be called") as error:
        make_reward(address)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "value"), [("HTTP_PROXY", "gopher://x"), ("HTTP_PROXY", "http://x:y")]
)
def test_a_proxy_that_can_never_work_is_refused_at_once(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="cannot be called"):
        make_reward("http://127.0.0.1:8000/")


ODD = {
    "when": datetime.datetime(2024, 5, 6, 7, 8, 9),
    "raw": b"ab",
    "gap": float("nan"),
    "far": [float("inf"), float("-inf"), 0.5],
}
PLAIN = {
    "when": "2024-05-06 07:08:09",
    "raw": "b'ab'",
    "gap": "NaN",
    "far": ["Infinity", "-Infinity", 0.5],
}


def test_metadata_that_json_cannot_spell_reaches_both_kinds_alike(server, url, tmp_path):
    file = tmp_path / "a.parquet"
    row = {"prompt": "p", "label": "5", "metadata": ODD}
    pq.write_table(pa.Table.from_pylist([row]), file)
    ((prompt,),) = (f.prompts for f in load_prompts([str(file)], lambda text: [1]).files)
    assert HttpReward(url, 10.0).score([answer("", prompt.metadata)])[0].value == 1.0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(server.seen[0], parse_constant=refuse)["metadata"] == PLAIN
    verifier = tmp_path / "verifier.py"
    verifier.write_text(
        "def reward(prompt, response, label, metadata):\n"
        f"    assert metadata == {PLAIN!r}, metadata\n"
        "    return 1\n"
    )
    reward = file_reward(verifier, 10.0, workers=1)
    (score,) = reward.score([answer("", prompt.metadata)])
    reward.close()
    assert score.value == 1.0, score.reason


def test_metadata_of_any_depth_is_sent_or_a_bad_row(url, tmp_path):
    """What is read is also written: neither reward meets a depth that it cannot spell."""
    verifier = tmp_path / "verifier.py"
    verifier.write_text("def reward(prompt, response, label, metadata): return 1\n")
    own = file_reward(verifier, 10.0, workers=1)
    for depth, usable in ((200, True), (600, None), (100_000, False)):
        file = tmp_path / f"{depth}.jsonl"
        deep = '{"k": ' * depth + "1" + "}" * depth
        file.write_text(
            '{"prompt": "p", "label": "5"}\n'
            f'{{"prompt": "p", "label": "5", "metadata": {deep}}}\n'
        )
        data = load_prompts([str(file)], lambda text: [1], skip_bad_rows=True)
        assert usable is None or len(data) == 1 + usable
        assert all("nested too deeply" in bad.reason for bad in data.bad_rows)
        answers = [answer("", prompt.metadata) for prompt in data.files[0].prompts]
        for reward in (HttpReward(url, 10.0), own):
            assert all(s.value == 1.0 for s in reward.score(answers))
    own.close()


def test_text_that_is_no_unicode_can_be_sent(url):
    assert HttpReward(url, 10.0).score([answer("", {"k": "\ud800"})])[0].value == 1.0
