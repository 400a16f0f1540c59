"""What one adapter sync costs on the trainer's side, on CPU, for the full model's adapter.

Random bf16 parameters on all 485 sites at rank 16: validate, pack, serialise; sizes of every way
to send them. ``--json FILE`` writes the figures; the last lines are a table with the limits.
"""

from __future__ import annotations

import argparse
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json
from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import builtin
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.lora.serving import padded_tensors, serving_config, total_bytes
from glm_lora.protocols import AdapterState
from glm_lora.rollout.sglang_payload import (
    request_with_bytes,
    request_with_folder,
)
from glm_lora.sync.verify import check_fused, check_state
from glm_lora.targets.selection import make_selection


def random_state(model: str, rank: int) -> AdapterState:
    """Random bf16 A and B on every trainable site."""
    spec = builtin(model)
    selection = make_selection(model, spec, trainable_sites(spec), rank=rank, alpha=2.0 * rank)
    torch.manual_seed(0)
    shapes = selection.tensor_shapes()
    tensors = {k: torch.randn(s).to(torch.bfloat16) for k, s in shapes.items()}
    return AdapterState(selection, tensors, 1, fingerprint_tensors(tensors))


def timed(repeats: int, work: Callable[[], object]) -> float:
    """Median seconds of ``work``."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def between_processes(state: AdapterState) -> AdapterState:
    """What one actor pickles and another unpickles, the shared memory between them left out."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[b.raw().toreadonly() for b in buffers])


def measure(state: AdapterState, repeats: int) -> dict[str, float]:
    """Seconds of each part and bytes of each way."""
    config = serving_config(state.selection, "base")
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None

    def by_bytes(copies: int = 1):
        return request_with_bytes("a", padded_tensors(state), config, copies=copies)

    def by_folder():
        with tempfile.TemporaryDirectory(dir=folder) as parent:
            return request_with_folder("a", padded_tensors(state), config, Path(parent) / "a")

    def validate():
        check_fused(state.selection)
        check_state(state)

    result = {
        "parameters": state.selection.trainable_parameters,
        "tensor_bytes": total_bytes(padded_tensors(state)),
        "validate_s": timed(repeats, validate),
        "serialise_bytes_s": timed(repeats, by_bytes),
        "serialise_folder_s": timed(repeats, by_folder),
        "between_processes_s": timed(repeats, lambda: between_processes(state)),
        "body_bytes": by_bytes().num_bytes,
        "body_bytes_tp8": by_bytes(8).num_bytes,
        "body_bytes_folder": by_folder().num_bytes,
    }
    result["total_bytes_s"] = result["validate_s"] + result["serialise_bytes_s"]
    result["total_folder_s"] = result["validate_s"] + result["serialise_folder_s"]
    return result


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-5.3-Flash")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(random_state(args.model, args.rank), args.repeats)
    figures |= {"torch": torch.__version__, "machine": platform.machine()}
    size = 2 * figures["parameters"]
    limit = size * 4 / 3 * 1.01
    rows = [
        ("parameters", f"{figures['parameters']:,}", "", True),
        ("validate, s", f"{figures['validate_s']:.3f}", "", True),
        ("serialise into a body, s", f"{figures['serialise_bytes_s']:.3f}", "", True),
        ("serialise into shared memory, s", f"{figures['serialise_folder_s']:.3f}", "", True),
        ("from actor to actor, s", f"{figures['between_processes_s']:.3f}", "", True),
        (
            "validate + pack + serialise, s",
            f"{figures['total_bytes_s']:.3f}",
            "<= 1",
            figures["total_bytes_s"] <= 1,
        ),
        (
            "the same by shared memory, s",
            f"{figures['total_folder_s']:.3f}",
            "<= 1",
            figures["total_folder_s"] <= 1,
        ),
        (
            "tensor payload, MB",
            f"{figures['tensor_bytes'] / 1e6:.1f}",
            f"{size / 1e6:.1f} + 1 %",
            figures["tensor_bytes"] <= 1.01 * size,
        ),
        (
            "body, one copy, MB",
            f"{figures['body_bytes'] / 1e6:.1f}",
            f"<= {limit / 1e6:.1f}",
            figures["body_bytes"] <= limit,
        ),
        (
            "body, TP 8, MB",
            f"{figures['body_bytes_tp8'] / 1e6:.1f}",
            f"<= {8 * limit / 1e6:.1f}",
            figures["body_bytes_tp8"] <= 8 * limit,
        ),
        (
            "body by shared memory, any TP, bytes",
            f"{figures['body_bytes_folder']}",
            "no copies",
            figures["body_bytes_folder"] < 1000,
        ),
    ]
    for name, value, bound, good in rows:
        print(f"{'ok  ' if good else 'MISS'} {name:<38} {value:>14}  {bound}")
    print_json(args.json, figures)
    return 0 if all(good for *_, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
