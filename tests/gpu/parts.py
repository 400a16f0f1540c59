"""What ``multi_gpu.py`` checks: topologies against one rank, the wide slice, KDA's kernel."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import BUILTIN, ModelSpec
from glm_lora.checkpoint.random_init import init_random
from glm_lora.config import OptimizerConfig, ParallelConfig, TrainConfig
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.delta_rule import delta_rule
from glm_lora.model.parallel import ParallelContext, init_parallel
from glm_lora.model.stage import build_stage
from glm_lora.protocols import AdapterRef, TrainBatch, TrainSample
from glm_lora.rollout.sglang_payload import request_with_folder
from glm_lora.targets.recipes import load_recipe
from glm_lora.targets.resolve import resolve
from glm_lora.train.optimizer import AdapterOptimizer
from glm_lora.train.share import sequence_logprobs
from glm_lora.train.step import Updater
from tests.dist.oracle import MIXED, Result, Topology, train

SLICE = "GLM-5.3-Flash-4layer"
WIDE = replace(
    MIXED,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    vocab_size=512,
    num_attention_heads=8,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    v_head_dim=64,
    linear_num_heads=8,
    linear_head_dim=128,
    index_head_dim=64,
)
"""Every kind of layer with sizes that the kernels take."""

FP32 = 1e-4
"""Relative to the largest value of a tensor, as on the CPU: fp32 sums in another order."""
BF16_RATIO = 2.0
"""Two roundings of one computation lie about sqrt(2) times as far apart as each from the exact
result; where the router or the indexer decides otherwise on a tie, more."""


@dataclass(frozen=True)
class Outcome:
    """What one check found."""

    passed: bool
    detail: str
    numbers: Mapping[str, Any]


def topologies(world: int) -> dict[str, Topology]:
    """The shapes for this many ranks; data parallelism takes what is left."""
    shapes = {
        "tp2 sp": Topology(tp=2),
        "pp2": Topology(pp=2),
        "ep2": Topology(ep=2),
        f"dp{world}": Topology(),
        "tp2 ep2": Topology(tp=2, ep=2, recompute="full"),
    }
    if world >= 4:
        shapes |= {
            f"tp{world} sp": Topology(tp=world),
            f"ep{world}": Topology(ep=world),
            "tp2 pp2": Topology(tp=2, pp=2),
            f"tp2 pp2 ep{world // 2}": Topology(tp=2, pp=2, ep=world // 2, recompute="full"),
        }
    return shapes


class Oracle:
    """Compares topologies with one rank, which every rank computes on its own device when needed.

    Only rank 0 compares, but no rank waits for it: kernels of a new size are tuned for minutes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alone: dict[torch.dtype, Result] = {}

    def check(self, shape: Topology, dtype: torch.dtype) -> Outcome:
        """Train in one shape on all ranks; the outcome counts on rank 0."""
        shape = replace(shape, spec=WIDE, dtype=dtype)
        want, exact = self._one_rank(dtype), self._one_rank(torch.float32)
        ctx = init_parallel(shape.config(), self._device)
        got = train(shape, ctx)
        if ctx.rank:
            return Outcome(True, "", {})
        numbers = {"loss": got.loss, "loss_one_rank": want.loss, "norms": got.norms}
        if dtype is torch.float32:
            return _exact(got, want, numbers)
        return _rounded(got, want, exact, numbers)

    def _one_rank(self, dtype: torch.dtype) -> Result:
        if dtype not in self._alone:
            alone = ParallelContext(device=self._device)
            self._alone[dtype] = train(Topology(spec=WIDE, dtype=dtype), alone)
        return self._alone[dtype]


def _exact(got: Result, want: Result, numbers: dict[str, Any]) -> Outcome:
    numbers |= {
        "loss_rel": abs(got.loss - want.loss) / max(abs(want.loss), 1e-9),
        "logprob_abs": max(_gap(g, w) for g, w in zip(got.logprobs, want.logprobs, strict=True)),
        "norm_rel": max(abs(g - w) / w for g, w in zip(got.norms, want.norms, strict=True)),
        "gradient_rel": _worst(got.gradients, want.gradients),
        "adapter_rel": _worst(got.adapters, want.adapters),
    }
    # Log-probabilities are of size log(vocabulary) = 6; FP32 of that is 6e-4, rounding is less.
    wrong = [
        name
        for name in ("loss_rel", "logprob_abs", "norm_rel", "gradient_rel", "adapter_rel")
        if not numbers[name] <= FP32
    ]
    return _outcome(got, wrong, numbers, "gradient_rel", "adapter_rel")


def _rounded(got: Result, want: Result, exact: Result, numbers: dict[str, Any]) -> Outcome:
    """The shape may be as far from one rank as rounding puts one rank from fp32, times a factor."""

    def distances(name: str) -> tuple[float, float]:
        ours, alone, ideal = (_flat(getattr(r, name)) for r in (got, want, exact))
        size = float(ideal.norm())
        return float((ours - alone).norm()) / size, float((alone - ideal).norm()) / size

    wrong = []
    for name in ("logprobs", "gradients", "adapters"):
        apart, noise = distances(name)
        numbers |= {f"{name}_rel": apart, f"{name}_noise": noise}
        if not apart <= BF16_RATIO * noise:
            wrong.append(name)
    return _outcome(got, wrong, numbers, "logprobs_rel", "gradients_rel", "adapters_rel")


