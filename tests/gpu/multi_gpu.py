"""Check the parallel trainer on the GPUs of one machine, any number of them.

    torchrun --nproc-per-node 2 --max-restarts 9 tests/gpu/multi_gpu.py --json results.json

Parts: small models at every shape against one rank (fp32 and bf16), the 4-layer slice at full
width with random weights, the full model's adapter from shards to the file that an engine reads,
and KDA's kernel against its reference. Results are written after each
part. An exception ends all processes, because the others may wait for the failed one in a
collective or its device may be unusable; torchrun then restarts them and they go on with the next
part. Outcomes stand in the file, and the exit code is 0 once the table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import gc
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from glm_lora.config import ParallelConfig  # noqa: E402
from tests.gpu.parts import (  # noqa: E402
    SLICE,
    Oracle,
    Outcome,
    SliceRun,
    check_kda,
    gather_adapter,
    synchronised,
    topologies,
    train_slice,
)
from tests.gpu.untuned import skip_tuning  # noqa: E402

Part = Callable[[], Outcome]
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=5)
"""Kernels may compile and be tuned for minutes on one rank while others wait."""
STACKS_AFTER = 240
"""Seconds after which every rank prints where it is, and again after as many: a part that takes so
long compiles or hangs, and the stacks tell which."""


class Record:
    """The results file; rank 0 writes it, and a restarted process continues it."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self._rank = path, rank
        fresh = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        self.data: dict[str, Any] = {"started": time.time(), "parts": {}}
        if not fresh and path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._settle([p for p in self.data["parts"].values() if p["status"] == "running"])
            self._write()

    def _settle(self, interrupted: list[dict[str, Any]]) -> None:
        """The part that was running has failed; the errors that ranks left behind are its own."""
        files = sorted(self.path.parent.glob(f"{self.path.name}.rank*"))
        texts = {f.suffix[1:]: f.read_text(encoding="utf-8").strip() for f in files}
        for file in files:
            file.unlink()
        for part in interrupted:
            last = [f"{rank}: {text.splitlines()[-1]}" for rank, text in texts.items()]
            part |= {"status": "failed", "detail": "; ".join(last) or "ended without a result"}
            part["errors"] = {rank: text[-3000:] for rank, text in texts.items()}

    def put(self, name: str, **values: Any) -> None:
        """Set what is known of a part."""
        if self._rank == 0:
            self.data["parts"][name] = values
            self._write()

    def leave_error(self) -> None:
        """Write the current exception for rank 0 to find after the restart."""
        file = self.path.with_name(f"{self.path.name}.rank{self._rank}")
        file.write_text(traceback.format_exc(), encoding="utf-8")

    def _write(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")


def parts(options: argparse.Namespace, device: torch.device) -> dict[str, Part]:
    """Every part by name, most important first; each is called on all ranks."""
    world = dist.get_world_size()
    oracle = Oracle(device)
    shapes = topologies(world)
    run = SliceRun(
        model=options.model,
        recipe=ROOT / "adapters" / "attn_mlp.toml",
        steps=options.steps,
        samples=options.samples,
        length=options.length,
        dtype=torch.bfloat16,
    )
    slices = {
        "tp2 ep2": ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=2),
        "pp2": ParallelConfig(pipeline_model_parallel_size=2),
        f"dp{world}": ParallelConfig(),
    }
    fp32 = {f"oracle fp32 {n}": _oracle(oracle, s, torch.float32) for n, s in shapes.items()}
    bf16 = {f"oracle bf16 {n}": _oracle(oracle, s, torch.bfloat16) for n, s in shapes.items()}
    sliced = {
        f"slice {name}": lambda config=config: train_slice(run, config, device)
        for name, config in slices.items()
    }
    adapter = {"adapter": lambda: gather_adapter(options.adapter_of, run.recipe, device)}
    found = fp32 | adapter | sliced | bf16
    if device.type == "cuda":
        found["kda kernel"] = lambda: check_kda(device, (70, 1, 640, 257, 1080))
    return found


def _oracle(oracle: Oracle, shape: Any, dtype: torch.dtype) -> Part:
    return lambda: oracle.check(shape, dtype)


def run_parts(options: argparse.Namespace, record: Record, todo: dict[str, Part]) -> None:
    """Run what has no result yet; all ranks take the same decisions."""
    for name, part in todo.items():
        late = time.time() - record.data["started"] > options.budget
        action = "done" if name in record.data["parts"] else "late" if late else "run"
        action = synchronised(action)
        if action == "late":
            record.put(name, status="not run", detail="time budget spent")
        if action != "run":
            continue
        record.put(name, status="running")
        faulthandler.dump_traceback_later(STACKS_AFTER, repeat=True)
        start = time.time()
        try:
            outcome = part()
        except Exception:
            record.leave_error()
            traceback.print_exc()
            # An orderly exit could wait for the other ranks, which may wait for this one.
            sys.stderr.flush()
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        record.put(
            name,
            status="passed" if outcome.passed else "failed",
            detail=outcome.detail,
            seconds=round(time.time() - start, 2),
            numbers=outcome.numbers,
        )
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def table(data: dict[str, Any]) -> str:
    """The results, one line a part."""
    lines = [", ".join(f"{k} {v}" for k, v in data["environment"].items())]
    for name, part in data["parts"].items():
        seconds = f"{part['seconds']:.1f} s" if "seconds" in part else ""
        lines.append(f"{part['status']:8} {name:28} {seconds:>8}  {part['detail'][:200]}")
    return "\n".join(lines)


def environment(device: torch.device) -> dict[str, Any]:
    """Where the results come from."""
    versions = {}
    for name in ("megatron-core", "fla-core", "triton", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"{dist.get_world_size()} x {kind}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **versions,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="results file")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of the slice")
    parser.add_argument("--budget", type=float, default=300, help="seconds; later parts do not run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default=SLICE, help="model of the slice parts")
    parser.add_argument("--adapter-of", default="GLM-5.3-Flash", help="model of the adapter part")
    parser.add_argument("--samples", type=int, default=4, help="sequences per step of the slice")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument(
        "--only", default="", help="run the parts whose name starts with one of these (a,b)"
    )
    parser.add_argument(
        "--untuned",
        action="store_true",
        help="spare flash-linear-attention's tuning, minutes for every shape; speeds mean nothing",
    )
    return parser.parse_args()


def main() -> None:
    """One rank of torchrun."""
    options = parse()
    with contextlib.ExitStack() as stack:
        if options.untuned:
            skip_tuning(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        check(options)


def check(options: argparse.Namespace) -> None:
    """Run the chosen parts on this rank."""
    torch.set_num_threads(1 if options.device == "cpu" else 4)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, world, attempt = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    # torchrun's store outlives a restart and would hand out the addresses of ended processes.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"attempt {attempt}", dist.TCPStore(*address, is_master=False))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
    )
    record = Record(options.json, dist.get_rank())
    record.data = synchronised(record.data)  # pyright: ignore[reportAttributeAccessIssue]
    record.data["environment"] = environment(device)
    wanted = tuple(options.only.split(","))
    chosen = {n: p for n, p in parts(options, device).items() if n.startswith(wanted)}
    run_parts(options, record, chosen)
    if dist.get_rank() == 0:
        print(table(record.data), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
