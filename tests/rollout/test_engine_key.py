"""The key of servers elsewhere: needed, sent, and written nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from glm_lora.arch.spec import TINY
from glm_lora.cli import main
from glm_lora.errors import ConfigError
from glm_lora.rollout.engine_key import check_key, read_key
from glm_lora.rollout.sglang_client import SglangClient
from glm_lora.rollout.sglang_server import passed_flags
from tests.prepared import folders
from tests.rollout.fake_sglang import FakeSglang, running
from tests.support import words

KEY = "k3y-of-the-engine-9f27c1"


@pytest.fixture
def server():
    fake = FakeSglang(TINY)
    fake.key = KEY
    with running(fake) as url:
        yield fake, url


@pytest.fixture
def call(tiny_root, tmp_path, capfd, wide_errors):
    def run(*options: str, launcher: str = "inline") -> tuple[int, str]:
        arguments = ["train", "--model-name", "tiny", "--launcher", launcher, "--num-rollout", "1"]
        arguments += ["--rollout-engine", "sglang", "--run-dir", str(tmp_path / "run")]
        code = main([*arguments, *folders(tiny_root), *options])
        said = capfd.readouterr()
        return code, words(said.out + said.err)

    return run


def key_file(folder: Path, key: str = KEY) -> Path:
    path = folder / "engine.key"
    path.write_text(key + "\n")
    return path


def nowhere(folder: Path, text: str, key: str = KEY) -> None:
    assert key not in text
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert files
    for path in files:
        assert key.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("launcher", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_key_opens_the_server_and_is_written_nowhere(server, call, tmp_path, launcher):
    fake, url = server
    options = ["--rollout-engine-urls", url, "--rollout-engine-key-file", str(key_file(tmp_path))]
    code, text = call(*options, launcher=launcher)
    # The fake's log-probabilities are not those of any model: the first probe ends the run.
    assert code == 1 and "log-probabilities of the probe prompt" in text, text
    assert not fake.refused and "/load_lora_adapter_from_tensors" in {p for p, _ in fake.requests}
    nowhere(tmp_path / "run", text)


@pytest.mark.parametrize("key", ["", "another-key"])
def test_a_request_without_the_key_ends_the_run_with_the_reason(server, call, tmp_path, key):
    fake, url = server
    options = ["--rollout-engine-urls", url]
    if key:
        options += ["--rollout-engine-key-file", str(key_file(tmp_path, key))]
    code, text = call(*options)
    assert code == 1 and f"{url}/server_info answered 401" in text, text
    assert "next: The server asks for its API key" in text and "key-file" in text
    assert fake.refused == ["/server_info"] and not fake.requests
    if key:
        nowhere(tmp_path / "run", text, key)


def test_a_dry_run_shows_the_file_but_not_the_key(server, call, tmp_path):
    fake, url = server
    path = key_file(tmp_path)
    code, text = call(
        "--dry-run", "--rollout-engine-urls", url, "--rollout-engine-key-file", str(path)
    )
    assert code == 0 and url in text and KEY not in text, text
    assert not fake.requests and not fake.refused


@pytest.mark.parametrize("url", ["http://10.0.0.7:30000", "https://engines.example", "http://h:1"])
def test_a_server_elsewhere_needs_a_key(call, tmp_path, url):
    code, text = call("--rollout-engine-urls", url)
    assert code == 2 and f"{url} is not on this machine's loopback interface" in text, text
    assert "expected: --rollout-engine-key-file" in text and not (tmp_path / "run").exists()
    check_key([url], key_file(tmp_path))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "[::1]", "localhost"])
def test_a_server_on_the_loopback_interface_may_do_without(host):
    check_key([f"http://{host}:30000"], None)


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"a\nb", b"\xff\xfe", b"\xc3\xbc"])
def test_a_file_that_holds_no_key(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--rollout-engine-key-file") as caught:
        read_key(path)
    assert "two words" not in str(caught.value)
    for wrong, reason in ((tmp_path, "no regular file"), (tmp_path / "no", "cannot be read")):
        with pytest.raises(ConfigError, match=reason):
            read_key(wrong)


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_read(tmp_path):
    # A shell's <(command): empty the second time, which restarted engines would read.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="no regular file") as refused:
        read_key(pipe)
    assert "read again" in str(refused.value)


def test_a_client_does_not_show_its_key():
    assert KEY not in repr(SglangClient("http://127.0.0.1:1", api_key=KEY))


@pytest.mark.parametrize("flag", ["api-key", "admin-api-key", "api-k", "ssl-keyfile-password"])
def test_a_secret_is_not_passed_on_a_command_line(call, tmp_path, flag):
    for arguments in ([f"--sglang-{flag}", KEY], [f"--sglang-{flag}={KEY}"]):
        with pytest.raises(ConfigError, match="would show a secret") as caught:
            passed_flags(arguments)
        assert KEY not in str(caught.value)
        code, text = call("--sglang-python", "python", *arguments)
        assert code == 2 and "would show a secret" in text and KEY not in text, text
        assert not (tmp_path / "run").exists()


def test_flags_that_only_begin_alike_are_passed():
    assert passed_flags(["--sglang-ssl-keyfile", "file"]) == ("--ssl-keyfile", "file")
