"""One optimizer step on a GPU: tokens/s, memory and numbers, beside transformers + PEFT.

    python benchmarks/train_step.py --peer hf-peft --json benchmarks/results/train_step_h200.json

Random weights from a seed, built in device memory; adapters on the recipe's projections. A step is
forward, loss on all tokens, backward, clip, AdamW. Lengths are written BxL: B sequences of L
tokens, packed into one row here, a batch for the peer. ``--device cpu --model tiny`` runs the
whole script without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json, save_json
from glm_lora.arch.spec import ModelSpec, builtin
from glm_lora.checkpoint.random_init import init_random
from glm_lora.config import OptimizerConfig, SelectionConfig
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.batch import ModelBatch, pack
from glm_lora.model.fast import DsaBackend, active_paths, plain_torch
from glm_lora.model.moe import Router
from glm_lora.model.parallel import ParallelContext
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import Stage, build_stage
from glm_lora.targets.resolve import resolve
from glm_lora.train.optimizer import AdapterOptimizer

MATRIX_RATE = 790e12
"""bf16 operations per second of an 8192^3 product on this GPU."""
WARM_UP = 2


def active_parameters(spec: ModelSpec) -> int:
    """Weights that one token is multiplied with (projections, its experts and the head)."""
    from glm_lora.arch.projections import all_params

    total = 0
    for key, param in all_params(spec).items():
        if len(param.shape) < 2 or "embed_tokens" in key or "conv1d" in key:
            continue
        share = spec.num_experts_per_tok / spec.n_routed_experts if param.row.expert else 1
        total += int(param.numel * share)
    return total


def roofline(spec: ModelSpec, recompute: str) -> float:
    """Tokens/s if only those products were computed: 2 forward, 2 backward, 2 again if full."""
    per_weight = 6 if recompute == "full" else 4
    return MATRIX_RATE / (per_weight * active_parameters(spec))


class Timer:
    """Wall-clock seconds of device work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def median(self, work: Callable[[int], object], repeats: int) -> tuple[float, list[float]]:
        """Median and all times of ``work(i)`` after the warm-up calls."""
        times = []
        for i in range(WARM_UP + repeats):
            self.sync()
            start = time.perf_counter()
            work(i)
            self.sync()
            times.append(time.perf_counter() - start)
        return statistics.median(times[WARM_UP:]), times

    def peak(self, reset: bool = False) -> float:
        """GiB allocated at most since the last reset."""
        if self.device.type != "cuda":
            return 0.0
        if reset:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**30


class Ours:
    """The trainer's stage, adapters and optimizer."""

    def __init__(
        self,
        spec: ModelSpec,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        dsa_backend: DsaBackend,
    ):
        self.device = device
        self.context = ParallelContext(device=device)
        self.stage = build_stage(
            spec, self.context, dtype=dtype, recompute="full", dsa_backend=dsa_backend
        )
        init_random(self.stage, seed=0)
        self.selection = resolve(spec, name, SelectionConfig()).selection
        self.adapters = attach_adapters(self.stage, self.selection, seed=0)
        # B is zero in a new adapter; the comparison of gradients needs one that acts.
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, p in self.adapters.parameters().items():
                if key.endswith("lora_B.weight"):
                    p.copy_(0.01 * torch.randn(p.shape, generator=generator))
        self.optimizer = AdapterOptimizer(
            self.adapters.parameters(), OptimizerConfig(lr=1e-6), total_steps=1000
        )

    def set_recompute(self, kind: str) -> None:
        """Change what layers run again."""
        for layer in self.stage.layers:
            layer.recompute = kind  # pyright: ignore

    def batch(self, tokens_B_L: Tensor) -> ModelBatch:
        """Sequences packed into one row, on the device."""
        return pack(tokens_B_L.tolist(), device=self.device)

    def backward(self, *batches: ModelBatch) -> None:
        """Forward and backward of the mean loss, a micro-batch at a time."""
        count = sum(n - 1 for b in batches for n in b.packing.lengths)  # pyright: ignore
        run_microbatches(self.stage, batches, lambda i, lp, e: -lp.sum() / count)

    def step(self, *batches: ModelBatch) -> None:
        """The whole optimizer step."""
        self.backward(*batches)
        norm = self.adapters.grad_norm(self.context)
        self.optimizer.step(1.0 / norm if norm > 1.0 else 1.0)

    def logprobs(self, batch: ModelBatch) -> Tensor:
        """fp32 ``[sequences, longest - 1]``, no gradient."""
        (out,) = run_microbatches(self.stage, [batch], None, forward_only=True)
        return out.logprobs

    def gradients(self, batch: ModelBatch) -> dict[str, Tensor]:
        """Adapter gradients of one batch."""
        self.optimizer.zero_grad()
        self.backward(batch)
        grads = {k: p.grad.float().clone() for k, p in self.adapters.parameters().items()}  # pyright: ignore
        self.optimizer.zero_grad()
        return grads


