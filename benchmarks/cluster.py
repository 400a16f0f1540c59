"""What running on Ray costs: cold start, a lost engine, checkpoints, bookkeeping at scale.

Everything on this machine: the tiny model for the first two, the full model's adapter state (66
million parameters with Adam moments, random) for the checkpoint, and placement and driver for 1,000
engines that only wait. ``--json FILE`` writes the figures; the last lines are a table with limits.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ROOT / "launchers" / "run_glm5_3_flash_lora.py"
STEP_SECONDS = 9 * 60
ENGINES, SAMPLES, GROUP = 1000, 100_000, 8
PROMPT, LOGPROBS = tuple(range(64)), (-1.0,) * 64


def start(run: Path, folders: list[str], *options: str) -> subprocess.Popen[bytes]:
    """``train`` on the tiny model with a local Ray; prints into ``<run>.log``."""
    command = [sys.executable, str(LAUNCHER), "train", "--model-name", "tiny", "--run-dir"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(run), *folders, *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def until_rollout(process: subprocess.Popen[bytes], run: Path, number: int) -> float:
    """Wait for rollout ``number`` (from 1); the moment it was recorded."""
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= number):
        if process.poll() is not None:
            raise SystemExit(run.with_suffix(".log").read_text())
        time.sleep(0.01)
    return time.perf_counter()


def cold_start_and_lost_engine(work: Path, folders: list[str]) -> dict[str, float]:
    """Seconds to the first rollout; seconds that a killed engine costs, and its own start."""
    begin = time.perf_counter()
    run = work / "run"
    process = start(run, folders, "--num-rollout", "40")
    figures = {"cold_start_seconds": until_rollout(process, run, 1) - begin}
    until_rollout(process, run, 5)
    (engine,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "EngineActor" in " ".join(child.cmdline())
    ]
    done = len((run / "metrics.jsonl").read_text().splitlines())
    killed = time.perf_counter()
    engine.kill()
    figures["killed_engine_seconds"] = until_rollout(process, run, done + 2) - killed
    process.wait()
    text = run.with_suffix(".log").read_text()
    found = re.search(r"is back after ([0-9.]+) s", text)
    if process.returncode or found is None:
        raise SystemExit(text)
    figures["engine_start_seconds"] = float(found[1])
    overhead = figures["killed_engine_seconds"] - figures["engine_start_seconds"]
    return figures | {"killed_engine_overhead_seconds": overhead}


def checkpoint(work: Path) -> dict[str, float]:
    """Save and load the full model's adapter state on the local disk."""
    from glm_lora.arch.spec import builtin
    from glm_lora.checkpoint.train_state import LocalTensor, load_train_state, save_train_state
    from glm_lora.config import SelectionConfig
    from glm_lora.targets.resolve import resolve

    spec = builtin("GLM-5.3-Flash")
    selection = resolve(spec, "GLM-5.3-Flash", SelectionConfig()).selection
    torch.manual_seed(0)
    state = {
        key + suffix: torch.randn(shape)
        for key, shape in selection.tensor_shapes().items()
        for suffix in ("", ".exp_avg", ".exp_avg_sq")
    }
    begin = time.perf_counter()
    copy = {key: tensor.clone() for key, tensor in state.items()}
    blocking = time.perf_counter() - begin
    local = {key: LocalTensor(tensor) for key, tensor in copy.items()}
    folder = work / "checkpoints" / "iter_0000001"
    # The first call imports megatron-core.
    save_train_state(work / "checkpoints" / "iter_0000000", {"a": LocalTensor(torch.ones(1))}, {})
    begin = time.perf_counter()
    save_train_state(folder, local, {})
    saved = time.perf_counter() - begin
    empty = {key: LocalTensor(torch.empty_like(tensor)) for key, tensor in state.items()}
    begin = time.perf_counter()
    load_train_state(folder, empty)
    loaded = time.perf_counter() - begin
    if not all(torch.equal(empty[key].tensor, tensor) for key, tensor in state.items()):
        raise SystemExit("the checkpoint does not load as it was saved")
    shutil.rmtree(work / "checkpoints")
    return {
        "checkpoint_parameters": float(selection.trainable_parameters),
        "checkpoint_bytes": float(sum(t.nbytes for t in state.values())),
        "checkpoint_blocking_seconds": blocking,
        "checkpoint_save_seconds": saved,
        "checkpoint_load_seconds": loaded,
    }


def bookkeeping() -> dict[str, float]:
    """Processor seconds of placement and of one step's sampling with engines that only wait.

    The real pool and batch code; futures of this process instead of Ray's.
    """
    placed, sampled, batched = placing(), *sampling()
    return {
        "scale_placement_seconds": placed,
        "scale_driver_seconds": sampled,
        "scale_batch_seconds": batched,
        "scale_share_of_step": (placed + sampled + batched) / STEP_SECONDS,
    }


