"""One torch thread per test process, the repository root on the import path, the tiny model."""

import signal
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

torch.set_num_threads(1)

# A shell script that puts the tests in the background has them ignore SIGINT, and so would every
# program that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def wide_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error messages in which no path is broken over two lines."""
    from rich.console import Console

    from glm_lora import cli

    monkeypatch.setattr(cli, "err", Console(stderr=True, width=600))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """What ``prepare --model-name tiny`` made, once for the whole session."""
    from glm_lora.checkpoint.prepare import prepare
    from tests.prepared import tiny_config

    return prepare(tiny_config(tmp_path_factory.mktemp("prepared")))


@pytest.fixture(scope="session")
def tiny_root(tiny) -> Path:
    """The folder in which it lies (``tests.prepared.folders`` gives the options)."""
    return tiny.ref_load.parent.parent


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny size with random weights, written by transformers."""
    from tests.tiny_checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("base"))
