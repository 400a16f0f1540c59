"""The charts as PNG files, for slides and issues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from glm_lora.checkpoint.files import write_atomic
from glm_lora.report.charts import Chart
from glm_lora.report.svg import all_steps, stack, y_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#5d3a9b", "#444444",
)  # fmt: skip
DASHES = ("-", "--", ":", "-.")


def write_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Draw each chart to ``folder/<key>.png`` (960 x 540); nothing is shown on a screen.

    Raises:
        OSError: A file cannot be written; no half of one is left.
    """
    if not charts:
        return []
    # The object interface: no global state, no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(
        figsize=(6.4, 3.6),
        dpi=120,
    )
    canvas = FigureCanvasAgg(figure)
    written: list[Path] = []
    for chart in charts:
        figure.clear()
        _draw(chart, figure.add_subplot())
        written.append(folder / f"{chart.key}.png")
        picture = BytesIO()
        canvas.print_png(picture)
        write_atomic(written[-1], picture.getvalue())
    return written


def _draw(chart: Chart, axes: Axes) -> None:
    axes.set_title(chart.title, loc="left", fontsize=10)
    axes.set_xlabel("rollout", fontsize=8)
    axes.set_ylabel(chart.unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3, linewidth=0.5)
    scale = y_scale(chart)
    if chart.healthy is not None:
        axes.axhspan(*chart.healthy, color="#009e73", alpha=0.1, linewidth=0)
    for index, line in enumerate(chart.lines):
        colour, dash = PALETTE[index % len(PALETTE)], DASHES[index % len(DASHES)]
        if chart.stacked:
            below, above = stack(chart.lines)[index]
            steps = all_steps(chart.lines)
            axes.fill_between(steps, below, above, color=colour, linewidth=0, label=line.label)
            continue
        if line.points:
            axes.plot(line.steps, line.values, "o", color=colour, markersize=4, label=line.label)
        else:
            mark = "o" if sum(map(math.isfinite, line.values)) == 1 else ""
            axes.plot(
                line.steps, line.values, dash, marker=mark, color=colour, linewidth=1.3,
                label=line.label,
            )  # fmt: skip
        if line.spread:
            low = [v - s for v, s in zip(line.values, line.spread, strict=True)]
            high = [v + s for v, s in zip(line.values, line.spread, strict=True)]
            axes.fill_between(line.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    if chart.log:
        axes.set_yscale("log")
    axes.set_ylim(scale.low, scale.high)
    axes.legend(fontsize=7, frameon=False, ncols=6, loc="lower right", bbox_to_anchor=(1.02, 1))
