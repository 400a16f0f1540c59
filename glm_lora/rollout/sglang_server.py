"""Life of one SGLang server: command line, start, health with progress, stop.

The server runs in an environment of its own and in a process group of its own; stopping it ends
that group and nothing else.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm_lora.checkpoint.hf_config import SGLANG_KEYS
from glm_lora.config import SglangConfig
from glm_lora.errors import ConfigError, RolloutError
from glm_lora.targets.selection import Selection

logger = logging.getLogger(__name__)

START_LIMIT = 1800.0
"""Seconds until the first healthy answer; kernels are compiled on the first start."""
_PROGRESS = 15.0
_GRACE = 15.0
_OF_A_RANK = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    }
)
"""What torchrun tells each of its ranks, beside ``TORCHELASTIC_*``."""


@dataclass(frozen=True)
class ServerOptions:
    """How to start one server."""

    checkpoint: Path
    """Hugging Face checkpoint of the base."""
    selection: Selection
    """What the adapters will cover: gives targets and rank."""
    python: str
    """Interpreter of the environment SGLang is installed in."""
    work_dir: Path
    """Log and serving view of the checkpoint."""
    tensor_parallel: int = 1
    expert_parallel: int = 1
    dtype: str = "bfloat16"
    mem_fraction: float = 0.0
    """Share of the GPU memory for weights and cache; 0 leaves it to SGLang."""
    lora_backend: str = "triton"
    memory_saver: bool = False
    """Let the engine give its memory back while the trainer works (weights keep a host copy)."""
    routed_experts: bool = False
    """Let answers carry the experts of each token."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    passed: tuple[str, ...] = ()
    """Further flags, as they are (``--sglang-*`` of the command line)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""


def server_command(options: ServerOptions, model: Path, port: int) -> list[str]:
    """The command line of one server that serves ``model`` on ``port``."""
    leaves = sorted({a.site.leaf for a in options.selection.adapters})
    command = [options.python, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", options.host, "--port", str(port), "--dtype", options.dtype]
    command += ["--skip-tokenizer-init", "--skip-server-warmup"]
    command += ["--tp-size", str(options.tensor_parallel)]
    if options.expert_parallel > 1:
        command += ["--ep-size", str(options.expert_parallel)]
    command += ["--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang"]
    command += ["--kv-cache-dtype", "bfloat16", "--moe-runner-backend", "triton"]
    command += ["--disable-shared-experts-fusion", "--grammar-backend", "none"]
    command += ["--enable-lora", "--lora-backend", options.lora_backend]
    # The base counts as one of the adapters of a batch; two versions may be in use at once.
    command += ["--max-loras-per-batch", "3", "--max-lora-rank", str(options.selection.rank)]
    command += ["--lora-target-modules", *leaves]
    if options.mem_fraction:
        command += ["--mem-fraction-static", str(options.mem_fraction)]
    if options.memory_saver:
        command += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if options.routed_experts:
        command += ["--enable-return-routed-experts"]
    return command + list(options.passed)


_OURS = {
    "model-path": "--hf-checkpoint",
    "host": "",
    "port": "",
    "dtype": "--dtype",
    "tp-size": "--rollout-num-gpus-per-engine",
    "ep-size": "--rollout-num-gpus-per-engine",
    "enable-lora": "",
    "max-lora-rank": "--lora-rank",
    "lora-target-modules": "--target-modules",
    "mem-fraction-static": "--sglang-mem-fraction",
}
"""SGLang's flags that follow from options of ours, and from which."""
_SECRETS = {"api-key": "api", "admin-api-key": "adm", "ssl-keyfile-password": "ssl-keyfile-"}
"""Flags whose value others must not read, and how much of them SGLang takes for the whole."""
PREFIX = "--sglang-"


def passed_flags(arguments: Sequence[str]) -> tuple[str, ...]:
    """SGLang's own flags from ``--sglang-NAME``, ``--sglang-NAME=VALUE`` and their values.

    Raises:
        ConfigError: An argument that does not start so, or a flag that follows from other options.
    """
    flags: list[str] = []
    for argument in arguments:
        if not argument.startswith("--"):
            flags.append(argument)
            continue
        name, equals, value = argument.partition("=")
        if not name.startswith(PREFIX) or name == PREFIX:
            raise ConfigError(f"{argument!r} is no flag for SGLang", f"{PREFIX}NAME")
        name = name.removeprefix(PREFIX)
        if any(
            name.startswith(short) and flag.startswith(name) for flag, short in _SECRETS.items()
        ):
            raise ConfigError(
                f"{PREFIX}{name} would show a secret to everyone on the machine and keep it in the "
                "run folder",
                "a server that is started here, which listens on the loopback interface alone",
                "For servers elsewhere see --rollout-engine-urls and --rollout-engine-key-file",
            )
        if name in _OURS:
            raise ConfigError(
                f"{PREFIX}{name} cannot be set",
                "a flag that does not follow from other options",
                f"It follows from {_OURS[name]}" if _OURS[name] else "",
            )
        own = [f"--{option.replace('_', '-')}" for option in SglangConfig.model_fields]
        alike = difflib.get_close_matches(f"{PREFIX}{name}", own, 1, 0.93)
        if alike:
            raise ConfigError(
                f"{PREFIX}{name} is neither an option nor, as it looks, meant for SGLang",
                "an option of this program, or a flag of SGLang after --sglang-",
                f"Did you mean {alike[0]!r}?",
            )
        flags += [f"--{name}", value] if equals else [f"--{name}"]
    return tuple(flags)


