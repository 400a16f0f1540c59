"""How fast ``prepare`` converts, and how much memory it takes, on synthetic checkpoints.

For bfloat16 and FP8 sources of about ``--size`` GB it alternates, ``--repeats`` times in one run, a
plain copy with fsync that reads and writes as many bytes, and the conversion, each into a cold
folder; the figure is the ratio of the median times. Peak memory is that of a process of its own,
for every size of ``--memory-sizes``. ``--random`` also times random bases.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json
from benchmarks.synthetic_checkpoint import tensors, write_checkpoint
from glm_lora.arch.spec import FULL, ModelSpec
from glm_lora.checkpoint.prepare import prepare
from glm_lora.config import PrepareConfig

LIMITS = {"bf16": 0.40, "fp8": 0.15}
"""Smallest share of the copy's rate."""
MEMORY_LIMIT_GB = 4.0
_BLOCK = 2**24


def spec_of_size(gigabytes: float, *, fp8: bool) -> ModelSpec:
    """Four layers at the released widths with as many experts as fill ``gigabytes``.

    Small sizes have a smaller vocabulary, fewer heads and ragged FFN widths (not multiples of 128).
    """
    wide = gigabytes >= 6
    spec = FULL.first_layers(4) if wide else replace(
        FULL.first_layers(4), hidden_size=2048, intermediate_size=3000, vocab_size=16000,
        num_attention_heads=16, linear_num_heads=16, q_lora_rank=700, moe_intermediate_size=1000,
    )  # fmt: skip
    spec = replace(spec, n_routed_experts=8)

    def size(experts: int) -> int:
        shaped = replace(spec, n_routed_experts=experts)
        return sum(t.nbytes for t in tensors(shaped, fp8=fp8, mtp=False, vision=False))

    one = (size(16) - size(8)) / 8
    experts = max(8, round(8 + (gigabytes * 1e9 - size(8)) / one))
    return replace(spec, n_routed_experts=experts)


def config_for(source: Path, target: Path, **changes: Any) -> PrepareConfig:
    """A conversion of ``source`` into ``target`` and nothing else."""
    values: dict[str, Any] = {
        "model_name": "synthetic",
        "hf_checkpoint": source,
        "ref_load": target,
        "data_dir": target.parent / "data",
        "task": "none",
    }
    return PrepareConfig.model_validate({**values, **changes})


def copy_like(source: Path, target: Path, written: int) -> float:
    """Seconds to read all shards of ``source`` once and write ``written`` bytes, with fsync."""
    target.mkdir()
    read = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    start = time.perf_counter()
    credit = 0.0
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb", buffering=0) as reader, (target / path.name).open("wb", 0) as writer:
            while block := reader.read(_BLOCK):
                credit += len(block) * written / read
                while credit >= len(block):
                    writer.write(block)
                    credit -= len(block)
            os.fsync(writer.fileno())
    return time.perf_counter() - start


def convert(source: Path, target: Path) -> tuple[float, int]:
    """Seconds of a conversion and the bytes it wrote."""
    start = time.perf_counter()
    prepare(config_for(source, target))
    seconds = time.perf_counter() - start
    return seconds, sum(p.stat().st_size for p in target.rglob("*.distcp"))


def throughput(work: Path, kind: str, size: float, repeats: int) -> dict[str, Any]:
    """Median seconds of copy and conversion, alternating."""
    source = write_checkpoint(
        work / "source", spec_of_size(size, fp8=kind == "fp8"), fp8=kind == "fp8", mtp=False
    )
    read = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    copies, conversions, written = [], [], 0
    for turn in range(repeats + 1):
        seconds, written = convert(source, work / "base")
        shutil.rmtree(work / "base")
        os.sync()
        copied = copy_like(source, work / "copy", written)
        shutil.rmtree(work / "copy")
        os.sync()
        if turn:  # the first turn warms up imports and the source's cache
            conversions.append(seconds)
            copies.append(copied)
    shutil.rmtree(source)
    ratio = statistics.median(copies) / statistics.median(conversions)
    return {
        "source": kind,
        "read_gb": read / 1e9,
        "written_gb": written / 1e9,
        "copy_s": statistics.median(copies),
        "convert_s": statistics.median(conversions),
        "convert_s_all": conversions,
        "copy_s_all": copies,
        "share_of_copy": ratio,
        "limit": LIMITS[kind],
        "ok": ratio >= LIMITS[kind],
    }


def peak_memory(work: Path, size: float) -> dict[str, Any]:
    """Peak resident memory of a process that converts ``size`` GB of FP8."""
    source = write_checkpoint(work / "source", spec_of_size(size, fp8=True), fp8=True, mtp=False)
    script = [sys.executable, __file__, "--child", str(source), str(work / "base")]
    done = subprocess.run(script, check=True, capture_output=True, text=True)
    written = sum(p.stat().st_size for p in (work / "base").rglob("*.distcp"))
    shutil.rmtree(source)
    shutil.rmtree(work / "base")
    before, peak = map(float, done.stdout.split()[-2:])
    return {
        "source_gb": size,
        "written_gb": written / 1e9,
        "start_gb": before,
        "peak_gb": peak,
        "limit_gb": MEMORY_LIMIT_GB,
        "ok": peak <= MEMORY_LIMIT_GB,
    }


def random_base(work: Path, size: float) -> dict[str, Any]:
    """Seconds to write a random base of ``size`` GB."""
    folder = work / "config"
    write_checkpoint(folder, spec := spec_of_size(size, fp8=False), fp8=False, shards=1, mtp=False)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    start = time.perf_counter()
    prepare(config_for(folder, work / "base", init="random"))
    seconds = time.perf_counter() - start
    written = sum(p.stat().st_size for p in (work / "base").rglob("*.distcp"))
    shutil.rmtree(work / "base")
    shutil.rmtree(folder)
    return {
        "written_gb": written / 1e9,
        "seconds": seconds,
        "gb_per_s": written / 1e9 / seconds,
        "layers": spec.num_hidden_layers,
    }


def rss_gb() -> float:
    """Peak resident memory of this process so far (getrusage would count its parent's too)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-sizes", type=float, nargs="*", default=[1.0, 8.0])
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    add_json(parser)
    parser.add_argument("--child", nargs=2, type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        before = rss_gb()
        prepare(config_for(*arguments.child))
        print(before, rss_gb())
        return
    figures: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "throughput": [],
        "memory": [],
    }
    if arguments.folder:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        work = Path(folder)
        for kind in ("bf16", "fp8"):
            row = throughput(work, kind, arguments.size, arguments.repeats)
            figures["throughput"].append(row)
            print(
                f"{kind}: read {row['read_gb']:.2f} GB, wrote {row['written_gb']:.2f} GB in "
                f"{row['convert_s']:.2f} s; copy + fsync {row['copy_s']:.2f} s; "
                f"{row['share_of_copy']:.0%} of the copy's rate (at least {row['limit']:.0%})",
                flush=True,
            )
        for size in arguments.memory_sizes:
            row = peak_memory(work, size)
            figures["memory"].append(row)
            print(
                f"memory: {size:g} GB of FP8 to {row['written_gb']:.1f} GB, peak "
                f"{row['peak_gb']:.2f} GB ({row['start_gb']:.2f} before; at most "
                f"{MEMORY_LIMIT_GB:g})",
                flush=True,
            )
        if arguments.random:
            row = figures["random"] = random_base(work, arguments.size)
            print(f"random: {row['written_gb']:.2f} GB in {row['seconds']:.2f} s", flush=True)
    print_json(arguments.json, figures)


if __name__ == "__main__":
    main()
