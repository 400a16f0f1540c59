"""The facts table: every parameter of a glm5_next text model, once.

Each row says, for one kind of parameter: its path on disk and in transformers' memory, the module
SGLang holds it in, its full shape, how tensor and expert parallelism cut it, whether it stays fp32
when the rest is bf16, and whether LoRA may adapt it (and if not, why). Names and shapes anywhere
else in the package are derived from these rows.

The file is long because the whole table stays in one place.

Shapes are global (unsharded) and row-major, ``(out_features, in_features)`` for projections.
Source of the shapes: transformers' ``modeling_glm5_next.py`` on the meta device, compared with
this table by ``tests/arch/test_golden.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from glm_lora.arch.spec import ModelSpec

LAYERS_PREFIX = "model.language_model.layers."
SGLANG_LAYERS_PREFIX = "model.layers."
"""SGLang drops ``language_model`` from its module names (``glm5_next.py``, its weights mapper)."""
EMBED_KEY = "model.language_model.embed_tokens.weight"
NORM_KEY = "model.language_model.norm.weight"
HEAD_KEY = "lm_head.weight"


class Kind(StrEnum):
    """How tensor parallelism cuts a parameter."""

    COLUMN = "column"
    """Axis 0 (output features or heads) is cut over the tensor-parallel ranks."""
    ROW = "row"
    """Axis 1 (input features) is cut; the outputs are summed."""
    REPLICATED = "replicated"
    """Every rank holds the whole."""


class Status(StrEnum):
    """What LoRA may do with a parameter."""

    TRAINABLE = "trainable"
    FROZEN = "frozen"
    """A linear projection that must not be adapted here."""
    NOT_A_TARGET = "not a target"
    """No linear projection that LoRA could adapt."""


Shape = tuple[int, ...]
ShapeOf = Callable[[ModelSpec], Shape]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of parameter; ``path`` is below ``...layers.N.`` and has disk spelling."""

    path: str
    suffix: str = ".weight"
    memory_path: str = ""
    """Path in transformers' memory where it differs from ``path``."""
    sglang_path: str = ""
    """Module of SGLang that holds it where it differs (fused projections)."""
    shape: ShapeOf
    kind: Kind = Kind.REPLICATED
    expert: bool = False
    """Stacked over routed experts on axis 0, which expert parallelism cuts."""
    fp32: bool = False
    group: str = ""
    """Target group: kda, dsa, dense_mlp, shared_experts, routed_experts, kv_b, indexer or none."""
    status: Status = Status.NOT_A_TARGET
    reason: str = ""

    @property
    def memory(self) -> str:
        """Path in transformers' memory, below the layer."""
        return self.memory_path or self.path

    @property
    def sglang(self) -> str:
        """Path of the module in SGLang, below the layer."""
        return self.sglang_path or self.path

    @property
    def leaf(self) -> str:
        """The last part of the path: ``q_proj``, ``A_log``, ..."""
        return self.path.rsplit(".", 1)[-1]

    def expert_path(self, expert: int | str) -> str:
        """Path on disk of one expert's part of a stacked row: ``mlp.experts.7.gate_proj``."""
        return f"{self.path.removesuffix(self.leaf)}{expert}.{self.leaf}"


_KV_B = (
    "sparse attention absorbs kv_b_proj into its query and output products, so the module is never "
    "called and an adapter on it would do nothing"
)
_EXPERT = "routed experts are fused 3-D parameters; there is no per-expert adapter"
_INDEXER = "the indexer only picks tokens and runs without gradient"
_CONV = "a depthwise convolution, not a linear projection"
_GATE = "a decay parameter, not a linear projection"
_NORM = "a normalisation weight, not a linear projection"
_ROUTER = "the router decides which experts run; its choice has no gradient and it stays fp32"
_HC = "a hyper-connection weight computed in fp32, not a linear projection of the block"
_EMBED = "embeddings and the output head are not adapted"


def _target(
    path: str,
    shape: ShapeOf,
    kind: Kind,
    group: str,
    *,
    memory_path: str = "",
    sglang_path: str = "",
) -> Row:
    return Row(
        path=path,
        memory_path=memory_path,
        sglang_path=sglang_path,
        shape=shape,
        kind=kind,
        group=group,
        status=Status.TRAINABLE,
    )


def _attn(
    leaf: str,
    shape: ShapeOf,
    kind: Kind,
    group: str,
    *,
    memory_path: str = "",
    sglang_path: str = "",
) -> Row:
    path = f"self_attn.{leaf}"
    return _target(path, shape, kind, group, memory_path=memory_path, sglang_path=sglang_path)


_QKV = "self_attn.qkv_proj"
_QKV_A = "self_attn.fused_qkv_a_proj_with_mqa"
_FORGET = "self_attn.forget_gate."

