"""The shape of one glm5_next text model, read from a ``config.json`` or built in.

A missing key means transformers' own default, because the embedded engine reads the same file and
both must build the same model. Known spellings: the flat one that transformers writes and the
nested ``linear_attn_config`` of the released checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from glm_lora.errors import ModelError, did_you_mean

KDA = "linear_attention"
DSA = "indexed_attention"
_DSA_NAMES = ("full_attention", "deepseek_sparse_attention")
"""What other releases of transformers call the sparse-attention layers."""
DENSE = "dense"
SPARSE = "sparse"
MAX_LAYERS = 1000
"""More layers than that are a damaged file, not a model."""

_OTHER_MODELS = {
    "glm_moe_dsa": "GLM-5.3 (glm_moe_dsa) shares a name with GLM-5.3-Flash but not an architecture",
    "glm5_next_text": "",
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The dimensions of a glm5_next text model; field names and defaults are transformers' own."""

    num_hidden_layers: int = 45
    hidden_size: int = 4096
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    vocab_size: int = 154880
    num_attention_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 256
    qk_rope_head_dim: int = 0
    v_head_dim: int = 256
    linear_num_heads: int = 64
    linear_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float = -5.0
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048
    index_kpool: int = 16
    index_kpool_always_select_tail: bool = True
    n_routed_experts: int = 288
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_eps: float = 1e-6
    hc_sinkhorn_iters: int = 20
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 154820
    eos_token_ids: tuple[int, ...] = ()
    layer_types: tuple[str, ...] = ()
    mlp_layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_number(field.name, field.default, getattr(self, field.name))
        layers = self.num_hidden_layers
        if layers > MAX_LAYERS:
            raise ModelError(f"num_hidden_layers is {layers}", f"at most {MAX_LAYERS}")
        if not self.layer_types:
            types = tuple(DSA if i % 4 == 3 else KDA for i in range(layers))
            object.__setattr__(self, "layer_types", types)
        if not self.mlp_layer_types:
            types = tuple(DENSE if i < 3 else SPARSE for i in range(layers))
            object.__setattr__(self, "mlp_layer_types", types)
        self._validate()

    def _validate(self) -> None:
        for name in ("layer_types", "mlp_layer_types"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                raise ModelError(
                    f"{name} has {len(getattr(self, name))} entries",
                    f"one per layer ({self.num_hidden_layers})",
                )
        for i, (attention, mlp) in enumerate(
            zip(self.layer_types, self.mlp_layer_types, strict=True)
        ):
            if attention not in (KDA, DSA) or mlp not in (DENSE, SPARSE):
                raise ModelError(
                    f"layer {i} is {attention!r} with a {mlp!r} MLP",
                    f"attention in ({KDA!r}, {DSA!r}) and MLP in ({DENSE!r}, {SPARSE!r})",
                )
        if self.qk_rope_head_dim != 0:
            raise ModelError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}",
                "0 (glm5_next's sparse attention has no rotary part)",
            )
        if self.index_topk % self.index_kpool:
            raise ModelError(
                f"index_topk {self.index_topk} is not a multiple of index_kpool {self.index_kpool}"
            )
        if self.n_routed_experts % self.n_group or self.num_experts_per_tok > self.n_routed_experts:
            raise ModelError(
                f"{self.n_routed_experts} experts in {self.n_group} groups, "
                f"top {self.num_experts_per_tok}",
                "n_group dividing n_routed_experts and top-k at most n_routed_experts",
            )

    @property
    def kda_width(self) -> int:
        """Width of KDA's q, k, v and o inputs: heads times head size."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def dsa_width(self) -> int:
        """Width of the sparse attention's output before ``o_proj``."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Size of one query or key head in sparse attention."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_kda(self, layer: int) -> bool:
        """Whether layer ``layer`` uses KDA linear attention (else DSA)."""
        return self.layer_types[layer] == KDA

    def is_moe(self, layer: int) -> bool:
        """Whether layer ``layer`` has routed experts (else a dense MLP)."""
        return self.mlp_layer_types[layer] == SPARSE

    def first_layers(self, count: int) -> ModelSpec:
        """The same model cut after its first ``count`` layers."""
        if not 1 <= count <= self.num_hidden_layers:
            raise ModelError(f"{count} layers asked for", f"1 to {self.num_hidden_layers}")
        return replace(
            self,
            num_hidden_layers=count,
            layer_types=self.layer_types[:count],
            mlp_layer_types=self.mlp_layer_types[:count],
        )


