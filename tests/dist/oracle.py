"""Train a few steps at one topology; run by one process per rank.

Everything is derived from seeds, so any two topologies are given the same base, adapters, samples
and loss. Results are full tensors, comparable with ``torch.equal`` or a tolerance.
"""

from __future__ import annotations

import math
import os
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from glm_lora.arch.projections import Kind
from glm_lora.arch.spec import DENSE, DSA, KDA, SPARSE, TINY, ModelSpec
from glm_lora.config import ParallelConfig
from glm_lora.errors import TrainingError
from glm_lora.lora import adapter, sharding
from glm_lora.lora.attach import attach_adapters
from glm_lora.model.batch import collate
from glm_lora.model.parallel import ParallelContext, init_parallel
from glm_lora.model.schedule import run_microbatches
from glm_lora.model.stage import build_stage
from tests.model.weights import (
    everything,
    load,
    random_base,
    random_factors,
    random_sequences,
)

MIXED = replace(
    TINY,
    num_hidden_layers=5,
    layer_types=(KDA, DSA, KDA, KDA, DSA),
    mlp_layer_types=(SPARSE, DENSE, DENSE, SPARSE, SPARSE),
    index_topk=8,
)
"""Every kind of layer; index_topk below the sample lengths, so the indexer selects."""

DENSE_ONLY = replace(MIXED, mlp_layer_types=(DENSE,) * 5)
"""For tensor parallelism without sequence parallelism, which experts do not allow."""

LENGTHS = [7, 13, 2, 9, 21, 5, 1, 6, 3]  # over two ranks: 3 and 2 micro-batches, one empty
SAMPLES_PER_BATCH = 2
STEPS = 6


@dataclass(frozen=True)
class Topology:
    """One way to share the work; data parallelism takes what is left."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    pipeline_layers: tuple[int, ...] = ()
    recompute: str = "none"
    spec: ModelSpec = MIXED
    dtype: torch.dtype = torch.float32
    breakage: str = ""
    """A rule to break on purpose."""

    def config(self) -> ParallelConfig:
        return ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=self.ep,
            sequence_parallel=self.sequence_parallel,
            pipeline_layers=self.pipeline_layers,
        )


@dataclass
class Result:
    """What one topology computed, gathered; ``drift`` is an error text or empty."""

    loss: float
    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    norms: list[float]
    adapters: dict[str, torch.Tensor]
    drift: str
    dead: list[str]


def train(topology: Topology, ctx: ParallelContext) -> Result:
    """Six AdamW steps; the samples are dealt to the data-parallel ranks in turn."""
    spec = topology.spec
    stage = build_stage(spec, ctx, dtype=topology.dtype, recompute=topology.recompute)  # pyright: ignore
    load(stage, random_base(spec))
    selection = everything(spec)
    adapters = attach_adapters(stage, selection, seed=1)
    adapters.load_full(random_factors(selection))
    break_rule(topology.breakage, stage, adapters, ctx)
    sequences = random_sequences(LENGTHS, spec.vocab_size)
    mine = list(range(len(sequences)))[ctx.dp_rank :: ctx.dp_size]
    batches_of = [mine[i : i + SAMPLES_PER_BATCH] for i in range(0, len(mine), SAMPLES_PER_BATCH)]
    # All ranks run as many micro-batches as the busiest; the last of some are empty.
    busiest = math.ceil(len(sequences) / ctx.dp_size)
    most = math.ceil(busiest / SAMPLES_PER_BATCH)
    batches_of += [[]] * (most - len(batches_of))
    batches = [collate([sequences[s] for s in b], device=ctx.device) for b in batches_of]
    weights = {
        s: torch.sin(torch.arange(LENGTHS[s] - 1, device=ctx.device) + s)
        for s in range(len(sequences))
    }
    tokens = sum(n - 1 for n in LENGTHS)

    def loss_fn(i, logprobs, entropy):
        total = logprobs.sum() * 0
        for row, s in enumerate(batches_of[i]):
            total = total - (logprobs[row, : LENGTHS[s] - 1] * weights[s]).sum()
        return total / tokens

    result = Result(0.0, [], {}, [], {}, "", [])
    parameters = adapters.parameters()
    # An eps near the clipped gradients' size: Adam otherwise turns rounding noise in tiny gradients
    # into full steps, and a perturbed one-rank run would not reproduce itself to 1e-4 either.
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, eps=1e-4, weight_decay=0.01)
    for step in range(STEPS if not topology.breakage else 2):
        adapters.zero_grad()
        outputs = run_microbatches(stage, batches, loss_fn)
        if topology.breakage != "no_sum":
            adapters.sync_gradients(ctx)
        adapters.record_gradients()
        result.norms.append(adapters.grad_norm(ctx))
        if step == 0:
            result.gradients = adapters.gather(ctx, gradients=True)
            share(result, outputs, batches_of, ctx)
        for p in parameters.values():
            p.grad.mul_(min(1.0, 0.1 / result.norms[-1]))
        optimizer.step()
        try:
            adapters.check_drift(ctx)
        except TrainingError as error:
            result.drift = str(error)
    result.adapters = adapters.gather(ctx)
    result.dead = adapters.dead_sites(ctx)
    return result


def share(result, outputs, batches_of, ctx):
    """Sum the loss and collect each sample's log-probabilities over the last stages."""
    own = {
        s: out.logprobs[row, : LENGTHS[s] - 1].cpu()
        for out, chosen in zip(outputs, batches_of, strict=False)
        for row, s in enumerate(chosen)
    }
    loss = sum(float(out.loss) for out in outputs)
    if ctx.world_size == 1:
        everyone = [(own, loss)]
    else:
        everyone = [None] * ctx.world_size
        dist.all_gather_object(everyone, (own, loss if ctx.tp_rank == 0 else 0.0))
    merged = {}
    for part, value in everyone:
        merged |= part
        result.loss += value
    result.logprobs = [merged[s] for s in range(len(LENGTHS))]


def break_rule(name, stage, adapters, ctx):
    """Undo one rule of the parallel adapter; the comparison must notice."""
    if name == "forget_column_a":
        rule = sharding.is_partial
        sharding.is_partial = lambda kind, letter, **kw: (
            (kind, letter) != (Kind.COLUMN, "A") and rule(kind, letter, **kw)
        )
    elif name == "forget_row_b":
        rule = sharding.is_partial
        sharding.is_partial = lambda kind, letter, **kw: (
            (kind, letter) != (Kind.ROW, "B") and rule(kind, letter, **kw)
        )
    elif name == "forget_replicated":
        rule = sharding.is_partial
        sharding.is_partial = lambda kind, letter, **kw: (
            kind is not Kind.REPLICATED and rule(kind, letter, **kw)
        )
    elif name == "delta_twice":
        for site in stage.linear_sites().values():
            if site.kind is Kind.ROW and site.adapter is not None:
                site.adapter.scaling *= ctx.tp_size
    elif name == "own_seed":
        with torch.no_grad():
            for key, p in adapters.parameters().items():
                if "lora_A" in key:
                    p.copy_(adapter.initial_a(tuple(p.shape), ctx.rank, key))


def worker(rank: int, world: int, store: str, topologies: dict[str, Topology], out: str) -> None:
    """Run every topology in this process; rank 0 writes the results."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rule = sharding.is_partial
    results = {}
    try:
        for name, topology in topologies.items():
            sharding.is_partial = rule
            ctx = init_parallel(topology.config(), "cpu")
            results[name] = train(topology, ctx)
    except Exception:
        Path(out).with_suffix(f".{rank}.error").write_text(traceback.format_exc())
        raise
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()