KDA_ROWS: tuple[Row, ...] = (
    _attn("q_proj", lambda s: (s.kda_width, s.hidden_size), Kind.COLUMN, "kda", sglang_path=_QKV),
    _attn("k_proj", lambda s: (s.kda_width, s.hidden_size), Kind.COLUMN, "kda", sglang_path=_QKV),
    _attn("v_proj", lambda s: (s.kda_width, s.hidden_size), Kind.COLUMN, "kda", sglang_path=_QKV),
    _attn(
        "f_a_proj",
        lambda s: (s.linear_head_dim, s.hidden_size),
        Kind.REPLICATED,
        "kda",
        memory_path=_FORGET + "f_a_proj",
    ),
    _attn(
        "f_b_proj",
        lambda s: (s.kda_width, s.linear_head_dim),
        Kind.COLUMN,
        "kda",
        memory_path=_FORGET + "f_b_proj",
    ),
    _attn("b_proj", lambda s: (s.linear_num_heads, s.hidden_size), Kind.COLUMN, "kda"),
    _attn("g_a_proj", lambda s: (s.linear_head_dim, s.hidden_size), Kind.REPLICATED, "kda"),
    _attn("g_b_proj", lambda s: (s.kda_width, s.linear_head_dim), Kind.COLUMN, "kda"),
    _attn("o_proj", lambda s: (s.hidden_size, s.kda_width), Kind.ROW, "kda"),
    *(
        Row(
            path=f"self_attn.{p}_conv1d",
            memory_path="self_attn.conv1d",
            shape=lambda s: (s.kda_width, 1, s.linear_conv_kernel_dim),
            kind=Kind.COLUMN,
            fp32=True,
            reason=_CONV,
        )
        for p in "qkv"
    ),
    Row(
        path="self_attn.A_log",
        suffix="",
        memory_path=_FORGET + "A_log",
        shape=lambda s: (s.linear_num_heads,),
        kind=Kind.COLUMN,
        fp32=True,
        reason=_GATE,
    ),
    Row(
        path="self_attn.dt_bias",
        suffix="",
        memory_path=_FORGET + "dt_bias",
        shape=lambda s: (s.kda_width,),
        kind=Kind.COLUMN,
        fp32=True,
        reason=_GATE,
    ),
    Row(path="self_attn.o_norm", shape=lambda s: (s.linear_head_dim,), reason=_NORM),
)

_INDEXER_SHAPES: tuple[tuple[str, str, ShapeOf], ...] = (
    ("wq_b", ".weight", lambda s: (s.index_n_heads * s.index_head_dim, s.q_lora_rank)),
    ("wk", ".weight", lambda s: (s.index_head_dim, s.hidden_size)),
    ("weights_proj", ".weight", lambda s: (s.index_n_heads, s.hidden_size)),
    ("k_norm", ".weight", lambda s: (s.index_head_dim,)),
    ("k_norm", ".bias", lambda s: (s.index_head_dim,)),
    ("index_kpool_compress_ape", "", lambda s: (s.index_kpool, s.index_head_dim)),
    ("index_kpool_compress_gate", "", lambda s: (s.index_head_dim, s.hidden_size)),
)

DSA_ROWS: tuple[Row, ...] = (
    _attn(
        "q_a_proj",
        lambda s: (s.q_lora_rank, s.hidden_size),
        Kind.REPLICATED,
        "dsa",
        sglang_path=_QKV_A,
    ),
    _attn(
        "q_b_proj",
        lambda s: (s.num_attention_heads * s.qk_head_dim, s.q_lora_rank),
        Kind.COLUMN,
        "dsa",
    ),
    _attn(
        "kv_a_proj_with_mqa",
        lambda s: (s.kv_lora_rank + s.qk_rope_head_dim, s.hidden_size),
        Kind.REPLICATED,
        "dsa",
        sglang_path=_QKV_A,
    ),
    _attn("o_proj", lambda s: (s.hidden_size, s.dsa_width), Kind.ROW, "dsa"),
    Row(
        path="self_attn.kv_b_proj",
        shape=lambda s: (
            s.num_attention_heads * (s.qk_nope_head_dim + s.v_head_dim),
            s.kv_lora_rank,
        ),
        kind=Kind.COLUMN,
        group="kv_b",
        status=Status.FROZEN,
        reason=_KV_B,
    ),
    Row(path="self_attn.q_a_layernorm", shape=lambda s: (s.q_lora_rank,), reason=_NORM),
    Row(path="self_attn.kv_a_layernorm", shape=lambda s: (s.kv_lora_rank,), reason=_NORM),
    *(
        Row(
            path=f"self_attn.indexer.{leaf}",
            suffix=suffix,
            shape=shape,
            group="indexer",
            reason=_INDEXER,
        )
        for leaf, suffix, shape in _INDEXER_SHAPES
    ),
)


