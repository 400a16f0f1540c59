"""Verifiers in real processes and behind a real HTTP server: limits, crashes, fuzz."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_lora.config import RolloutConfig
from glm_lora.errors import ConfigError, DataError
from glm_lora.protocols import Finish
from glm_lora.rl.rewards import Answer, ExactReward, OverlongPenalty, make_reward, reward_of
from glm_lora.rl.verifiers import HttpReward, WorkerReward, file_reward
from tests.support import is_running

HOSTILE = r"\boxed{2003^{2002^{2001}}}"


def answer(response="", label="5", **fields) -> Answer:
    return Answer("p", response, label, Finish.STOP, **fields)


@pytest.fixture(scope="module")
def math_reward():
    reward = make_reward("math", 3.0)
    yield reward
    reward.close()


def test_math_and_dapo_by_name(math_reward):
    scores = math_reward.score([answer(r"\boxed{5}"), answer("5"), answer(r"\boxed{10/2}")])
    assert [s.value for s in scores] == [1.0, 0.0, 1.0]
    assert scores[0].parts == {"accuracy": 1.0, "format": 1.0}
    dapo = make_reward("dapo")
    scores = dapo.score([answer("Answer: 5"), answer("Answer: 6"), answer("x</think>Answer: 5.0")])
    assert [s.value for s in scores] == [1.0, -1.0, 1.0]
    dapo.close()


def test_unfinished_thinking_is_no_answer(math_reward):
    texts = [r"\boxed{5}", r"so</think>\boxed{5}", r"\boxed{5}</think>so"]
    scores = math_reward.score([answer(t, thinking=True) for t in texts])
    assert [s.value for s in scores] == [0.0, 1.0, 0.0]


def test_labels_are_checked_when_data_is_loaded(math_reward):
    for good in ("5", "-3.25", r"\frac{1}{2}", "x+1", "(1, 2)"):
        assert math_reward.check_label(good) is None
    for bad in ("$$", "\\boxed{}", "x" * 2000):
        assert math_reward.check_label(bad)


def test_a_hanging_answer_costs_itself_only():
    reward = WorkerReward(("math",), 1.0, workers=1)
    start = time.monotonic()
    scores = reward.score([answer(r"\boxed{5}"), answer(HOSTILE), answer(r"\boxed{5}")])
    assert [s.value for s in scores] == [1.0, None, 1.0]
    assert "longer than 1 s" in scores[1].reason or "Memory" in scores[1].reason
    assert time.monotonic() - start < 60
    assert reward.score([answer(r"\boxed{5}")])[0].value == 1.0
    reward.close()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=60),
            st.text(alphabet="0123456789+-*/^_{}()[]\\,.$% fracsqtboxedpi", max_size=80),
            st.text(alphabet="0123456789^{}!", max_size=12).map(lambda t: f"\\boxed{{{t}}}"),
            st.text(max_size=30).map(lambda t: f"Answer: {t}"),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_fuzz_the_math_verifier(math_reward, responses):
    """Any text gets a score or a reason within the limit, and the next call works."""
    scores = math_reward.score([answer(r) for r in responses])
    assert len(scores) == len(responses)
    for score in scores:
        assert score.value in (0.0, 1.0) or (score.value is None and score.reason)
    assert math_reward.score([answer(r"\boxed{5}")])[0].value == 1.0


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(max_size=40))
def test_fuzz_labels(math_reward, label):
    problem = math_reward.check_label(label)
    assert problem is None or isinstance(problem, str)


VERIFIER = """
import asyncio, os, sys, time

def reward(prompt, response, label, metadata):
    print("noise on standard output")
    os.write(1, b"raw noise\\n")
    if response == "hang":
        time.sleep(1000)
    if response == "die":
        os._exit(7)
    if response == "exit":
        sys.exit("goodbye")
    if response == "raise":
        raise KeyError("no such thing")
    if response == "child":
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open(metadata["file"], "w").write(str(child.pid))
        time.sleep(1000)
    return {"none": None, "text": "1", "nan": float("nan"), "yes": True, "int": 2}.get(
        response, len(response) + metadata.get("bonus", 0)
    )