def placing() -> float:
    """Seconds to place the engines, one on each machine."""
    from glm_lora.cluster.placement import Host, check_fit, place
    from glm_lora.config import TrainConfig

    values: dict[str, Any] = {
        "hf_checkpoint": "h", "ref_load": "r", "run_dir": "d", "num_nodes": ENGINES,
        "num_gpus_per_node": 8,
        "sglang": {"rollout_num_gpus_per_engine": 8, "sglang_python": "python"},
    }  # fmt: skip
    begin = time.process_time()
    placement = place(TrainConfig.model_validate(values), gpus=True)
    check_fit(placement, [Host(str(n), 8, 16) for n in range(ENGINES)])
    placed = time.process_time() - begin
    assert len(placement.engines) == ENGINES
    return placed


def sampling() -> tuple[float, float]:
    """Seconds of the driver for one step's samples, and to make a batch of them."""
    from glm_lora.cluster.engines import EnginePool
    from glm_lora.config import AlgorithmConfig
    from glm_lora.protocols import BASE, Request, SamplingParams
    from glm_lora.rl.batch import make_batch
    from glm_lora.train.experience import check_samples

    requests = [
        Request(PROMPT, SamplingParams(len(PROMPT), seed=n), GROUP) for n in range(SAMPLES // GROUP)
    ]
    with ThreadPoolExecutor(8) as answering, local_futures():
        pool = EnginePool(
            [_WaitingEngine(answering) for _ in range(ENGINES)],
            rollout_limit=600,
            call_limit=600,
            max_restarts=3,
            note=print,
        )
        begin = time.process_time()
        samples = pool.generate(requests, BASE)
        check_samples(samples, requests, BASE)
        sampled = time.process_time() - begin
    rewards = [float(n % 3 == 0) for n in range(len(samples))]
    begin = time.process_time()
    make_batch(samples, rewards, GROUP, algorithm=AlgorithmConfig(), step=0, temperature=1.0)
    return sampled, time.process_time() - begin


class _WaitingEngine:
    """Stands for an engine's actor; threads give its answers, always the same."""

    lanes = 4

    def __init__(self, answering: ThreadPoolExecutor) -> None:
        self.answering = answering

    def start(self) -> None: ...
    def ready(self) -> None: ...
    def end(self) -> None: ...

    def submit(self, name: str, *args: Any) -> Any:
        return self.answering.submit(self._generate, *args)

    def _generate(self, requests: list, adapter: Any) -> list:
        from glm_lora.protocols import Finish, Sample

        return [
            Sample(r.prompt_ids, PROMPT, LOGPROBS, Finish.STOP, adapter)
            for r in requests
            for _ in range(r.n)
        ]


@contextmanager
def local_futures() -> Iterator[None]:
    """The pool's questions to Ray go to futures of this process."""
    import ray

    from glm_lora.cluster import engines as pool_module

    def wait_for(refs: list[Future], num_returns: int, timeout: float) -> tuple[list, list]:
        done, left = wait(refs, timeout, FIRST_COMPLETED)
        return list(done), list(left)

    saved = ray.wait, ray.get, pool_module.error_of
    ray.wait, ray.get = wait_for, lambda ref: ref.result()
    pool_module.error_of = lambda ref, what, failure: None
    try:
        yield
    finally:
        ray.wait, ray.get, pool_module.error_of = saved


LIMITS = {
    "cold_start_seconds": 15.0,
    "killed_engine_overhead_seconds": 10.0,
    "checkpoint_save_seconds": 5.0,
    "checkpoint_load_seconds": 5.0,
    "checkpoint_blocking_seconds": 1.0,
    "scale_share_of_step": 0.05,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_json(parser)
    parser.add_argument("--part", action="append", choices=["ray", "checkpoint", "scale"])
    parser.add_argument("--folder", action="append", default=[], help="Options of train, as given.")
    options = parser.parse_args()
    parts = options.part or ["ray", "checkpoint", "scale"]
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if "ray" in parts:
            figures |= cold_start_and_lost_engine(work, options.folder)
        if "checkpoint" in parts:
            figures |= checkpoint(work)
        if "scale" in parts:
            figures |= bookkeeping()
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{key: round(value, 4) for key, value in figures.items()},
    }
    for key, value in figures.items():
        limit = LIMITS.get(key)
        verdict = (
            "" if limit is None else f"  limit {limit:g}  {'ok' if value <= limit else 'OVER'}"
        )
        print(f"{key:<34} {value:>16,.3f}{verdict}")
    print_json(options.json, record)


if __name__ == "__main__":
    main()