class Peer:
    """transformers + PEFT on the same weights."""

    def __init__(self, ours: Ours) -> None:
        import peer_hf

        self.api = peer_hf
        self.model = peer_hf.peer_model(ours.stage, ours.selection, ours.device)
        self.parameters = peer_hf.copy_adapters(self.model, ours.adapters)
        self.optimizer = torch.optim.AdamW(list(self.parameters.values()), lr=1e-6, fused=True)
        self.device = ours.device

    def set_recompute(self, kind: str) -> None:
        """Gradient checkpointing on or off."""
        self.api.set_recompute(self.model, kind == "full")

    def batch(self, tokens_B_L: Tensor) -> Tensor:
        """Tokens on the device."""
        return tokens_B_L.to(self.device)

    def step(self, tokens: Tensor) -> None:
        """The whole optimizer step."""
        self.api.peer_loss(self.model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """fp32 ``[B, L - 1]``, no gradient."""
        return self.api.peer_logprobs(self.model, tokens)

    def gradients(self, tokens: Tensor) -> dict[str, Tensor]:
        """Adapter gradients of one batch."""
        self.optimizer.zero_grad(set_to_none=True)
        self.api.peer_loss(self.model, tokens).backward()
        grads = {k: p.grad.float().clone() for k, p in self.parameters.items()}  # pyright: ignore
        self.optimizer.zero_grad(set_to_none=True)
        return grads


def sizes(text: str) -> list[tuple[int, int]]:
    """``"1x2048,4x2048"`` as pairs."""
    return [(int(b), int(n)) for b, n in (item.split("x") for item in text.split(",") if item)]


def random_tokens(spec: ModelSpec, shape: tuple[int, int], seed: int) -> Tensor:
    """Uniform token ids."""
    return torch.randint(0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def measure(
    side: Ours | Peer,
    spec: ModelSpec,
    shape: tuple[int, int],
    kind: str,
    repeats: int,
    timer: Timer,
) -> dict[str, Any]:
    """One row: step and log-probability rates and peak memory."""
    side.set_recompute(kind)
    batches: list[Any] = [side.batch(random_tokens(spec, shape, seed)) for seed in range(3)]
    tokens = shape[0] * shape[1]
    timer.peak(reset=True)
    seconds, times = timer.median(lambda i: side.step(batches[i % 3]), repeats)
    row = {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "peak_gib": timer.peak(),
        "times": times,
    }
    if isinstance(side, Ours):
        forward, _ = timer.median(lambda i: side.logprobs(batches[i % 3]), repeats)
        row["logprob_tokens_per_s"] = tokens / forward
    return row


def ragged(ours: Ours, spec: ModelSpec, tokens: int, steps: int, timer: Timer) -> dict[str, Any]:
    """Full-recompute steps on packed samples of random lengths, new ones in every step."""
    ours.set_recompute("full")
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(steps + WARM_UP):
        cuts = torch.randint(64, tokens - 64, (7,), generator=generator).sort().values.tolist()
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True) if b > a]
        texts = [random_tokens(spec, (1, n), seed=n)[0].tolist() for n in lengths]
        batches.append(pack(texts, device=ours.device))
    seconds, times = timer.median(lambda i: ours.step(batches[i]), steps)
    return {"tokens": tokens, "tokens_per_s": tokens / seconds, "times": times}


def accumulated(
    ours: Ours, spec: ModelSpec, shape: tuple[int, int], count: int, timer: Timer
) -> dict[str, Any]:
    """Steps of several micro-batches: their host work may overlap, that of a single one cannot."""
    ours.set_recompute("full")
    batches = [ours.batch(random_tokens(spec, shape, seed)) for seed in range(count)]
    seconds, times = timer.median(lambda i: ours.step(*batches), 5)
    tokens = count * shape[0] * shape[1]
    size = "{}x{}".format(*shape)
    return {"size": size, "micro_batches": count, "tokens_per_s": tokens / seconds, "times": times}


