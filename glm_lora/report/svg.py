"""Charts as SVG: no library, colours and fonts from the page's style sheet.

Coordinates are those of a 420 x 230 view box, so that the text stays readable when a phone shows
it at its own width. Every chart names its scale in ``data-`` attributes, for the read-out under
the pointer and for whoever wants the numbers back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from glm_lora.report.charts import Chart, Line

WIDTH, HEIGHT = 420.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 8.0, 8.0, 24.0
MOST_POINTS = 800
"""Longer curves are drawn by the extremes of each stretch; the numbers beside them are complete."""
COLOURS = 8


@dataclass(frozen=True)
class Scale:
    """From values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of ``value``; outside values are put on the edge."""
        low, high = self._of(self.low), self._of(self.high)
        at = min(max(self._of(value), low), high)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def _of(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def svg(chart: Chart) -> str:
    """The chart as one ``<svg>`` element."""
    x, y = x_scale(chart), y_scale(chart)
    parts = list(_axes(chart, x, y))
    if chart.healthy is not None:
        parts.append(_healthy(chart.healthy, y))
    if chart.stacked:
        steps = all_steps(chart.lines)
        for index, (below, above) in enumerate(stack(chart.lines)):
            parts.append(_area(steps, below, above, x, y, f"fill c{index % COLOURS}"))
    else:
        for index, line in enumerate(chart.lines):
            parts += _curve(line, x, y, index % COLOURS)
    parts.append(f'<line class="cursor" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}" x1="-9" x2="-9"/>')
    facts = (
        f'data-first="{x.low!r}" data-last="{x.high!r}" data-low="{y.low!r}" '
        f'data-high="{y.high!r}" data-log="{int(y.log)}"'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(chart.title)}" '
        f"{facts}>{''.join(parts)}</svg>"
    )


def x_scale(chart: Chart) -> Scale:
    """Rollout numbers over the width."""
    steps = [s for line in chart.lines for s in line.steps]
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    return Scale(first, last, LEFT, WIDTH - RIGHT)


def y_scale(chart: Chart) -> Scale:
    """Values over the height: everything drawn, with some room."""
    values = list(_drawn(chart))
    if chart.log:
        positive = [v for v in values if v > 0] or [1e-8, 1.0]
        low, high = 10 ** math.floor(math.log10(min(positive))), max(positive)
        high = max(10 ** math.ceil(math.log10(high)), low * 10)
        return Scale(low, high, HEIGHT - BOTTOM, TOP, log=True)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low >= 0 and low < 0.6 * high:
        low = 0.0
    room = (high - low) * 0.06 or max(abs(high) * 0.1, 0.5)
    bottom = low if low == 0.0 else low - room
    return Scale(bottom, high + room, HEIGHT - BOTTOM, TOP)


def _drawn(chart: Chart) -> Iterator[float]:
    if chart.stacked:
        for below, above in stack(chart.lines):
            yield from (*below, *above)
        return
    for line in chart.lines:
        yield from (v for v in line.values if math.isfinite(v))
        for value, spread in zip(line.values, line.spread, strict=False):
            if math.isfinite(value) and math.isfinite(spread):
                yield from (value - spread, value + spread)
    if chart.log and chart.healthy is not None and chart.healthy[1] > 0:
        yield chart.healthy[1]


def ticks(scale: Scale) -> list[float]:
    """Round values to label: powers of ten, or about five steps of 1, 2 or 5 times one."""
    if scale.log:
        first, last = round(math.log10(scale.low)), round(math.log10(scale.high))
        every = max(1, (last - first + 4) // 5)
        return [10.0**n for n in range(first, last + 1, every)]
    rough = (scale.high - scale.low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
    first, last = math.ceil(scale.low / step), math.floor(scale.high / step)
    return [n * step for n in range(first, last + 1)]


def short(value: float) -> str:
    """A number for people: at most four digits, thousands and powers of ten where it is long."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _axes(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    across = f'x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}"'
    for value in ticks(y):
        at = y(value)
        yield f'<line class="grid" {across} y1="{at:.1f}" y2="{at:.1f}"/>'
        yield (
            f'<text class="tick" x="{LEFT - 5:g}" y="{at + 3.5:.1f}" text-anchor="end">'
            f"{short(value)}</text>"
        )
    for value in (v for v in ticks(x) if v == int(v)):
        yield (
            f'<text class="tick" x="{x(value):.1f}" y="{HEIGHT - 8:g}" text-anchor="middle">'
            f"{int(value)}</text>"
        )


