"""The ``targets`` command: a table for people, one JSON object for programs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from glm_lora.arch.foreign import non_targets
from glm_lora.arch.naming import Spelling, spell
from glm_lora.arch.projections import Status, all_sites
from glm_lora.arch.spec import ModelSpec
from glm_lora.config import SelectionConfig
from glm_lora.targets.explain import explain as explain_name
from glm_lora.targets.model import known_model
from glm_lora.targets.resolve import Resolution, resolve
from glm_lora.targets.summary import (
    BF16_BYTES,
    Projection,
    as_json_object,
    base_parameters,
    layers_phrase,
    projections,
)
from glm_lora.targets.support import SERVING, Step

_WIDTH = 200
"""More columns than the table ever needs, so that nothing in it is cut."""
_SHORT = {
    Step.EMBEDDED: "embedded",
    Step.SGLANG_STOCK: "SGLang",
    Step.SGLANG_PLUGIN: "+plugin",
    Step.PEFT: "PEFT",
}
"""Column headings."""


def run_targets(
    *,
    model_name: str,
    config: SelectionConfig,
    hf_checkpoint: Path | None = None,
    as_json: bool = False,
    list_sites: bool = False,
    explain: str | None = None,
) -> str:
    """Resolve a selection and describe it.

    Args:
        model_name: A built-in model, or with ``hf_checkpoint`` any name.
        config: Patterns, layers, ranks.
        hf_checkpoint: Folder whose ``config.json`` and index are read and checked.
        as_json: One JSON object instead of the table.
        list_sites: Every named module of the text model with its spellings and status.
        explain: A name to explain instead.

    Returns:
        The text to print.

    Raises:
        TargetError: The selection, or the name to explain, is refused.
        ModelError: The model is unknown, or not what the checkpoint holds.
        CheckpointError: The checkpoint's index or a shard cannot be read.
    """
    model = known_model(model_name, hf_checkpoint)
    resolution = resolve(model.spec, model_name, config)
    if explain is not None:
        explanation = explain_name(explain, resolution, model.spec)
        return json.dumps(explanation.as_object()) if as_json else explanation.as_text()
    if as_json:
        report = as_json_object(resolution, model.spec, model.source)
        if list_sites:
            report["table"] = [
                dict(zip(_LIST_COLUMNS, r, strict=True)) for r in _list_rows(resolution, model.spec)
            ]
        return json.dumps(report)
    if list_sites:
        rows = _list_rows(resolution, model.spec)
        return "\n".join(["\t".join(_LIST_COLUMNS), *("\t".join(row) for row in rows)])
    return _as_table(resolution, model.spec, model.source)


_LIST_COLUMNS = ("status", "rank", "kind", "shape", "transformers", "disk", "sglang")


def _list_rows(resolution: Resolution, spec: ModelSpec) -> Iterator[tuple[str, ...]]:
    """Every projection (routed experts one by one), then the other parameters, as texts."""
    ranks = {a.site.disk_name: a.rank for a in resolution.selection.adapters}
    for site in all_sites(spec):
        rank = ranks.get(site.disk_name)
        status = "selected" if rank else site.status.value
        yield (
            status,
            str(rank or "-"),
            site.kind.value,
            f"{site.shape[0]}x{site.shape[1]}",
            site.name,
            site.disk_name,
            spell(site, Spelling.SGLANG),
        )
    for other in non_targets(spec):
        if other.part == "text":
            yield (Status.NOT_A_TARGET.value, "-", "-", "-", other.names[0], other.names[-1], "-")


def _as_table(resolution: Resolution, spec: ModelSpec, source: str) -> str:
    selection = resolution.selection
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("projection", no_wrap=True)
    table.add_column("layers", max_width=16, overflow="fold")
    for name in ("sites", "shape", "rank", "parameters", "bf16"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("TP", no_wrap=True)
    for step in SERVING:
        table.add_column(_SHORT[step], no_wrap=True)
    notes: dict[str, list[str]] = {}
    group = ""
    for line in projections(selection):
        if line.group != group:
            group = line.group
            table.add_row(group)
        table.add_row(*_cells(line, spec, notes))
    return "\n".join(
        [
            f"{selection.model} ({source})",
            "",
            _render(table),
            "",
            *(f"{note}: {', '.join(dict.fromkeys(who))}" for note, who in notes.items()),
            *_totals(resolution, spec),
            *(f"warning: {text}" for text in resolution.warnings),
        ]
    )


def _cells(line: Projection, spec: ModelSpec, notes: dict[str, list[str]]) -> list[str]:
    served: list[str] = []
    for step in SERVING:
        verdict = line.served[step]
        mark = ""
        if verdict.reason:
            text = f"{step.value}: {verdict.word}, {verdict.reason}"
            numbers = {key.split(") ", 1)[1]: key for key in notes}
            key = numbers.get(text, f"{len(notes) + 1}) {text}")
            notes.setdefault(key, []).append(line.leaf)
            mark = f" ({key.split(')', 1)[0]})"
        served.append(verdict.word + mark)
    return [
        f"  {line.leaf}",
        layers_phrase(line.layers, spec),
        str(len(line.layers)),
        f"{line.shape[0]} x {line.shape[1]}",
        str(line.rank),
        f"{line.parameters:,}",
        _size(line.bytes_bf16),
        line.kind,
        *served,
    ]


def _totals(resolution: Resolution, spec: ModelSpec) -> Iterator[str]:
    selection = resolution.selection
    base = base_parameters(spec)
    parameters = selection.trainable_parameters
    layers = len({a.site.layer for a in selection.adapters})
    yield (
        f"total: {selection.num_sites} sites in {layers} of {spec.num_hidden_layers} layers, "
        f"{parameters:,} trainable parameters ({_size(parameters * BF16_BYTES)} in bf16), "
        f"{100 * parameters / base:.4g} % of the text model's {base:,}"
    )
    yield (
        f"rank {selection.rank}, alpha {selection.alpha:g}: the adapter's output is scaled by "
        f"{selection.adapters[0].scaling:g}; dropout {selection.dropout:g}"
    )
    able: Mapping[Step, bool] = {
        step: all(p.served[step].possible for p in projections(selection)) for step in SERVING
    }
    yield "the whole selection can be served by: " + ", ".join(
        step.value for step, yes in able.items() if yes
    )


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def _render(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())
