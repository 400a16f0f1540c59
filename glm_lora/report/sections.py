"""The parts of a report around its charts, each as HTML text; everything from a run is escaped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from glm_lora.protocols import LOGPROB_DIFF
from glm_lora.report.charts import bands_of
from glm_lora.report.history import FAILED, FINISHED, STARTED
from glm_lora.report.run_data import RunData, number
from glm_lora.report.sinks import STEP_KEY
from glm_lora.report.svg import short

ROLLOUTS_SHOWN = 8
"""Rollouts whose responses are shown: the first, the last and some between them."""
HEADLINE = (
    ("reward", "rollout/raw_reward"),
    ("logprob difference", LOGPROB_DIFF),
    ("KL", "train/ppo_kl"),
    ("gradient norm", "train/grad_norm"),
    ("response length", "rollout/response_length"),
)


def headline(run: RunData) -> str:
    """Name, state, and the newest figures."""
    newest = run.records[-1] if run.records else {}
    wanted = run.config.get("rollout", {}).get("num_rollout")
    figures = [("rollouts", f"{len(run.records)} of {wanted}")]
    figures += [(label, short(number(newest[key]))) for label, key in HEADLINE if key in newest]
    if len(run.records) > 1 and "rollout/raw_reward" in run.records[0]:
        first = short(number(run.records[0]["rollout/raw_reward"]))
        figures[1] = ("reward, first was " + first, figures[1][1])
    boxes = "".join(f"<div>{escape(k)}<b>{escape(v)}</b></div>" for k, v in figures)
    model = escape(str(run.config.get("model_name", "")))
    return (
        f"<h1>{escape(run.name)}</h1>"
        f'<p class="soft">{model} - {_state(run)} - <code>{escape(str(run.path.resolve()))}</code>'
        f'</p><div class="numbers">{boxes}</div>'
    )


def _state(run: RunData) -> str:
    if run.running:
        return "running"
    end = run.end
    if end is None:
        return "no end recorded" if run.events else "state not recorded"
    if end["event"] != FAILED:
        return f"{end['event']} {_clock(end['time'])}"
    return f'<span class="bad">failed {_clock(end["time"])}</span>'


def gates(run: RunData) -> str:
    """Which healthy bands were left and when, and what stopped the run."""
    rows: list[Sequence[str]] = []
    for event in run.events:
        if event["event"] in (STARTED, FINISHED):
            continue
        name = event.get("error", "")
        rows.append((name, "stopped the run", _clock(event["time"]), event.get("text", "")))
    for band in bands_of(run):
        low, high = number(band["low"]), number(band["high"])
        key = str(band["metric"])
        out = [
            (step, value)
            for step, record in zip(run.steps, run.records, strict=True)
            if key in record and not low <= (value := number(record[key])) <= high
        ]
        if out:
            worst = max(out, key=lambda pair: _distance(pair[1], low, high))
            when = f"{len(out)} of {len(run.records)} rollouts, {out[0][0]} to {out[-1][0]}"
            text = (
                f"{short(worst[1])} in rollout {worst[0]}; healthy is {low:g} to {high:g}. "
                f"{band['read_first']}."
            )
            rows.append((key, "outside its band", when, text))
    if not run.events:
        text = '<p class="soft">This run recorded no bands.</p>'
    elif not rows:
        text = "<p>None fired: every figure stayed in its healthy band.</p>"
    else:
        text = table(("what", "", "when", "detail"), rows)
    return f"<h2>Gates</h2>{text}"


def _distance(value: float, low: float, high: float) -> float:
    return math.inf if math.isnan(value) else max(low - value, value - high)


def responses(run: RunData) -> str:
    """Prompts with their best and worst response, of rollouts over the whole run."""
    steps = sorted({int(row[STEP_KEY]) for row in run.samples})
    if not steps:
        return '<h2>Responses</h2><p class="soft">None recorded.</p>'
    last = len(steps) - 1
    count = min(ROLLOUTS_SHOWN, len(steps))
    shown = {steps[round(i * last / max(count - 1, 1))] for i in range(count)}
    parts = [_response_pair(row) for row in run.samples if int(row[STEP_KEY]) in shown]
    return (
        "<h2>Responses</h2>"
        '<p class="soft">The best and the worst response to the prompts whose rewards differ most; '
        f"all of them are in samples.jsonl.</p>{''.join(parts)}"
    )


def _response_pair(row: Mapping[str, Any]) -> str:
    sides = "".join(
        f"<div>{name}: reward {short(number(side.get('reward')))}, {side.get('tokens')} tokens, "
        f"ended by {escape(str(side.get('finish')))}"
        f"<pre>{escape(str(side.get('text')))}</pre></div>"
        for name, side in (("best", row["best"]), ("worst", row["worst"]))
    )
    prompt = str(row.get("prompt"))
    line = escape(prompt if len(prompt) <= 80 else prompt[:80] + " ...")
    return (
        f"<details><summary>rollout {int(row[STEP_KEY])}: <code>{line}</code></summary>"
        f"<pre>{escape(prompt)}</pre><p class=soft>expected: {escape(str(row.get('label')))}</p>"
        f'<div class="pair">{sides}</div></details>'
    )


def selection_table(run: RunData) -> str:
    """What is trained."""
    rows = [
        (r.projection, r.group, r.layers, r.count, r.rank, r.shape, _count(r.parameters))
        for r in run.selection
    ]
    known = [r.parameters for r in run.selection if r.parameters is not None]
    total = f", {sum(known):,} parameters" if len(known) == len(run.selection) else ""
    names = ("projection", "group", "layers", "sites", "rank", "out x in", "parameters")
    return (
        f"<h2>Selection</h2><p>{sum(r.count for r in run.selection)} projections{total}</p>"
        f"{table(names, rows)}"
    )


def configuration(run: RunData) -> str:
    """The resolved configuration."""
    rows = [(key, value) for key, value in flat(run.config).items()]
    body = table(("key", "value"), rows)
    return f"<h2>Configuration</h2><details><summary>{len(rows)} values</summary>{body}</details>"


def versions_table(run: RunData) -> str:
    """Versions, engine, and the base's fingerprint."""
    started = run.started
    rows: list[tuple[str, Any]] = [("base fingerprint", run.base.get("fingerprint", "-"))]
    rows += sorted(started.get("versions", {}).items())
    rows += [(key, started[key]) for key in ("engine", "device", "host") if key in started]
    rows += [("started", _clock(e["time"])) for e in run.events if e["event"] == STARTED]
    return f"<h2>Versions</h2>{table(('what', 'value'), rows)}"