def _healthy(band: tuple[float, float], y: Scale) -> str:
    top, bottom = y(min(band[1], y.high)), y(max(band[0], y.low))
    if band[0] > y.high or band[1] < y.low:
        return ""
    return (
        f'<rect class="healthy" x="{LEFT:g}" width="{WIDTH - LEFT - RIGHT:g}" y="{top:.1f}" '
        f'height="{max(bottom - top, 0.5):.1f}"/>'
    )


def _curve(line: Line, x: Scale, y: Scale, colour: int) -> Iterator[str]:
    if line.points:
        for step, value in zip(line.steps, line.values, strict=True):
            if math.isfinite(value):
                yield _dot(x(step), y(value), 3.5, colour)
        return
    if line.spread:
        known = [
            (s, v - d, v + d)
            for s, v, d in zip(line.steps, line.values, line.spread, strict=True)
            if math.isfinite(v) and math.isfinite(d)
        ]
        if known:
            steps, below, above = zip(*known, strict=True)
            yield _area(steps, below, above, x, y, f"spread c{colour}")
    runs = _unbroken(line)
    path = " ".join(
        "M" + "L".join(f"{x(s):.2f},{y(v):.2f}" for s, v in thin(points)) for points in runs
    )
    yield f'<path class="line c{colour}" d="{path}"/>'
    for points in runs:
        if len(points) == 1:  # a path of one point draws nothing
            step, value = points[0]
            yield _dot(x(step), y(value), 2, colour)


def _dot(x: float, y: float, radius: float, colour: int) -> str:
    return f'<circle class="dot c{colour}" cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}"/>'


def _unbroken(line: Line) -> list[list[tuple[int, float]]]:
    """The finite stretches of a line."""
    stretches: list[list[tuple[int, float]]] = [[]]
    for step, value in zip(line.steps, line.values, strict=True):
        if math.isfinite(value):
            stretches[-1].append((step, value))
        elif stretches[-1]:
            stretches.append([])
    return [s for s in stretches if s]


def thin(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """At most about ``MOST_POINTS`` points: of each stretch its lowest and its highest."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        ends = {min(chunk, key=lambda p: p[1]), max(chunk, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def all_steps(lines: Sequence[Line]) -> list[int]:
    """Every rollout that any of the lines has."""
    return sorted({s for line in lines for s in line.steps})


def stack(lines: Sequence[Line]) -> list[tuple[list[float], list[float]]]:
    """Lower and upper edge of each line when stacked, one value per step of ``all_steps``."""
    steps = all_steps(lines)
    below = [0.0] * len(steps)
    edges: list[tuple[list[float], list[float]]] = []
    for line in lines:
        values = dict(zip(line.steps, line.values, strict=True))
        heights = [values.get(s, 0.0) for s in steps]
        above = [b + (h if math.isfinite(h) else 0.0) for b, h in zip(below, heights, strict=True)]
        edges.append((below, above))
        below = above
    return edges


def _area(
    steps: Sequence[int],
    below: Sequence[float],
    above: Sequence[float],
    x: Scale,
    y: Scale,
    style: str,
) -> str:
    upper = thin(list(zip(steps, above, strict=True)))
    lower = thin(list(zip(steps, below, strict=True)))
    outline = [*upper, *reversed(lower)]
    path = "M" + "L".join(f"{x(s):.2f},{y(v):.2f}" for s, v in outline) + "Z"
    return f'<path class="{style}" d="{path}"/>'
