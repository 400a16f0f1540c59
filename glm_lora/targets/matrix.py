"""The support matrix of ``adapters/README.md``, from the facts table and the recipe files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from glm_lora.arch.foreign import MTP_LAYER, VISION_PREFIX, non_targets
from glm_lora.arch.projections import (
    DENSE_ROWS,
    DSA_ROWS,
    KDA_ROWS,
    LAYER_ROWS,
    LAYERS_PREFIX,
    MOE_ROWS,
    Row,
    Status,
)
from glm_lora.arch.spec import FULL
from glm_lora.targets.recipes import load_recipe, recipe_description
from glm_lora.targets.resolve import resolve
from glm_lora.targets.support import SERVING, Step, verdict

MODEL = "GLM-5.3-Flash"
_PART_NAMES = {"vision": f"{VISION_PREFIX}*", "mtp": f"{LAYERS_PREFIX}{MTP_LAYER}.*"}
_INTRO = """# Adapters: what to train

A file here says which projections get an adapter and with which rank, and nothing else: no GPU
counts, no learning rates, no weights. Use one with `--adapter adapters/NAME.toml` (with `targets`
to look, with `train` to train); it takes the place of the selection and rank options.

```toml
target_modules = ["attn", "mlp"]     # groups, leaf names or globs; required
exclude_modules = ["*.mlp.experts.*", "*.self_attn.kv_b_proj"]
layers = "0-11,44"                   # empty or left out: all
lora_rank = 16
lora_alpha = 32                      # alpha / rank is the one scaling
lora_dropout = 0.0

[rank]                               # own rank of some; alpha / rank stays the same
"*.mlp.*" = 8
```

Engines know one rank per adapter, so where ranks differ every A and B is padded with zeros to the
largest rank when it leaves the trainer, with the alpha that belongs to that rank.

This file is written by `python adapters/make_readme.py`; a test compares it with the facts table.
"""


def readme(folder: Path) -> str:
    """The whole ``README.md`` for the recipes in ``folder``."""
    return "\n".join(
        [
            _INTRO,
            "## Recipes",
            "",
            *_recipe_lines(sorted(folder.glob("*.toml"))),
            "",
            "## Support matrix",
            "",
            "Serving by SGLang 0.5.23: stock, and with this project's plugin. A part of a fused",
            "projection (q, k, v; gate, up; q_a, kv_a) is served only together with the others.",
            "",
            *_matrix_lines(),
            "",
        ]
    )


def _recipe_lines(paths: Iterable[Path]) -> Iterator[str]:
    header = ("recipe", "what", f"sites in {MODEL}", "trainable parameters")
    rows: list[Sequence[str]] = []
    for path in paths:
        selection = resolve(FULL, MODEL, load_recipe(path)).selection
        numbers = (str(selection.num_sites), f"{selection.trainable_parameters:,}")
        rows.append((f"`{path.name}`", recipe_description(path), *numbers))
    yield from _table(header, rows)


def _matrix_lines() -> Iterator[str]:
    steps = (Step.TRAIN, Step.SYNC, Step.EXPORT, *SERVING)
    found: dict[tuple[str, ...], list[str]] = {}
    for where, rows in (
        ("KDA", KDA_ROWS),
        ("DSA", DSA_ROWS),
        ("dense MLP", DENSE_ROWS),
        ("MoE", MOE_ROWS),
        ("all", LAYER_ROWS),
    ):
        for row in rows:
            found.setdefault((where, *_cells(row, steps)), []).append(row.path)
    for other in non_targets(FULL):
        name = _PART_NAMES.get(other.part) or other.names[0]
        if other.part != "text" or not name.startswith(LAYERS_PREFIX):
            found.setdefault(("no layer", *_refused(other.reason, steps)), []).append(name)
    table = [
        (", ".join(f"`{name}`" for name in dict.fromkeys(names)), *cells)
        for cells, names in found.items()
    ]
    yield from _table(("target", "layers", *(step.value for step in steps)), table)


def _cells(row: Row, steps: Sequence[Step]) -> Sequence[str]:
    if row.status is not Status.TRAINABLE:
        return _refused(row.reason, steps)
    verdicts = [verdict(row, step) for step in steps]
    return [v.word + (f": {v.reason}" if v.reason else "") for v in verdicts]


def _refused(reason: str, steps: Sequence[Step]) -> Sequence[str]:
    return [f"no: {reason}", *["no: never trained"] * (len(steps) - 1)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cells) + " |"
