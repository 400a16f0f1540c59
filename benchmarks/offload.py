"""How fast a trainer rank leaves its GPU and comes back, and what it copies to the host for that.

    python benchmarks/offload.py --json benchmarks/results/offload_h200.json

The 4-layer slice at full width with adapters and Adam moments. The frozen base is dropped and
brought back from its one host copy; ``plain_gb_per_s`` is one pinned copy of 4 GB to the device in
the same run, ``onload_to_plain`` the ratio. ``base_bytes_to_host`` is what a later offload copied
beyond adapters and moments, by the profiler's record of every copy from the device.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json
from glm_lora.arch.spec import builtin
from glm_lora.checkpoint.random_init import init_random
from glm_lora.config import OptimizerConfig, SelectionConfig
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.stage import Stage, build_stage
from glm_lora.targets.resolve import resolve
from glm_lora.train.offload import DeviceMemory
from glm_lora.train.optimizer import AdapterOptimizer


def trainer_rank(model: str, device: torch.device) -> tuple[Stage, Any, AdapterOptimizer]:
    """Stage with random weights, adapters, and an optimizer that has made one step."""
    spec = builtin(model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stage = build_stage(spec, ParallelContext(device=device), dtype=dtype)
    init_random(stage, seed=0)
    selection = resolve(spec, model, SelectionConfig()).selection
    adapters = attach_adapters(stage, selection, seed=0)
    optimizer = AdapterOptimizer(adapters.parameters(), OptimizerConfig(lr=1e-4), total_steps=10)
    for parameter in adapters.parameters().values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return stage, adapters, optimizer


def sums(stage: Stage) -> list[int]:
    """One number per block of the base that changes with any of its bits moved or flipped."""
    numbers = []
    for storage in stage.base_storages():
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        words = view[: view.numel() // 4 * 4].view(torch.int32)
        place = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int32)
        numbers.append(int((words * place).sum(dtype=torch.int64)))
    return numbers


def plain_rate(device: torch.device, size: int, repeats: int) -> float:
    """GB/s of one pinned copy to the device."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        wait(device)
        times.append(time.perf_counter() - start)
    return size / statistics.median(times[1:]) / 1e9


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def bytes_from_device(memory: DeviceMemory) -> int:
    """What one ``offload`` copies from the device, by the profiler."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as trace:
        memory.offload()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    copies = [e for e in events if str(e.get("name", "")).startswith("Memcpy DtoH")]
    return sum(int(e["args"]["bytes"]) for e in copies)


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-5.3-Flash-4layer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--plain-bytes", type=int, default=4_000_000_000)
    add_json(parser)
    args = parser.parse_args()
    device = torch.device(args.device)
    stage, adapters, optimizer = trainer_rank(args.model, device)
    memory = DeviceMemory(stage, adapters, optimizer)
    before = sums(stage)
    first = dict(memory.offload())
    away: list[dict[str, float]] = []
    back: list[dict[str, float]] = []
    for _ in range(args.cycles):
        back.append(dict(memory.onload()))
        away.append(dict(memory.offload()))
    state = int(away[-1]["offload/bytes_to_host"])
    memory.onload()
    equal = sums(stage) == before
    seconds = statistics.median(b["time/onload"] for b in back)
    size = int(back[-1]["offload/bytes_to_device"])
    plain = plain_rate(device, args.plain_bytes, args.cycles)
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "model": args.model,
        "bytes": size,
        "first_offload_s": first["time/offload"],
        "offload_s": statistics.median(a["time/offload"] for a in away),
        "state_bytes_to_host": state,
        "onload_s": seconds,
        "onload_gb_per_s": size / seconds / 1e9,
        "plain_gb_per_s": plain,
        "onload_to_plain": size / seconds / 1e9 / plain,
        "base_equal": equal,
    }
    if device.type == "cuda":
        result["base_bytes_to_host"] = bytes_from_device(memory) - state
    for key, value in result.items():
        print(f"{key:<22} {value:.4g}" if isinstance(value, float) else f"{key:<22} {value}")
    print_json(args.json, result)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