def _mlp(prefix: str, width: Callable[[ModelSpec], int], group: str) -> tuple[Row, ...]:
    def up(s: ModelSpec) -> Shape:
        return (width(s), s.hidden_size)

    def down(s: ModelSpec) -> Shape:
        return (s.hidden_size, width(s))

    fused = f"{prefix}.gate_up_proj"
    return (
        _target(f"{prefix}.gate_proj", up, Kind.COLUMN, group, sglang_path=fused),
        _target(f"{prefix}.up_proj", up, Kind.COLUMN, group, sglang_path=fused),
        _target(f"{prefix}.down_proj", down, Kind.ROW, group),
    )


DENSE_ROWS: tuple[Row, ...] = _mlp("mlp", lambda s: s.intermediate_size, "dense_mlp")


def _expert_up(s: ModelSpec) -> Shape:
    return (s.n_routed_experts, s.moe_intermediate_size, s.hidden_size)


def _expert_down(s: ModelSpec) -> Shape:
    return (s.n_routed_experts, s.hidden_size, s.moe_intermediate_size)


MOE_ROWS: tuple[Row, ...] = (
    *_mlp(
        "mlp.shared_experts",
        lambda s: s.moe_intermediate_size * s.n_shared_experts,
        "shared_experts",
    ),
    *(
        Row(
            path=f"mlp.experts.{leaf}",
            memory_path="mlp.experts." + ("down_proj" if leaf == "down_proj" else "gate_up_proj"),
            sglang_path="mlp.experts",
            shape=shape,
            expert=True,
            group="routed_experts",
            status=Status.FROZEN,
            reason=_EXPERT,
        )
        for leaf, shape in (
            ("gate_proj", _expert_up),
            ("up_proj", _expert_up),
            ("down_proj", _expert_down),
        )
    ),
    Row(
        path="mlp.gate",
        shape=lambda s: (s.n_routed_experts, s.hidden_size),
        fp32=True,
        reason=_ROUTER,
    ),
    Row(
        path="mlp.gate.e_score_correction_bias",
        suffix="",
        shape=lambda s: (s.n_routed_experts,),
        fp32=True,
        reason=_ROUTER,
    ),
)


def _hyper_connection(which: str) -> tuple[Row, ...]:
    def width(s: ModelSpec) -> int:
        return (2 + s.hc_mult) * s.hc_mult

    shapes: tuple[tuple[str, bool, Callable[[ModelSpec], Shape]], ...] = (
        ("fn", False, lambda s: (width(s), s.hc_mult * s.hidden_size)),
        ("base", True, lambda s: (width(s),)),
        ("scale", True, lambda s: (3,)),
    )
    return tuple(
        Row(
            path=f"hc_{which}_{name}",
            suffix="",
            memory_path=f"{which}_hc.{name}",
            shape=shape,
            fp32=fp32,
            reason=_HC,
        )
        for name, fp32, shape in shapes
    )


LAYER_ROWS: tuple[Row, ...] = (
    Row(path="input_layernorm", shape=lambda s: (s.hidden_size,), reason=_NORM),
    Row(path="post_attention_layernorm", shape=lambda s: (s.hidden_size,), reason=_NORM),
    *_hyper_connection("attn"),
    *_hyper_connection("ffn"),
)


@dataclass(frozen=True)
class Param:
    """One parameter of one model: a row placed in a layer (or at the top, ``layer`` None)."""

    key: str
    """Canonical key: the name on disk, with routed experts stacked into one tensor."""
    memory_name: str
    """Parameter name in transformers' memory (fused parameters share one)."""
    shape: Shape
    layer: int | None
    row: Row

    @property
    def tp_axis(self) -> int | None:
        """The axis that tensor parallelism cuts, or None."""
        return {Kind.COLUMN: 0, Kind.ROW: 1, Kind.REPLICATED: None}[self.row.kind]

    @property
    def ep_axis(self) -> int | None:
        """The axis that expert parallelism cuts, or None."""
        return 0 if self.row.expert else None

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def fp32(self) -> bool:
        """Whether the parameter stays fp32 when the model is bf16."""
        return self.row.fp32


def layer_rows(spec: ModelSpec, layer: int) -> tuple[Row, ...]:
    """The rows that one layer of ``spec`` has, attention first."""
    attention = KDA_ROWS if spec.is_kda(layer) else DSA_ROWS
    mlp = MOE_ROWS if spec.is_moe(layer) else DENSE_ROWS
    return (*attention, *mlp, *LAYER_ROWS)


