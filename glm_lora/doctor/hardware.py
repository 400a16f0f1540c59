"""GPUs and what torch can do with them, memory, disks, ports and the network."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from glm_lora.checkpoint.files import existing, free_bytes
from glm_lora.doctor.finding import Finding, broken, missing, ok

GIB = 2**30
SMALL_DISK = 30 * GIB
"""The 4-layer slice takes about 20 GB as a checkpoint and again as a base."""
HUB_SECONDS = 5.0


def cuda() -> Iterator[Finding]:
    """Each GPU, and the kernels that are used on one."""
    import torch

    if not torch.cuda.is_available():
        yield _no_cuda(torch.version.cuda)
        return
    yield ok("cuda", f"{torch.version.cuda}, {torch.cuda.device_count()} device(s)")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        detail = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < total // 10:
            yield broken(f"cuda:{index}", detail, "see what holds it: nvidia-smi")
        else:
            yield ok(f"cuda:{index}", detail)
    yield _grouped_mm()
    yield ok("attention backends", ", ".join(_attention_backends()))
    from glm_lora.model.fast import active_paths

    yield from kernels(active_paths())


def kernels(paths: Mapping[str, str]) -> Iterator[Finding]:
    """What computes each part of the model, from ``model.fast.active_paths``."""
    for part, kernel in paths.items():
        if kernel.startswith("torch ("):
            yield missing(part, f"plain {kernel}: slower", "pip install 'glm-lora[gpu]'")
        else:
            yield ok(part, kernel)


def _no_cuda(built_for: str | None) -> Finding:
    driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()
    if not driver:
        why = "no NVIDIA driver: only the tiny model is of use here"
        return missing("cuda", why, "run on a machine with an NVIDIA GPU and its driver")
    if built_for is None:
        return broken(
            "cuda", "a driver is there, but this torch was built for the CPU", "pip install torch"
        )
    return broken("cuda", f"torch for CUDA {built_for} sees no device", "nvidia-smi")


def _grouped_mm() -> Finding:
    import torch

    if hasattr(torch.nn.functional, "grouped_mm"):
        return ok("grouped_mm", "torch.nn.functional.grouped_mm")
    return missing("grouped_mm", "experts run one after another", "pip install 'torch>=2.11'")


def _attention_backends() -> list[str]:
    from torch.backends import cuda as backends

    known = {
        "flash": backends.flash_sdp_enabled(),
        "memory-efficient": backends.mem_efficient_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
    }
    return [name for name, on in known.items() if on]


def memory() -> Finding:
    """Free host memory."""
    import psutil

    now = psutil.virtual_memory()
    detail = f"{now.available / GIB:.1f} of {now.total / GIB:.1f} GiB free"
    if now.available < 2 * GIB:
        return broken("memory", detail, "stop what uses it: the tiny model alone takes 1.5 GiB")
    return ok("memory", detail)


def disks(folders: Mapping[str, Path]) -> Iterator[Finding]:
    """Free space where models, bases, data and runs go."""
    for option, folder in folders.items():
        free = free_bytes(folder)
        detail = f"{free / GIB:.0f} GiB free in {folder}"
        if not os.access(existing(folder), os.W_OK):
            yield broken(option, f"{folder} cannot be written", f"{option} DIR")
        elif free < SMALL_DISK:
            why = f"{detail}: too little for GLM-5.3-Flash-4layer (enough for tiny)"
            yield missing(option, why, f"{option} DIR on a larger disk")
        else:
            yield ok(option, detail)


def ports() -> Finding:
    """Whether a server can listen on the loopback interface, and be reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return broken("ports", f"127.0.0.1: {error}", "allow local TCP connections")
    return ok("ports", f"127.0.0.1:{port} was free and answered")


def hub() -> Finding:
    """Whether the Hugging Face hub answers, for ``prepare``."""
    import httpx
    from huggingface_hub import constants

    address = constants.ENDPOINT
    mend = "copy the checkpoint here and name it with --hf-checkpoint"
    if constants.HF_HUB_OFFLINE:
        return missing("hub", "HF_HUB_OFFLINE is set", mend)
    try:
        answer = httpx.head(address, timeout=HUB_SECONDS, follow_redirects=True)
    except httpx.HTTPError as error:
        return missing("hub", f"{address}: {type(error).__name__}", mend)
    if answer.status_code >= 500:
        return missing("hub", f"{address} answers {answer.status_code}", mend)
    return ok("hub", f"{address} answers")