"""


@pytest.fixture(scope="module")
def user_reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "verifier.py"
    path.write_text(VERIFIER)
    reward = file_reward(path, 2.0, workers=2)
    yield reward
    reward.close()


def test_a_users_function(user_reward):
    scores = user_reward.score(
        [answer("abc"), answer("abc", metadata={"bonus": 0.5}), answer("yes"), answer("int")]
    )
    assert [s.value for s in scores] == [3.0, 3.5, 1.0, 2.0]
    assert user_reward.check_label("anything at all") is None


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("hang", "longer than 2 s"),
        ("die", "exit code 7"),
        ("exit", "SystemExit: goodbye"),
        ("raise", "KeyError: 'no such thing'"),
        ("none", "returned a NoneType"),
        ("text", "returned a str"),
        ("nan", "returned nan"),
    ],
)
def test_a_failing_call_costs_that_sample_only(user_reward, response, reason):
    scores = user_reward.score([answer("ab"), answer(response), answer("abc"), answer("abcd")])
    assert [s.value for s in scores] == [2.0, None, 3.0, 4.0]
    assert reason in scores[1].reason


def test_what_a_verifier_started_is_ended_with_it(user_reward, tmp_path):
    file = tmp_path / "pid"
    score = user_reward.score([answer("child", metadata={"file": str(file)})])[0]
    assert score.value is None
    pid = int(file.read_text())
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.05)
    pytest.fail("the verifier's child is still running")


def test_an_async_function(tmp_path):
    path = tmp_path / "later.py"
    path.write_text(
        "import asyncio\n"
        "async def reward(prompt, response, label, metadata):\n"
        "    await asyncio.sleep(0.01)\n"
        "    return float(response == label)\n"
    )
    reward = file_reward(path, 5.0, workers=1)
    assert [s.value for s in reward.score([answer("5"), answer("6")])] == [1.0, 0.0]
    reward.close()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def reward(:", "SyntaxError"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("x = 1", "no function reward"),
        ("def reward(prompt): return 1", "TypeError"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_an_unusable_file_is_refused_before_the_run(tmp_path, source, why):
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(DataError, match=why) as error:
        make_reward(str(path))
    assert error.value.exit_code == 2
    with pytest.raises(DataError, match="does not exist"):
        make_reward(str(tmp_path / "none.py"))


def test_close_ends_the_processes(tmp_path):
    path = tmp_path / "v.py"
    path.write_text(
        "import os\ndef reward(prompt, response, label, metadata): return os.getpid()\n"
    )
    reward = file_reward(path, 5.0, workers=2)
    pids = {int(s.value or 0) for s in reward.score([answer()] * 8)}
    assert pids and all(is_running(pid) and pid != os.getpid() for pid in pids)
    reward.close()
    assert not any(is_running(pid) for pid in pids)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what = body["response"]
        if what == "slow":
            time.sleep(9)
        status = 500 if what == "error" else 200
        reply = {"json": b"{", "missing": b"{}", "text": b'{"reward": "1"}'}.get(
            what, json.dumps({"reward": len(what) + len(body["label"])}).encode()
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        pieces = [bytes([b]) for b in reply] if what == "drip" else [reply]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(0.5 if what == "drip" else 0)

    def log_message(self, *args):
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # the default of 5 drops connections, which come back a second later


def test_http():
    server = _Server(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/score"
    reward = HttpReward(url, 3.0)
    asked = ["abc", "slow", "error", "json", "missing", "text", "drip", ""]
    scores = reward.score([answer(a) for a in asked])
    assert [s.value for s in scores] == [4.0, None, None, None, None, None, None, 1.0]
    reasons = dict(zip(asked, (s.reason for s in scores), strict=True))
    assert "longer than 3 s" in reasons["slow"] and "longer than 3 s" in reasons["drip"]
    assert "500" in reasons["error"] and "KeyError" in reasons["missing"]
    assert "not a number" in reasons["text"]
    server.shutdown()
    server.server_close()
    assert "Connect" in reward.score([answer("abc")])[0].reason
    assert isinstance(make_reward(url), HttpReward)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)]
)
def test_overlong_penalty_is_equation_13(tokens, penalty):
    reward = OverlongPenalty(ExactReward(), limit=100, buffer=20)
    score = reward.score([answer("5", response_tokens=tokens)])[0]
    assert score.value == pytest.approx(1 + penalty)
    assert score.parts["overlong"] == pytest.approx(penalty)


def test_the_reward_of_a_run():
    short = {"reward": "exact", "rollout_max_response_len": 100}
    assert isinstance(reward_of(RolloutConfig(**short)), ExactReward)
    assert isinstance(reward_of(RolloutConfig(**short, overlong_buffer_len=20)), OverlongPenalty)
    with pytest.raises(ConfigError, match="overlong_buffer_len is 100"):
        reward_of(RolloutConfig(**short, overlong_buffer_len=100))


STANDARD = ("random", "json", "asyncio", "selectors", "tempfile")
"""Modules of the standard library that workers and rewards import."""


@pytest.fixture
def odd_folder(tmp_path, monkeypatch):
    """A current folder with files that are named as the standard library's modules are."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in STANDARD:
        (folder / f"{name}.py").write_text(f"raise ImportError('this is not {name}')\n")
    (folder / "helper_here.py").write_text("VALUE = 0.5\n")
    monkeypatch.chdir(folder)
    return folder


def test_files_in_the_current_folder_do_not_stand_in_for_the_standard_library(odd_folder, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "beside.py").write_text("VALUE = 2\n")
    (own / "helper_here.py").write_text("VALUE = 0.25\n")
    (own / "verifier.py").write_text(
        f"import {', '.join(STANDARD)}\n"
        "import beside, helper_here\n"
        "import glm_lora.rl.answers\n"
        "def reward(prompt, response, label, metadata):\n"
        "    return beside.VALUE + helper_here.VALUE\n"
    )
    reward = file_reward(own / "verifier.py", 5.0, workers=1)
    assert [s.value for s in reward.score([answer()])] == [2.25], "its own folder comes first"
    reward.close()
    (own / "helper_here.py").unlink()
    reward = file_reward(own / "verifier.py", 5.0, workers=1)
    assert [s.value for s in reward.score([answer()])] == [2.5], "the current folder comes last"
    reward.close()
    math = make_reward("math")
    assert [s.value for s in math.score([answer(r"\boxed{10/2}")])] == [1.0]
    math.close()


def test_what_a_reward_prints_arrives_on_standard_error(tmp_path, capfd):
    path = tmp_path / "talks.py"
    path.write_text(
        "print('on import')\n"
        "def reward(prompt, response, label, metadata):\n"
        "    print('scored', response)\n"
        "    print('odd', chr(0xD800))\n"
        "    return 1.0\n"
    )
    reward = file_reward(path, 5.0, workers=1)
    assert [s.value for s in reward.score([answer("abc"), answer("de")])] == [1.0, 1.0]
    said = capfd.readouterr()  # before the worker is killed
    assert said.err == "on import\nscored abc\nodd \\ud800\nscored de\nodd \\ud800\n"
    assert not said.out
    reward.close()
