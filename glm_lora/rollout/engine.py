"""Which engine a run uses."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from glm_lora.config import TrainConfig
from glm_lora.errors import ConfigError
from glm_lora.protocols import RolloutEngine
from glm_lora.rollout.engine_key import check_key, read_key
from glm_lora.settings import spec_of
from glm_lora.targets.selection import Selection

if TYPE_CHECKING:
    from glm_lora.rollout.sglang_server import ServerOptions


def build_engine(
    config: TrainConfig, selection: Selection, servers: Sequence[ServerOptions] = ()
) -> RolloutEngine:
    """Start the engine that ``config`` asks for; servers are children of this process.

    Args:
        config: The run's configuration.
        selection: What adapters cover.
        servers: The servers to start; by default those of ``config`` (``server_options``).
    """
    if config.rollout.rollout_engine == "sglang":
        return _sglang(config, selection, servers)
    import torch

    from glm_lora.rollout.embedded import EmbeddedEngine

    cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
    if not cuda:
        # The tiny shapes that run on a CPU are too small to share between threads.
        torch.set_num_threads(1)
    return EmbeddedEngine(
        config.hf_checkpoint,
        selection,
        dtype=getattr(torch, config.dtype),
        device="cuda" if cuda else "cpu",
        seed=config.seed,
        return_routed_experts=config.rollout.enable_r3,
    )


_SERVERS_ONLY = (
    "sglang_python",
    "sglang_colocated",
    "rollout_engine_urls",
    "rollout_engine_key_file",
    "rollout_num_gpus",
)
"""Options that mean something to servers alone."""


def check_engine(config: TrainConfig) -> None:
    """Check, before anything starts, that the engine's options fit together.

    Raises:
        ConfigError: No way to a server is given, a URL is not one, servers elsewhere have no key,
            or options exclude each other.
    """
    from glm_lora.rollout.sglang_client import server_urls

    sglang = config.sglang
    if config.rollout.rollout_engine != "sglang":
        for option in _SERVERS_ONLY:
            if getattr(sglang, option):
                raise ConfigError(
                    f"--{option.replace('_', '-')} with --rollout-engine "
                    f"{config.rollout.rollout_engine}, which would not use it",
                    "--rollout-engine sglang",
                )
        if sglang.sglang_flags:
            raise ConfigError(
                f"flags for SGLang ({' '.join(sglang.sglang_flags)}) with --rollout-engine "
                f"{config.rollout.rollout_engine}, which would not use them",
                "--rollout-engine sglang",
                "An option of this program that begins with --sglang- may be misspelt",
            )
        return
    if not sglang.sglang_python and not sglang.rollout_engine_urls:
        raise ConfigError(
            "--rollout-engine sglang without a way to a server",
            "--sglang-python with the interpreter of SGLang's environment, or "
            "--rollout-engine-urls with running servers",
            "Build the environment with: make sglang-env",
        )
    urls = server_urls(sglang.rollout_engine_urls)
    check_key(urls, sglang.rollout_engine_key_file)
    if sglang.sglang_colocated and sglang.rollout_num_gpus:
        raise ConfigError(
            f"--sglang-colocated with --rollout-num-gpus {sglang.rollout_num_gpus}",
            "one of them: engines share the trainer's GPUs or have their own",
        )
    if sglang.sglang_colocated and config.rollout.async_level:
        raise ConfigError(
            "--sglang-colocated with --async-level 1",
            "--async-level 0: engine and trainer take turns on the GPUs",
        )


def check_interpreter(config: TrainConfig) -> None:
    """Check that servers can be started on this machine; on a cluster's others it is seen there.

    Raises:
        ConfigError: ``--sglang-python`` is no program.
    """
    python = config.sglang.sglang_python
    if config.rollout.rollout_engine != "sglang" or not python or config.ray_address:
        return
    if shutil.which(python) is None:
        raise ConfigError(
            f"--sglang-python {python} is no program that can be started",
            "the interpreter of an environment with SGLang",
            "Build the environment with: make sglang-env",
        )


def server_options(config: TrainConfig, selection: Selection, number: int) -> ServerOptions:
    """How server ``number`` of a run is started; GPUs and ports are still open."""
    from glm_lora.rollout.sglang_server import ServerOptions

    options = config.sglang
    return ServerOptions(
        checkpoint=config.hf_checkpoint,
        selection=selection,
        python=options.sglang_python,
        work_dir=config.run_dir / "logs" / f"sglang-{number}",
        tensor_parallel=options.rollout_num_gpus_per_engine,
        dtype=config.dtype,
        mem_fraction=options.sglang_mem_fraction,
        lora_backend=options.sglang_lora_backend,
        memory_saver=options.sglang_colocated,
        routed_experts=config.rollout.enable_r3,
        passed=options.sglang_flags,
    )


def _sglang(
    config: TrainConfig, selection: Selection, servers: Sequence[ServerOptions]
) -> RolloutEngine:
    from glm_lora.rollout.sglang import attach_engine, start_engine

    options = config.sglang
    spec = spec_of(config.model_name, config.hf_checkpoint)
    base = str(config.hf_checkpoint)
    if options.rollout_engine_urls:
        key = read_key(options.rollout_engine_key_file)
        return attach_engine(options.rollout_engine_urls, spec, base_model=base, api_key=key)
    servers = servers or [
        server_options(config, selection, number)
        for number in range(max(1, options.rollout_num_engines))
    ]
    return start_engine(servers, spec, base_model=base)