def _top_params(spec: ModelSpec) -> Iterator[Param]:
    def vocab(s: ModelSpec) -> Shape:
        return (s.vocab_size, s.hidden_size)

    def width(s: ModelSpec) -> Shape:
        return (s.hidden_size,)

    for key, shape, kind, reason in (
        (EMBED_KEY, vocab, Kind.COLUMN, _EMBED),
        (NORM_KEY, width, Kind.REPLICATED, _NORM),
        (HEAD_KEY, vocab, Kind.COLUMN, _EMBED),
    ):
        row = Row(path=key.removesuffix(".weight"), shape=shape, kind=kind, reason=reason)
        yield Param(key, key, shape(spec), None, row)


@lru_cache(maxsize=16)
def all_params(spec: ModelSpec) -> dict[str, Param]:
    """Every parameter of the text model by canonical key, in model order."""
    embed, norm, head = _top_params(spec)
    table = {embed.key: embed}
    for layer in range(spec.num_hidden_layers):
        prefix = f"{LAYERS_PREFIX}{layer}."
        for row in layer_rows(spec, layer):
            memory_suffix = "" if row.expert else row.suffix
            key = prefix + row.path + row.suffix
            table[key] = Param(
                key, prefix + row.memory + memory_suffix, row.shape(spec), layer, row
            )
    for param in (norm, head):
        table[param.key] = param
    return table


@dataclass(frozen=True)
class Site:
    """One linear projection of one layer (routed experts: one per expert)."""

    name: str
    """Module name in transformers' memory (routed experts: their disk name, there is no module)."""
    disk_name: str
    """Module name on disk; adapters are keyed by it wherever they leave the trainer."""
    sglang_name: str
    """Module name in SGLang; fused projections share one."""
    sglang_part: str
    """Which part of a fused SGLang module it is (its disk leaf); empty when it is the whole."""
    layer: int
    leaf: str
    group: str
    shape: tuple[int, int]
    """Full ``(out_features, in_features)``."""
    kind: Kind
    status: Status
    reason: str = ""

    @property
    def out_features(self) -> int:
        """Full output width."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Full input width."""
        return self.shape[1]

    def parameters(self, rank: int) -> int:
        """Trainable parameters of an adapter of ``rank`` on this site."""
        return rank * (self.shape[0] + self.shape[1])


def _site(row: Row, layer: int, spec: ModelSpec) -> Site:
    prefix = f"{LAYERS_PREFIX}{layer}."
    out_features, in_features = row.shape(spec)[-2:]
    return Site(
        name=prefix + row.memory,
        disk_name=prefix + row.path,
        sglang_name=f"{SGLANG_LAYERS_PREFIX}{layer}.{row.sglang}",
        sglang_part=row.leaf if row.sglang_path else "",
        layer=layer,
        leaf=row.leaf,
        group=row.group,
        shape=(out_features, in_features),
        kind=row.kind,
        status=row.status,
        reason=row.reason,
    )


@lru_cache(maxsize=16)
def trainable_sites(spec: ModelSpec) -> tuple[Site, ...]:
    """Every site that LoRA may adapt, in model order (485 in the full model, 43 in the slice)."""
    return tuple(s for s in dense_sites(spec) if s.status is Status.TRAINABLE)


@lru_cache(maxsize=16)
def dense_sites(spec: ModelSpec) -> tuple[Site, ...]:
    """Every linear projection but the routed experts', in model order, frozen ones included."""
    return tuple(
        _site(row, layer, spec)
        for layer in range(spec.num_hidden_layers)
        for row in layer_rows(spec, layer)
        if row.status is not Status.NOT_A_TARGET and not row.expert
    )


def expert_sites(spec: ModelSpec, layer: int) -> Iterator[Site]:
    """The routed experts' projections of one layer, one site per expert (as on disk)."""
    stacked = [_site(row, layer, spec) for row in layer_rows(spec, layer) if row.expert]
    for expert in range(spec.n_routed_experts if stacked else 0):
        for site in stacked:
            part = f"{expert}.{site.leaf}"
            name = site.disk_name.removesuffix(site.leaf) + part
            # Spelled out: dataclasses.replace is five times slower, and there are 36,288.
            yield Site(
                name,
                name,
                site.sglang_name,
                part,
                layer,
                site.leaf,
                site.group,
                site.shape,
                site.kind,
                site.status,
                site.reason,
            )


@lru_cache(maxsize=4)
def all_sites(spec: ModelSpec) -> tuple[Site, ...]:
    """Every linear projection of the text model, in model order, routed experts one by one."""
    by_layer: dict[int, list[Site]] = {i: [] for i in range(spec.num_hidden_layers)}
    for site in dense_sites(spec):
        by_layer[site.layer].append(site)
    for layer, sites in by_layer.items():
        sites.extend(expert_sites(spec, layer))
    return tuple(site for sites in by_layer.values() for site in sites)
