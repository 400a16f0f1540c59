"""``report.html``: one file that shows a run, or several over each other, without a network.

Style, script and numbers are inside of the file, and a content policy forbids it to load anything.
All text from the run (responses, configuration, paths) is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from glm_lora.checkpoint.files import write_atomic
from glm_lora.errors import ConfigError
from glm_lora.report.charts import Chart, charts_of, compared_charts
from glm_lora.report.png import write_pngs
from glm_lora.report.run_data import load_run
from glm_lora.report.run_folder import REPORT, REPORT_PNGS
from glm_lora.report.sections import (
    configuration,
    differences,
    gates,
    headline,
    metric_table,
    responses,
    selection_table,
    summary_table,
    versions_table,
)
from glm_lora.report.svg import COLOURS, LEFT, RIGHT, WIDTH, all_steps, svg

_TITLE = "<title>glm-lora: "
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(run: Path, output: Path | None = None, *, refresh: int = 0) -> Path:
    """Write the report of one run, and each chart as PNG beside it.

    Args:
        run: The run folder; it may still be running.
        output: The file to write; default ``report.html`` (and ``report/*.png``) in the run folder.
        refresh: Seconds after which a browser reads the file again; 0 never.

    Returns:
        The file, as it was named.

    Raises:
        ConfigError: ``run`` is no run folder, a file in it is not what a run writes, or ``output``
            holds something else than a report.
        OSError: A file cannot be written.
    """
    named = output or run / REPORT
    target = _free_target(named)
    data = load_run(run)
    charts = charts_of(data)
    body = "".join(
        (
            headline(data),
            _charts(charts),
            gates(data),
            responses(data),
            selection_table(data),
            configuration(data),
            versions_table(data),
            metric_table(data),
        )
    )
    _write(target, data.name, body, charts, refresh)
    if not refresh:
        write_pngs(charts, target.with_name(REPORT_PNGS) if output is None else _pngs_of(target))
    return named


def write_comparison(runs: Sequence[Path], output: Path) -> Path:
    """Write one page with the curves of several runs over each other.

    Raises:
        ConfigError: One of them is no run folder, a file of one is not what a run writes, or
            ``output`` holds something else than a report.
        OSError: A file cannot be written.
    """
    target = _free_target(output)
    data = [load_run(path, name) for path, name in zip(runs, _names(runs), strict=True)]
    charts = compared_charts(data)
    body = f"<h1>{len(data)} runs</h1>" + summary_table(data) + _charts(charts) + differences(data)
    _write(target, "comparison", body, charts, 0)
    write_pngs(charts, _pngs_of(target))
    return output


def _names(runs: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to tell them apart."""
    parts = [path.resolve().parts for path in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(runs, 1)]


def _free_target(path: Path) -> Path:
    """Where ``path`` leads, links followed; ConfigError if it would replace other things."""
    path = path.resolve()
    if path.is_dir():
        what = "is a folder"
    elif path.exists() and not path.is_file():
        what = "is a pipe or a device"
    elif (
        path.exists()
        and path.stat().st_size
        and _TITLE not in path.read_bytes()[:2048].decode(errors="replace")
    ):
        what = "holds something else than a report"
    else:
        return path
    raise ConfigError(f"--output {path} {what}", "a new file, or an earlier report")


def _pngs_of(output: Path) -> Path:
    return output.with_name(f"{output.stem}-png")


def _write(target: Path, title: str, body: str, charts: Sequence[Chart], refresh: int) -> None:
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{again}'
        f"{_TITLE}{escape(title)}</title><style>{_resource('page.css')}</style></head>"
        f"<body>{body}"
        f'<script type="application/json" id="data">{_data(charts)}</script>'
        f"<script>{_resource('page.js')}</script></body></html>\n"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, page)


def _resource(name: str) -> str:
    return resources.files("glm_lora.report").joinpath(name).read_text(encoding="utf-8")


def _data(charts: Sequence[Chart]) -> str:
    """The numbers of the charts for the script, safe inside of a script element."""
    content: dict[str, Any] = {
        "width": WIDTH,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "charts": {
            chart.key: {
                "steps": all_steps(chart.lines),
                "lines": [
                    {
                        "label": line.label,
                        "steps": line.steps,
                        "values": [v if math.isfinite(v) else None for v in line.values],
                    }
                    for line in chart.lines
                ],
            }
            for chart in charts
        },
    }
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _charts(charts: Sequence[Chart]) -> str:
    if not charts:
        return '<h2>Charts</h2><p class="soft">No rollout is finished yet.</p>'
    return '<h2>Charts</h2><div class="charts">' + "".join(map(_figure, charts)) + "</div>"


def _figure(chart: Chart) -> str:
    notes = [chart.about] if chart.about else []
    if chart.healthy is not None:
        low, high = chart.healthy
        notes.append(f"Healthy (shaded): {low:g} to {high:g}.")
    if chart.not_finite:
        notes.append(f"{chart.not_finite} values are not finite and not drawn.")
    unit = f' <span class="soft">{escape(chart.unit)}</span>' if chart.unit else ""
    legend = "".join(
        f"<li>{_swatch(chart, index)} {escape(line.label)} <output></output></li>"
        for index, line in enumerate(chart.lines)
    )
    return (
        f'<figure data-chart="{chart.key}"><h3>{escape(chart.title)}{unit}</h3>{svg(chart)}'
        f'<ul class="legend">{legend}<li class="soft at"></li></ul>'
        f"<figcaption>{escape(' '.join(notes))}</figcaption></figure>"
    )


def _swatch(chart: Chart, index: int) -> str:
    style = f"c{index % COLOURS}"
    if chart.stacked:
        shape = f'<rect class="fill {style}" width="26" height="10"/>'
    elif chart.lines[index].points:
        shape = f'<circle class="dot {style}" cx="13" cy="5" r="3.5"/>'
    else:
        shape = f'<path class="line key {style}" d="M0,5L26,5"/>'
    return f'<svg viewBox="0 0 26 10" aria-hidden="true">{shape}</svg>'