def compare(ours: Ours, peer: Peer | None, spec: ModelSpec, lengths: Sequence[int]) -> list[dict]:
    """Distances of both sides to plain torch code in fp32 on the same numbers."""
    exact = Ours.__new__(Ours)
    exact.device, exact.context, exact.selection = ours.device, ours.context, ours.selection
    exact.stage = build_stage(spec, ours.context, dtype=torch.float32, recompute="full")
    held = exact.stage.base_parameters()
    with torch.no_grad():
        for key, value in ours.stage.base_parameters().items():
            held[key].copy_(value)
    exact.adapters = attach_adapters(exact.stage, ours.selection, seed=0)
    exact.adapters.load_full({k: p.detach() for k, p in ours.adapters.parameters().items()})
    exact.optimizer = AdapterOptimizer(exact.adapters.parameters(), OptimizerConfig(), 1)
    if peer is not None:
        peer.api.copy_adapters(peer.model, ours.adapters)
    rows = []
    for length in lengths:
        tokens = random_tokens(spec, (1, length), seed=100)
        with plain_torch():
            batch = exact.batch(tokens)
            with recorded_experts(exact.stage) as found:
                want = exact.logprobs(batch)
            chosen = torch.stack(found, dim=1).unsqueeze(0)
            grads = exact.gradients(batch)
        row: dict[str, Any] = {"length": length}
        sides: list[tuple[str, Any]] = [("ours", ours)]
        if peer is not None:
            sides.append(("peer", peer))
        for name, side in sides:
            batch = side.batch(tokens)
            row[name] = _distance(side, batch, want, grads)
        # A rounded router score near a tie picks another expert: noise of its own kind.
        given = replace(ours.batch(tokens), routed_experts=chosen)
        row["ours_same_experts"] = _distance(ours, given, want, grads)
        rows.append(row)
    # Packed, ragged, beside the same sequences alone.
    lengths = (max(2, lengths[0] // 2), max(2, lengths[0] // 7), max(2, lengths[0] // 3))
    texts = [random_tokens(spec, (1, n), seed=n)[0].tolist() for n in lengths]
    together = ours.logprobs(pack(texts, device=ours.device))
    worst = 0.0
    for i, text in enumerate(texts):
        alone = ours.logprobs(pack([text], device=ours.device))[0]
        worst = max(worst, (together[i, : len(text) - 1] - alone).abs().max().item())
    rows.append({"packed_lengths": lengths, "packed_against_alone_max": worst})
    return rows


@contextmanager
def recorded_experts(stage: Stage) -> Iterator[list[Tensor]]:
    """The experts ``[tokens, k]`` that each MoE layer chooses inside the block, in order."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _args, out: found.append(out[1]))
        for module in stage.modules()
        if isinstance(module, Router)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _distance(
    side: Ours | Peer, batch: Any, want: Tensor, grads: dict[str, Tensor]
) -> dict[str, Any]:
    """How far one side's log-probabilities and gradients are from the exact ones."""
    away = (side.logprobs(batch).float() - want).abs()
    return {
        "logprob_mean": away.mean().item(),
        "logprob_max": away.max().item(),
        **_cosines(side.gradients(batch), grads),
    }


def _cosines(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    def cosine(a: Tensor, b: Tensor) -> float:
        return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()

    each = {k: cosine(got[k], want[k]) for k in want}
    worst = min(each, key=lambda k: each[k])
    flat = [torch.cat([x[k].flatten().double() for k in want]) for x in (got, want)]
    return {"gradient_cosine": cosine(*flat), "worst": each[worst], "worst_site": worst}  # pyright: ignore


def profile(ours: Ours, spec: ModelSpec, shape: tuple[int, int], path: Path) -> None:
    """Write which kernels one step spends its time in."""
    ours.set_recompute("full")
    batch = ours.batch(random_tokens(spec, shape, 0))
    ours.step(batch)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as trace:
        ours.step(batch)
        torch.cuda.synchronize()
    table = trace.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=70, max_name_column_width=90
    )
    path.write_text(table, encoding="utf-8")


def versions() -> dict[str, str]:
    """Packages that decide the speed."""
    names = ("torch", "triton", "flash-linear-attention", "transformers", "peft")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def table(result: dict[str, Any]) -> list[str]:
    """The figures as text."""
    lines = [
        f"{'size':>9} {'recompute':>9} {'ours tok/s':>11} {'GiB':>6} {'logprob tok/s':>13} "
        f"{'roofline':>8} {'peer tok/s':>11} {'GiB':>6} {'ratio':>6}"
    ]
    for row in result["rows"]:
        mine, theirs = row["ours"], row.get("peer")
        line = (
            f"{row['size']:>9} {row['recompute']:>9} {mine['tokens_per_s']:>11,.0f} "
            f"{mine['peak_gib']:>6.1f} {mine['logprob_tokens_per_s']:>13,.0f} "
            f"{mine['tokens_per_s'] / row['roofline']:>8.0%}"
        )
        if theirs:
            ratio = mine["tokens_per_s"] / theirs["tokens_per_s"]
            line += f" {theirs['tokens_per_s']:>11,.0f} {theirs['peak_gib']:>6.1f} {ratio:>5.2f}x"
        lines.append(line)
    for row in result.get("numbers", []):
        lines.append(json.dumps(row))
    return lines


def options() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-5.3-Flash-4layer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="1x2048,1x4096,1x8192,4x2048")
    parser.add_argument("--growth", default="", help="sizes for this project only, full recompute")
    parser.add_argument("--recompute", default="full,none")
    parser.add_argument("--dsa-backend", choices=get_args(DsaBackend), default="auto")
    parser.add_argument("--peer", choices=["hf-peft", "none"], default="none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compare", default="", help="lengths to compare with fp32 at")
    parser.add_argument("--profile", default="", help="write kernel times of one step to this file")
    parser.add_argument("--profile-size", default="1x8192")
    parser.add_argument("--ragged", type=int, default=0, help="tokens of packed random lengths")
    parser.add_argument(
        "--micro-batches", type=int, default=0, help="also a step of so many of the first size"
    )
    add_json(parser)
    return parser.parse_args()


def main() -> None:
    """Parse, run, print the table."""
    args = options()
    spec, device = builtin(args.model), torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    timer, started = Timer(device), time.perf_counter()
    ours = Ours(spec, args.model, device, dtype, args.dsa_backend)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": gpu,
        "versions": versions(),
        "command": " ".join(["benchmarks/train_step.py", *sys.argv[1:]]),
        "model": args.model,
        "active_parameters": active_parameters(spec),
        "paths": active_paths(args.dsa_backend),
        "rows": [],
    }

    def save() -> None:
        result["wall_s"] = time.perf_counter() - started
        save_json(args.json, result)

    def add(shape: tuple[int, int], kind: str) -> None:
        row: dict[str, Any] = {"size": "{}x{}".format(*shape), "recompute": kind}
        row["roofline"] = roofline(spec, kind)
        row["ours"] = measure(ours, spec, shape, kind, args.repeats, timer)
        result["rows"].append(row)
        report(row)

    def report(row: dict[str, Any]) -> None:
        print(table({"rows": [row]})[1], f"at {time.perf_counter() - started:.0f} s", flush=True)
        save()

    for shape in sizes(args.sizes):
        for kind in args.recompute.split(","):
            add(shape, kind)
    if args.micro_batches:
        shape = sizes(args.sizes)[0]
        result["accumulated"] = accumulated(ours, spec, shape, args.micro_batches, timer)
        print(json.dumps(result["accumulated"]), flush=True)
    peer = None
    if args.peer == "hf-peft":
        peer = Peer(ours)
        for row in result["rows"]:
            shape, kind = sizes(row["size"])[0], row["recompute"]
            try:
                row["peer"] = measure(peer, spec, shape, kind, args.repeats, timer)
            except torch.OutOfMemoryError:
                row["peer_out_of_memory"] = True
            report(row)
    if args.compare:
        lengths = [int(n) for n in args.compare.split(",")]
        result["numbers"] = compare(ours, peer, spec, lengths)
        print(json.dumps(result["numbers"]), flush=True)
        save()
    if args.ragged:
        result["ragged"] = ragged(ours, spec, args.ragged, 6, timer)
        print(json.dumps(result["ragged"]), flush=True)
    if args.profile:
        profile(ours, spec, sizes(args.profile_size)[0], Path(args.profile))
    for shape in sizes(args.growth):
        add(shape, "full")
    save()
    print("\n".join(table(result)))
    print_json(args.json, result)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