def _check_number(name: str, default: Any, value: Any) -> None:
    """A field takes values of its default's kind; sizes are 1 or more."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, expected = number and math.isfinite(value), "a number"
    elif isinstance(default, int) and name not in ("qk_rope_head_dim", "pad_token_id"):
        fits, expected = number and isinstance(value, int) and value >= 1, "a positive whole number"
    else:
        return
    if not fits:
        raise ModelError(f"{name} is {value!r}", expected)


FULL = ModelSpec(index_kpool=4, eos_token_ids=(154820, 154827, 154829))

TINY = ModelSpec(
    num_hidden_layers=4,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    vocab_size=32,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    v_head_dim=16,
    linear_num_heads=4,
    linear_head_dim=16,
    index_n_heads=8,
    index_head_dim=16,
    index_topk=64,
    index_kpool=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    hc_sinkhorn_iters=4,
    pad_token_id=0,
    eos_token_ids=(1,),
)

BUILTIN: dict[str, ModelSpec] = {
    "GLM-5.3-Flash": FULL,
    "GLM-5.3-Flash-4layer": FULL.first_layers(4),
    "tiny": TINY,
}


def builtin(name: str) -> ModelSpec:
    """The spec of a model this package knows by name; ModelError for any other name."""
    if name not in BUILTIN:
        raise ModelError(
            f"unknown model name {name!r}",
            "one of " + ", ".join(BUILTIN),
            did_you_mean(name, BUILTIN),
        )
    return BUILTIN[name]


def spec_from_config(config: Mapping[str, Any], *, source: str = "config.json") -> ModelSpec:
    """Read the text model's dimensions from a parsed ``config.json``.

    Args:
        config: The parsed file; the composite one (with ``text_config``) or the text part alone.
        source: What to call it in error messages.

    Raises:
        ModelError: Another architecture, a wrong type, or a feature that cannot be trained.
    """
    config = _object(config, source)
    model_type = config.get("model_type")
    if model_type not in ("glm5_next", "glm5_next_text"):
        why = _OTHER_MODELS.get(str(model_type), "")
        raise ModelError(
            f"{source} describes model_type {model_type!r}" + (f" ({why})" if why else ""),
            "'glm5_next' (GLM-5.3-Flash)",
        )
    text = _object(config.get("text_config", config), f"text_config in {source}")
    try:
        values = _known_values(text, source)
        values["eos_token_ids"] = _as_ids(
            text.get("eos_token_id", config.get("eos_token_id")), source
        )
        _refuse_untrainable(text, values, source)
        return ModelSpec(**values)
    except TypeError as error:
        raise ModelError(f"{source} has a value of the wrong type: {error}") from error


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{what} holds a {type(value).__name__}", "a JSON object")
    return cast("Mapping[str, Any]", value)


def _known_values(text: Mapping[str, Any], source: str) -> dict[str, Any]:
    special = {"eos_token_ids", "layer_types", "mlp_layer_types"}
    values = {
        f.name: text[f.name] for f in fields(ModelSpec) if f.name in text and f.name not in special
    }
    nested = _object(text.get("linear_attn_config") or {}, f"linear_attn_config in {source}")
    for theirs, ours in (
        ("head_dim", "linear_head_dim"),
        ("num_heads", "linear_num_heads"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        ("gate_lower_bound", "linear_lower_bound"),
    ):
        if theirs in nested:
            values[ours] = nested[theirs]
    if (kinds := text.get("layer_types")) is not None:
        values["layer_types"] = tuple(DSA if k in _DSA_NAMES else k for k in kinds)
    if (kinds := text.get("mlp_layer_types")) is not None:
        values["mlp_layer_types"] = tuple(kinds)
    elif (dense := text.get("first_k_dense_replace")) is not None:
        layers = text.get("num_hidden_layers", ModelSpec.num_hidden_layers)
        values["mlp_layer_types"] = tuple(DENSE if i < dense else SPARSE for i in range(layers))
    return values


def _as_ids(value: Any, source: str) -> tuple[int, ...]:
    ids = cast("list[Any]", value if isinstance(value, list) else [] if value is None else [value])
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"eos_token_id in {source} is {value!r}", "a token id or a list of them")
    return tuple(ids)


def _refuse_untrainable(text: Mapping[str, Any], values: Mapping[str, Any], source: str) -> None:
    layers = values.get("layer_types", ())
    modes = text.get("indexer_types") or ()
    shared = [i for i, mode in enumerate(modes) if mode == "shared" and _is_dsa(layers, i)]
    pattern = text.get("index_topk_pattern")
    if (
        shared
        or (isinstance(pattern, str) and "S" in pattern)
        or text.get("index_topk_freq", 1) != 1
    ):
        raise ModelError(
            f"{source} shares indexer selections between layers"
            + (f" (indexer_types 'shared' on {', '.join(map(str, shared))})" if shared else ""),
            "indexer_types 'full' on every sparse-attention layer",
            "A shared layer must directly follow a full one, which the 3:1 pattern never allows",
        )
    if values.get("linear_lower_bound", 0.0) is None:
        raise ModelError(f"{source} has no gate lower bound", "linear_lower_bound (-5.0)")
    if text.get("attention_bias"):
        raise ModelError(f"{source} sets attention_bias", "attention_bias false")


def _is_dsa(layer_types: Sequence[str], layer: int) -> bool:
    return layer_types[layer] == DSA if layer < len(layer_types) else layer % 4 == 3


def spec_from_dir(folder: Path) -> ModelSpec:
    """The spec of the checkpoint in ``folder`` (reads ``config.json`` only)."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist", "a folder with a config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    return spec_from_config(config, source=str(path))