_NEEDED = {**SGLANG_KEYS, "num_nextn_predict_layers": 0}
"""What SGLang reads from ``text_config`` and transformers does not write."""


def serving_view(checkpoint: Path, folder: Path) -> Path:
    """A folder that SGLang can serve: links to the checkpoint's files and a completed config.

    SGLang serves a checkpoint whose ``text_config`` has no ``mhc`` without its hyper-connections,
    and takes its ``architectures`` for the model's even when they are null, as some versions of
    transformers write them.

    Returns:
        ``checkpoint`` itself where its ``config.json`` is complete, else ``folder``.

    Raises:
        ConfigError: The checkpoint has no readable ``config.json``.
    """
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config["text_config"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be served: {error!r}", "a glm5_next config") from error
    missing = {k: v for k, v in _NEEDED.items() if k not in text}
    unnamed = text.get("architectures", ()) is None
    if not missing and not unnamed:
        return checkpoint
    text.update(missing)
    if unnamed:
        del text["architectures"]
    # Without a processor's files the server must not build one.
    config.setdefault("language_model_only", True)
    folder.mkdir(parents=True, exist_ok=True)
    for entry in checkpoint.iterdir():
        link = folder / entry.name
        if entry.name != "config.json" and not link.is_symlink():
            link.symlink_to(entry.resolve())
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


class SglangServer:
    """One running server.

    Args:
        options: How to start it.

    Raises:
        ConfigError: The interpreter or the checkpoint is not there.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        options.work_dir.mkdir(parents=True, exist_ok=True)
        model = serving_view(options.checkpoint, options.work_dir / "model")
        self.port = options.port or free_port(options.host)
        self.url = f"http://{options.host}:{self.port}"
        self.log = options.work_dir / f"sglang-{self.port}.log"
        self.command = server_command(options, model, self.port)
        env = {
            **_without_torchrun(os.environ),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            **options.env,
        }
        self._started = time.monotonic()
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(
                f"SGLang cannot be started with {options.python}: {error}",
                "the interpreter of an environment with SGLang (--sglang-python)",
            ) from error

    def wait(self, limit: float = START_LIMIT) -> float:
        """Wait until the server is healthy; logs a line of progress now and then.

        Its ``/health`` may say so while the first kernels still compile for minutes, because any
        sign of life counts there. ``/server_info`` asks every scheduler, so its answer is waited
        for too.

        Returns:
            Seconds since the start.

        Raises:
            RolloutError: It ended or is not healthy in ``limit`` seconds; the server is stopped.
        """
        shown = 0.0
        while True:
            elapsed = time.monotonic() - self._started
            if not self.alive():
                raise RolloutError(
                    f"SGLang ended with code {self._process.returncode} while starting:\n"
                    + self.tail(),
                    next_step=f"The whole log is {self.log}",
                )
            if all(_answers(self.url + path) for path in ("/health", "/server_info")):
                return time.monotonic() - self._started
            if elapsed > limit:
                self.stop()
                raise RolloutError(
                    f"SGLang is not healthy after {elapsed:.0f} s:\n{self.tail()}",
                    next_step=f"The whole log is {self.log}",
                )
            if elapsed - shown > _PROGRESS:
                shown = elapsed
                logger.info("SGLang starts (%.0f s): %s", elapsed, self.tail(1).strip()[:200])
            time.sleep(0.5)

    def alive(self) -> bool:
        """Whether the server's first process is running."""
        return self._process.poll() is None

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(line[:400] for line in text.splitlines()[-lines:])

    def stop(self) -> None:
        """End the server's process group: politely, then not."""
        for sign, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:
                break
            end = time.monotonic() + seconds
            while time.monotonic() < end and self._group_lives():
                time.sleep(0.1)
        self._process.poll()

    def _group_lives(self) -> bool:
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def free_port(host: str) -> int:
    """A TCP port that is free on ``host`` now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=20) as reply:
            return reply.status == 200
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # it wants a key: there is more to it than a sign of life
    except (urllib.error.URLError, OSError):
        return False


def start_servers(
    options: Sequence[ServerOptions], limit: float = START_LIMIT
) -> list[SglangServer]:
    """Start several servers side by side and wait for all; a failure stops every one of them."""
    servers: list[SglangServer] = []
    try:
        for each in options:
            servers.append(SglangServer(each))
        for server in servers:
            logger.info("SGLang at %s is healthy after %.0f s", server.url, server.wait(limit))
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def _without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment a server starts in: not that of a rank, if torchrun started this process.

    ``TORCHELASTIC_USE_AGENT_STORE`` makes the server's own first rank wait for a store that nobody
    serves, without a word and for ever.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_RANK and not name.startswith("TORCHELASTIC_")
    }