def _outcome(got: Result, wrong: list[str], numbers: dict[str, Any], *shown: str) -> Outcome:
    wrong += ["drift: " + got.drift] if got.drift else []
    wrong += [f"dead: {len(got.dead)}"] if got.dead else []
    detail = ", ".join(f"{name} {numbers[name]:.1e}" for name in shown)
    if wrong:
        detail = f"wrong: {', '.join(wrong)}; {detail}"
    return Outcome(not wrong, detail, numbers)


def _gap(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max()) if got.numel() else 0.0


def _worst(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    return max(_gap(got[key], want[key]) / float(want[key].abs().max()) for key in want)


def _flat(values: Mapping[str, Tensor] | list[Tensor]) -> Tensor:
    tensors = values.values() if isinstance(values, Mapping) else values
    return torch.cat([t.flatten().double() for t in tensors])


@dataclass(frozen=True)
class SliceRun:
    """How the slice is trained: a model, its recipe, and random samples of one length."""

    model: str
    recipe: Path
    steps: int
    samples: int
    length: int
    dtype: torch.dtype


def train_slice(run: SliceRun, parallel: ParallelConfig, device: torch.device) -> Outcome:
    """Real updates (policy loss, AdamW) from random weights; drift is checked after every one."""
    spec = BUILTIN[run.model]
    ctx = init_parallel(parallel, device)
    parallel = parallel.model_copy(
        update={"drift_check_interval": 1, "max_tokens_per_gpu": 2 * run.length}
    )
    nowhere = Path("unused")
    config = TrainConfig(
        model_name=run.model,
        hf_checkpoint=nowhere,
        ref_load=nowhere,
        run_dir=nowhere,
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-4),
    )
    stage = build_stage(spec, ctx, dtype=run.dtype, recompute=parallel.recompute)
    init_random(stage, 0)
    selection = resolve(spec, run.model, load_recipe(run.recipe)).selection
    adapters = attach_adapters(stage, selection, seed=0)
    optimizer = AdapterOptimizer(adapters.parameters(), config.optimizer, run.steps)
    updater = Updater(config, stage, adapters, optimizer, ctx)
    samples = _samples(run, spec, updater)
    seconds, losses, norms = [], [], []
    for step in range(run.steps):
        start = time.perf_counter()
        stats = updater.step(TrainBatch(samples(step), step))
        _wait(device)
        seconds.append(time.perf_counter() - start)
        losses.append(stats.metrics["train/loss"])
        norms.append(stats.metrics["train/grad_norm"])
    start = time.perf_counter()
    gathered = adapters.gather(ctx, torch.bfloat16)
    gather_seconds = time.perf_counter() - start
    finite = bool(np.isfinite([*losses, *norms]).all())
    whole = all(bool(t.isfinite().all()) for t in gathered.values())
    speed = run.samples * run.length / float(np.median(seconds)) / ctx.world_size
    numbers = {
        "sites": len(selection.adapters),
        "steps": run.steps,
        "losses": losses,
        "grad_norms": norms,
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": speed,
        "gather_seconds": gather_seconds,
        "gathered_bytes": sum(t.numel() * t.element_size() for t in gathered.values()),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }
    detail = (
        f"{len(losses)} steps, grad norm {norms[0]:.3g} to {norms[-1]:.3g}, no drift, "
        f"{speed:.0f} tokens/s/GPU, gather {gather_seconds:.2f} s"
    )
    if not (finite and whole):
        detail = "not finite; " + detail
    return Outcome(finite and whole and min(norms) > 0, detail, numbers)


