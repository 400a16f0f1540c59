"""Adapter recipes: TOML files that say what to train, and nothing else.

    target_modules = ["attn", "mlp"]
    exclude_modules = ["*.mlp.experts.*", "*.self_attn.kv_b_proj"]
    layers = ""
    lora_rank = 16
    lora_alpha = 32
    lora_dropout = 0.0

    [rank]
    "*.mlp.*" = 8

``target_modules`` is required; without ``exclude_modules`` nothing is excluded. A pattern under
``[rank]`` gets its own rank and, so that alpha/rank stays the same everywhere, its own alpha: there
is no key to set one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from glm_lora.config import SelectionConfig, build, from_toml
from glm_lora.errors import ConfigError

_DEFAULTS = SelectionConfig()


def _joined(value: object) -> str:
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        raise ValueError("a string or a list of strings")
    return ",".join(cast("list[str]", items))


Items = Annotated[str, BeforeValidator(_joined)]
"""Items as a list, or as one string with commas."""


class Recipe(BaseModel):
    """The keys of a recipe file; types are not converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    description: str = ""
    target_modules: Items
    exclude_modules: Items = ""
    layers: str = ""
    lora_rank: int = Field(default=_DEFAULTS.lora_rank, ge=1)
    lora_alpha: float = Field(default=_DEFAULTS.lora_alpha, gt=0)
    lora_dropout: float = Field(default=_DEFAULTS.lora_dropout, ge=0, lt=1)
    rank: dict[str, int] = Field(default_factory=dict[str, int])


_FORM = (
    "A recipe has target_modules, lora_rank and the like at its top, without the [selection] of a "
    "run's config.toml: adapters/attn_mlp.toml is one"
)


def _read(path: Path) -> Recipe:
    try:
        return from_toml(Recipe, path)
    except ConfigError as error:
        raise ConfigError(error.what, error.expected, error.next_step or _FORM) from error


def recipe_description(path: Path) -> str:
    """The recipe's own description; ConfigError as ``load_recipe``."""
    return _read(path).description


def load_recipe(path: Path) -> SelectionConfig:
    """Read a recipe file.

    Raises:
        ConfigError: The file is missing, is no TOML (a key given twice included), or has an
            unknown key, a missing one, or a value of the wrong type or out of range.
    """
    recipe = _read(path)
    values = recipe.model_dump(exclude={"description", "rank"})
    return build(SelectionConfig, {**values, "ranks": recipe.rank}, str(path))