def metric_table(run: RunData) -> str:
    """Every metric: its first, last, smallest and largest value."""
    keys = sorted({key for record in run.records for key in record} - {STEP_KEY})
    rows = []
    for key in keys:
        values = [number(record[key]) for record in run.records if key in record]
        finite = [v for v in values if math.isfinite(v)] or [math.nan]
        rows.append((key, *map(repr, (values[0], values[-1], min(finite), max(finite)))))
    body = table(("metric", "first", "last", "smallest", "largest"), rows, name="metrics")
    return f"<h2>All metrics</h2><details><summary>{len(rows)} metrics</summary>{body}</details>"


def summary_table(runs: Sequence[RunData]) -> str:
    """The newest figures of each run side by side."""
    rows = []
    for run in runs:
        newest = run.records[-1] if run.records else {}
        figures = [short(number(newest[key])) if key in newest else "-" for _, key in HEADLINE]
        rows.append((run.name, len(run.records), *figures))
    return table(("run", "rollouts", *(label for label, _ in HEADLINE)), rows)


def differences(runs: Sequence[RunData]) -> str:
    """The configuration values in which the runs differ."""
    flats = [flat(run.config) | {"base": run.base.get("fingerprint", "-")} for run in runs]
    keys = sorted({key for values in flats for key in values})
    rows = [
        (key, *(values.get(key, "-") for values in flats))
        for key in keys
        if len({str(values.get(key)) for values in flats}) > 1
    ]
    names = [run.name for run in runs]
    return f"<h2>Differences in configuration</h2>{table(('key', *names), rows)}"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


def table(names: Sequence[str], rows: Iterable[Sequence[Any]], name: str = "") -> str:
    """An HTML table; numbers are aligned to the right."""
    head = "".join(f"<th>{escape(n)}</th>" for n in names)
    body = "".join(
        "<tr>" + "".join(f"<td{_align(cell)}>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    mark = f' data-table="{name}"' if name else ""
    return f'<div class="scroll"><table{mark}><tr>{head}</tr>{body}</table></div>'


def _align(cell: Any) -> str:
    return ' class="n"' if isinstance(cell, int | float) and not isinstance(cell, bool) else ""


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
