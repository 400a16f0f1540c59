"""Names and widths of the LoRA modules as SGLang holds them, from the facts table.

No SGLang import here: the same functions build the server's flags and the tests' expectations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm_lora.arch.projections import (
    DENSE_ROWS,
    DSA_ROWS,
    KDA_ROWS,
    MOE_ROWS,
    Kind,
    Row,
    Status,
    layer_rows,
    trainable_sites,
)
from glm_lora.arch.spec import DSA, KDA, ModelSpec, spec_from_config


def _trainable(*groups: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(r for rows in groups for r in rows if r.status is Status.TRAINABLE)


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]


_ROWS = _trainable(KDA_ROWS, DSA_ROWS, DENSE_ROWS, MOE_ROWS)

TARGETS: tuple[str, ...] = tuple(dict.fromkeys(r.leaf for r in _ROWS))
"""Leaf names an adapter may have, in the facts table's order."""
MODULES: tuple[str, ...] = tuple(dict.fromkeys(_leaf(r.sglang) for r in _ROWS))
"""Names of SGLang's modules that hold them (fused ones once)."""
REPLICATED: tuple[str, ...] = tuple(
    dict.fromkeys(_leaf(r.sglang) for r in _ROWS if r.kind is Kind.REPLICATED)
)
"""Modules that every tensor-parallel rank holds whole."""
PARTS: dict[str, tuple[str, ...]] = {
    module: tuple(dict.fromkeys(r.leaf for r in _ROWS if _leaf(r.sglang) == module))
    for module in MODULES
}
"""Leaf names of the parts of each of these modules."""


def spec_of(config: Mapping[str, Any], is_kda: list[bool] | None = None) -> ModelSpec:
    """The model's dimensions from SGLang's text configuration.

    Args:
        config: The text configuration as a dictionary; missing values may be None.
        is_kda: Which layers use KDA, as SGLang resolved it.
    """
    text = {k: v for k, v in config.items() if v is not None}
    text["model_type"] = "glm5_next_text"
    if is_kda is not None:
        text["layer_types"] = [KDA if kda else DSA for kda in is_kda]
    return spec_from_config(text, source="SGLang's model configuration")


def module_widths(spec: ModelSpec, module: str, layer: int) -> tuple[int, int] | None:
    """Full input and output width of ``module`` in ``layer``; None where the layer has none.

    The output width of a fused module is the sum over its parts.
    """
    rows = [r for r in _trainable(layer_rows(spec, layer)) if _leaf(r.sglang) == module]
    if not rows:
        return None
    shapes = [r.shape(spec) for r in rows]
    return shapes[0][1], sum(s[0] for s in shapes)


def any_widths(spec: ModelSpec, module: str, layer: int) -> tuple[int, int]:
    """``module_widths``, or another layer's where ``layer`` has no such module.

    SGLang allocates a buffer for every layer and target; one that no module reads only has to
    have widths that divide by the ranks.

    Raises:
        KeyError: No layer of this model has the module.
    """
    for candidate in (layer, *range(spec.num_hidden_layers)):
        widths = module_widths(spec, module, candidate)
        if widths is not None:
            return widths
    raise KeyError(module)


def module_names(spec: ModelSpec) -> frozenset[str]:
    """Names of all SGLang modules that carry a LoRA site: ``model.layers.N...``."""
    return frozenset(s.sglang_name for s in trainable_sites(spec))


def adapter_shapes(spec: ModelSpec, rank: int) -> dict[str, tuple[int, int]]:
    """Shape of every tensor an adapter of ``rank`` may have, by serving key."""
    shapes: dict[str, tuple[int, int]] = {}
    for site in trainable_sites(spec):
        shapes[f"{site.disk_name}.lora_A.weight"] = (rank, site.in_features)
        shapes[f"{site.disk_name}.lora_B.weight"] = (site.out_features, rank)
    return shapes


def fused_parts(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Disk names of the parts of every SGLang module, by module name."""
    parts: dict[str, list[str]] = {}
    for site in trainable_sites(spec):
        parts.setdefault(site.sglang_name, []).append(site.disk_name)
    return {name: tuple(names) for name, names in parts.items()}