def _samples(
    run: SliceRun, spec: ModelSpec, updater: Updater
) -> Callable[[int], tuple[TrainSample, ...]]:
    """The same random samples for every step; their log-probabilities are the first policy's."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, spec.vocab_size, (run.samples, run.length)).tolist()
    prompt = run.length // 8
    found = sequence_logprobs(
        updater.stage,
        updater.context,
        tokens,
        temperature=1.0,
        max_tokens=updater.config.parallel.max_tokens_per_gpu,
    )

    def samples(step: int) -> tuple[TrainSample, ...]:
        return tuple(
            TrainSample(
                prompt_ids=tuple(ids[:prompt]),
                response_ids=tuple(ids[prompt:]),
                rollout_logprobs=tuple(logprobs[prompt - 1 :].tolist()),
                advantage=(-1.0) ** i,
                loss_mask=(1,) * (run.length - prompt),
                adapter=AdapterRef(f"step{step}", step),
            )
            for i, (ids, logprobs) in enumerate(zip(tokens, found, strict=True))
        )

    return samples


def gather_adapter(model: str, recipe: Path, device: torch.device) -> Outcome:
    """A whole model's adapter from tensor-parallel shards to what the engine reads, timed.

    The base is not built: gathering needs the projections' shapes alone. B is random, cut from one
    full tensor, so that a shard in the wrong place shows.
    """
    spec, parallel = (
        BUILTIN[model],
        ParallelConfig(tensor_model_parallel_size=dist.get_world_size()),
    )
    ctx = init_parallel(parallel, device)
    selection = resolve(spec, model, load_recipe(recipe)).selection
    sites = {
        site.disk_name: SimpleNamespace(
            disk_name=site.disk_name, shape=site.shape, kind=site.kind, adapter=None
        )
        for site in trainable_sites(spec)
    }
    bare = SimpleNamespace(spec=spec, ctx=ctx, linear_sites=lambda: sites)
    adapters = attach_adapters(bare, selection, seed=0)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    full = {
        key: torch.randn(shape, generator=generator)
        for key, shape in selection.tensor_shapes().items()
    }
    adapters.load_full(full)
    gather, pack = [], []
    whole = True
    for i in range(7):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        got = adapters.gather(ctx, torch.bfloat16)
        gather.append(time.perf_counter() - start)
        if i == 0:
            whole = all(torch.equal(got[key], full[key].bfloat16()) for key in full)
        if ctx.rank == 0:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                start = time.perf_counter()
                request_with_folder("a", got, {}, Path(folder) / "a")
                pack.append(time.perf_counter() - start)
    numbers = {
        "parameters": selection.trainable_parameters,
        "bytes": sum(t.numel() * t.element_size() for t in got.values()),
        "gather_seconds": gather,
        "pack_seconds": pack,
        "equal": whole,
    }
    if not pack:
        return Outcome(whole, "", numbers)
    took = [float(np.median(x[2:])) for x in (gather, pack)]
    detail = f"gather {1e3 * took[0]:.0f} ms, pack {1e3 * took[1]:.0f} ms, limit 200 ms together"
    if not whole:
        detail = "not the tensors that were cut; " + detail
    return Outcome(whole and sum(took) <= 0.2, detail, numbers)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


HEADS, HEAD, BOUND = 8, 128, -5.0
KDA_TOLERANCE = 0.02
"""RMS of the difference over RMS of the reference: the kernel rounds operands of several products
in a row (and its result) to bf16, 0.2 % each; the reference computes in fp32 from the same bf16."""


def check_kda(device: torch.device, lengths: tuple[int, ...]) -> Outcome:
    """fla's chunk_kda against ``delta_rule``, and packed against one sequence at a time."""
    from fla.ops.kda import chunk_kda

    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device) * scale
        return values.bfloat16().requires_grad_()

    shape = (1, sum(lengths), HEADS, HEAD)
    inputs = [noise(*shape) for _ in range(4)] + [noise(*shape[:3])]
    rate = torch.randn(HEADS, generator=generator, device=device) * 0.3
    bias = torch.randn(HEADS * HEAD, generator=generator, device=device) * 2 - 4
    weight = noise(*shape).detach()

    def kernel(*x: Tensor, **bounds: Tensor) -> Tensor:
        return chunk_kda(
            *x,
            A_log=rate,
            dt_bias=bias,
            lower_bound=BOUND,
            safe_gate=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            **bounds,
        )[0]

    def reference(q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor) -> Tensor:
        speed = rate.exp().unsqueeze(-1)
        g = BOUND * torch.sigmoid(speed * (f.float() + bias.view(HEADS, HEAD)))
        return delta_rule(q, k, v.float(), g, beta.float().sigmoid(), lower_bound=BOUND)

    def results(function: Callable[..., Tensor], parts: list[slice], **kwargs: Tensor):
        outs = [function(*(x[:, p] for x in inputs), **kwargs) for p in parts]
        out = torch.cat(outs, 1)
        grads = torch.autograd.grad((out.float() * weight.float()).sum(), inputs)
        return [t.detach().float() for t in (out, *grads)]

    ends = np.cumsum(lengths).tolist()
    parts = [slice(e - n, e) for e, n in zip(ends, lengths, strict=True)]
    everything = [slice(None)]
    starts = torch.tensor([0, *ends])
    bounds = {"cu_seqlens": starts.to(device), "cu_seqlens_cpu": starts}
    whole = results(kernel, everything)
    single = results(kernel, parts)
    packed = results(kernel, everything, **bounds)
    pairs = {
        "one sequence": (whole, results(reference, everything)),
        "packed": (packed, results(reference, parts)),
        "packed against single": (packed, single),
    }
    numbers: dict[str, Any] = {}
    for name, (got, want) in pairs.items():
        for part, a, b in zip(("out", "dq", "dk", "dv", "df", "dbeta"), got, want, strict=True):
            error = float((a - b).square().mean().sqrt() / b.square().mean().sqrt())
            numbers[f"{name} {part}"] = error
    worst = max(numbers, key=lambda name: numbers[name])
    passed = all(value <= KDA_TOLERANCE for value in numbers.values())
    return Outcome(passed, f"worst relative RMS {numbers[worst]:.1e} ({worst})", numbers)


def synchronised(value: object) -> object:
    """Rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
