"""Which topologies fit a model, and how much memory a rank needs; known before anything starts.

Torch-free, so that a wrong shape is refused in well under a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from glm_lora.arch.projections import Param, Site, all_params, trainable_sites
from glm_lora.arch.spec import ModelSpec
from glm_lora.config import ParallelConfig
from glm_lora.errors import ConfigError
from glm_lora.targets.selection import Selection

LOGITS_PER_BLOCK = 2**27
"""fp32 logits that the head holds at a time (512 MiB)."""

SHARED_INPUT = (
    ("q_proj", "k_proj", "v_proj", "b_proj"),
    ("f_a_proj", "g_a_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
"""Leaves of one block that read one input and are computed as one product."""

_BLOCK_COPIES = 3  # logits, their exponentials and one factor of the gradient


def layer_ranges(
    num_layers: int, stages: int, pipeline_layers: tuple[int, ...] = ()
) -> list[range]:
    """The layers of each pipeline stage: 45 over 4 gives 11, 11, 11, 12.

    Raises:
        ConfigError: A given split does not cover the layers, or there are more stages than layers.
    """
    counts = pipeline_layers or tuple(
        num_layers // stages + (i >= stages - num_layers % stages) for i in range(stages)
    )
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"pipeline split {counts} of {num_layers} layers over {stages} stages",
            f"{stages} positive numbers that add up to {num_layers}",
            f"Use at most {num_layers} stages, or change pipeline_layers",
        )
    starts = [sum(counts[:i]) for i in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def tensor_parallel_sizes(spec: ModelSpec) -> list[int]:
    """Every tensor-parallel size that cuts heads, MLP widths and vocabulary evenly."""
    return [n for n in range(1, spec.linear_num_heads + 1) if not _uncut(spec, n)]


def expert_parallel_sizes(spec: ModelSpec) -> list[int]:
    """Every expert-parallel size that cuts the routed experts evenly."""
    return [n for n in range(1, spec.n_routed_experts + 1) if spec.n_routed_experts % n == 0]


def _uncut(spec: ModelSpec, tp: int) -> list[str]:
    """What ``tp`` ranks cannot share evenly."""
    sizes = {
        "KDA heads": spec.linear_num_heads,
        "attention heads": spec.num_attention_heads,
        "dense MLP columns": spec.intermediate_size,
        "shared expert columns": spec.moe_intermediate_size * spec.n_shared_experts,
        "vocabulary entries": spec.vocab_size,
    }
    return [f"{total} {what}" for what, total in sizes.items() if total % tp]


def check_fit(spec: ModelSpec, *, tp: int, ep: int, sequence_parallel: bool) -> None:
    """ConfigError when tensor or expert parallelism cannot cut ``spec``."""
    if bad := _uncut(spec, tp):
        raise ConfigError(
            f"tensor parallel {tp} does not divide {', '.join(bad)}",
            "one of " + _around(tensor_parallel_sizes(spec), tp),
        )
    moe = any(spec.is_moe(i) for i in range(spec.num_hidden_layers))
    if moe and spec.n_routed_experts % ep:
        raise ConfigError(
            f"expert parallel {ep} does not divide {spec.n_routed_experts} routed experts",
            "one of " + _around(expert_parallel_sizes(spec), ep),
        )
    if moe and tp > 1 and not sequence_parallel:
        raise ConfigError(
            f"tensor parallel {tp} without sequence parallel on a model with experts",
            "sequence_parallel = true",
            "Without it every tensor-parallel rank would send the same tokens to the experts",
        )


def check_topology(spec: ModelSpec, config: ParallelConfig, world_size: int) -> None:
    """Refuse a topology that cannot run ``spec`` on ``world_size`` ranks.

    Raises:
        ConfigError: With the reason and the nearest sizes that would do.
    """
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    ep = config.expert_model_parallel_size
    check_fit(spec, tp=tp, ep=ep, sequence_parallel=config.sequence_parallel)
    layer_ranges(spec.num_hidden_layers, pp, config.pipeline_layers)
    if world_size % (tp * pp):
        raise ConfigError(
            f"{world_size} ranks with tensor parallel {tp} and pipeline parallel {pp}",
            f"a multiple of {tp * pp} ranks",
            "Tensor times pipeline parallel must divide nodes times GPUs per node",
        )
    per_stage = world_size // pp
    if per_stage % ep:
        fitting = [n for n in expert_parallel_sizes(spec) if per_stage % n == 0]
        raise ConfigError(
            f"expert parallel {ep} with {per_stage} ranks per pipeline stage",
            "one of " + _around(fitting, ep),
        )


def _around(sizes: list[int], value: int) -> str:
    """The six sizes nearest to ``value``, in order."""
    nearest = sorted(sizes, key=lambda n: (abs(n - value), n))[:6]
    return ", ".join(map(str, sorted(nearest)))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest rank; activations are an estimate, the rest is exact."""

    base: int
    """Frozen weights."""
    adapters: int
    """fp32 masters, their gradients, and the copies that the products read."""
    optimizer: int
    """Two fp32 moments."""
    activations: int
    """Kept for the backward pass, all micro-batches in flight, plus one layer being run again."""
    logits: int
    """Working space of the head on the last stage."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.base + self.adapters + self.optimizer + self.activations + self.logits


def plan_memory(
    spec: ModelSpec,
    selection: Selection,
    config: ParallelConfig,
    world_size: int,
    *,
    bytes_per_value: int = 2,
) -> MemoryPlan:
    """Memory of the fullest rank for one topology.

    Args:
        spec: Model dimensions.
        selection: What is adapted.
        config: Topology, recomputation and the token budget of a micro-batch.
        world_size: Number of ranks.
        bytes_per_value: 2 for bf16, 4 for fp32.

    Raises:
        ConfigError: The topology does not fit.
    """
    check_topology(spec, config, world_size)
    stages = layer_ranges(
        spec.num_hidden_layers, config.pipeline_model_parallel_size, config.pipeline_layers
    )
    plans = [
        _stage_plan(spec, selection, config, i, layers, len(stages), bytes_per_value)
        for i, layers in enumerate(stages)
    ]
    return max(plans, key=lambda plan: plan.total)


def _stage_plan(
    spec: ModelSpec,
    selection: Selection,
    config: ParallelConfig,
    stage: int,
    layers: range,
    stages: int,
    width: int,
) -> MemoryPlan:
    tp, tokens = config.tensor_model_parallel_size, config.max_tokens_per_gpu
    ep = config.expert_model_parallel_size
    last = stage == stages - 1

    def here(param: Param) -> bool:
        if param.layer is not None:
            return param.layer in layers
        return stage == 0 if "embed_tokens" in param.key else last

    base = 0
    for param in all_params(spec).values():
        if here(param):
            cut = tp if param.tp_axis is not None else ep if param.ep_axis is not None else 1
            base += param.numel // cut * (4 if param.fp32 else width)
    factors = 0
    for a in selection.adapters:
        if a.site.layer in layers:
            out_cut = tp if a.site.kind == "column" else 1
            in_cut = tp if a.site.kind == "row" else 1
            factors += a.rank * (a.site.out_features // out_cut + a.site.in_features // in_cut)
    kept = sum(_kept(spec, i, tp, config.recompute, tokens) for i in layers)
    one_layer = max(_kept(spec, i, tp, "none", tokens) for i in layers)
    in_flight = stages - stage
    rows = min(tokens, LOGITS_PER_BLOCK // spec.vocab_size)
    return MemoryPlan(
        base=base,
        adapters=8 * factors + width * _fused(spec, selection, layers, tp),
        optimizer=8 * factors,
        activations=(kept * in_flight + one_layer) * tokens * width,
        logits=_BLOCK_COPIES * 4 * rows * spec.vocab_size // tp if last else 0,
    )


def _fused(spec: ModelSpec, selection: Selection, layers: range, tp: int) -> int:
    """Values of the fused factors (``model.linear.Fused``): per group (O + I) R, zeros included."""
    sizes: dict[tuple[str, Sequence[str]], tuple[int, int]] = {}
    ranks: Counter[tuple[str, Sequence[str]]] = Counter()

    def group(site: Site) -> tuple[str, Sequence[str]]:
        leaves = next((g for g in SHARED_INPUT if site.leaf in g), (site.leaf,))
        return site.disk_name.removesuffix(site.leaf), leaves

    for site in trainable_sites(spec):
        outputs, _ = sizes.get(group(site), (0, 0))
        outputs += site.out_features // (tp if site.kind == "column" else 1)
        sizes[group(site)] = outputs, site.in_features // (tp if site.kind == "row" else 1)
    for a in selection.adapters:
        if a.site.layer in layers:
            ranks[group(a.site)] += a.rank
    return sum(rank * sum(sizes[key]) for key, rank in ranks.items())


def _kept(spec: ModelSpec, layer: int, tp: int, recompute: str, tokens: int) -> int:
    """Values per token of the whole micro-batch that one layer keeps on a rank (estimate).

    A half that is run again keeps its input streams and the result of an attention with masks,
    which only sequences of more than ``index_topk`` tokens have (what their indexer chose is small
    beside it); with ``dsa_backend`` triton, which may fall back to masks, the same or less.
    Otherwise: the streams twice (read and write), the block's input before and after
    its norm, whole after the gather, and the block's intermediate values, which are cut over the
    tensor-parallel ranks.
    """
    streams = spec.hc_mult * spec.hidden_size / tp
    masked = not spec.is_kda(layer) and tokens > spec.index_topk
    again = streams + masked * spec.num_attention_heads * spec.v_head_dim / tp
    around = 2 * streams + spec.hidden_size * (1 + 3 / tp)
    if spec.is_kda(layer):
        # q, k, v before and after the convolution, decay, gate, output: fp32 where the kernel is.
        attention = around + 14 * spec.kda_width / tp
    else:
        heads = spec.num_attention_heads
        width = heads * (2 * spec.qk_head_dim + 2 * spec.v_head_dim)
        attention = around + 2 * (spec.q_lora_rank + spec.kv_lora_rank) + width / tp
    if spec.is_moe(layer):
        inner = spec.moe_intermediate_size
        routed = spec.num_experts_per_tok * (2 * spec.hidden_size + 3 * inner) / tp
        mlp = around + routed + 3 * inner * spec.n_shared_experts / tp
    else:
        mlp = around + 3 * spec.intermediate_size / tp
    if recompute == "full":
        return int(again)
    if recompute == "attention":
        attention = again
    elif recompute == "mlp":
        mlp = streams
    return int(attention + mlp)
