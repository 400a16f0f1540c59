"""Which charts a report has, and their numbers: taken from the metrics as they were written.

A chart is drawn twice from the same object: as SVG in the page (``svg.py``) and as PNG
(``png.py``). Charts of several runs hold one line per run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from glm_lora.protocols import LOGPROB_DIFF
from glm_lora.report.run_data import RunData, number

GIB = 2.0**30
PHASES = (
    "rollout", "reward", "release", "onload", "train", "offload", "resume", "sync", "eval",
    "save_wait", "save",
)  # fmt: skip
"""Order of the phases of one rollout."""


@dataclass(frozen=True)
class Line:
    """One curve; values that are not finite are gaps."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    spread: tuple[float, ...] = ()
    """Half width of a shaded band around the values."""
    points: bool = False
    """Draw separate points instead of a connected curve."""


@dataclass(frozen=True)
class Chart:
    """Curves over the rollouts in one coordinate system."""

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    about: str = ""
    healthy: tuple[float, float] | None = None
    log: bool = False
    stacked: bool = False

    @property
    def not_finite(self) -> int:
        """Values recorded as NaN or infinity, which no curve can show."""
        return sum(1 for line in self.lines for v in line.values if not math.isfinite(v))


@dataclass(frozen=True)
class Curve:
    """A metric to draw."""

    key: str
    label: str
    spread: str = ""
    points: bool = False
    per: str = ""
    """Metric to divide by."""
    scale: float = 1.0
    """Divisor that makes the unit."""


@dataclass(frozen=True)
class Design:
    """What a chart shows; the first curve is the one that comparisons draw."""

    key: str
    title: str
    unit: str
    about: str
    curves: tuple[Curve, ...] = ()
    prefix: str = ""
    """Draw every metric with this prefix, stacked, instead of ``curves``."""
    log: bool = False
    names: tuple[str, ...] = field(default=PHASES)


DESIGNS = (
    Design(
        "reward", "Reward", "", "Mean over the scored samples; a shade is one standard deviation.",
        (
            Curve("rollout/raw_reward", "samples", spread="rollout/reward_std"),
            Curve("eval/raw_reward", "evaluation", points=True),
        ),
    ),
    Design(
        "logprob_diff", "Trainer against engine", "nats per token",
        "Difference of the log-probabilities of the sampled tokens.",
        (Curve(LOGPROB_DIFF, "mean"), Curve(f"{LOGPROB_DIFF}_max", "largest")),
        log=True,
    ),
    Design(
        "kl", "KL", "nats per token", "Of the update, and to the base where it is in the loss.",
        (Curve("train/ppo_kl", "update"), Curve("train/kl", "to the base")),
    ),
    Design(
        "grad_norm", "Gradient norm", "", "Before clipping.",
        (Curve("train/grad_norm", "norm"),),
    ),
    Design(
        "entropy", "Entropy", "nats per token", "Of the policy on the sampled tokens.",
        (Curve("train/entropy", "entropy"),),
    ),
    Design(
        "length", "Response length", "tokens", "",
        (Curve("rollout/response_length", "mean"), Curve("rollout/response_length_max", "longest")),
    ),
    Design(
        "truncated", "Truncated responses", "share", "Cut at the length limit.",
        (Curve("rollout/truncated_ratio", "samples"),
         Curve("eval/truncated_ratio", "evaluation", points=True)),
    ),
    Design(
        "signal", "Groups without spread", "groups",
        "All samples of the group got the same reward: nothing to learn from.",
        (Curve("rollout/zero_std_groups", "without spread"), Curve("rollout/groups", "all")),
    ),
    Design("time", "Time per phase", "seconds", "Stacked, per rollout.", prefix="time/"),
    Design(
        "tokens", "Tokens per second", "tokens/s", "",
        (
            Curve("rollout/tokens_per_second", "sampling"),
            Curve("train/tokens", "training", per="time/train"),
        ),
    ),
    Design(
        "memory", "Memory", "GiB",
        "Largest so far; of the trainer the GPU's where there is one.",
        (Curve("memory/trainer_peak_bytes", "trainer", scale=GIB),
         Curve("memory/driver_peak_bytes", "driver process", scale=GIB)),
    ),
    Design(
        "sync_bytes", "Adapter sent", "MiB", "Per sync and engine.",
        (Curve("sync/bytes", "payload", scale=2.0**20),),
    ),
    Design(
        "sync_seconds", "Sync", "seconds", "",
        (Curve("sync/seconds", "push and checks"), Curve("sync/push_seconds", "push alone")),
    ),
)  # fmt: skip


def charts_of(run: RunData) -> list[Chart]:
    """The charts of one run that have data, in the report's order."""
    healthy = {b["metric"]: (number(b["low"]), number(b["high"])) for b in bands_of(run)}
    charts: list[Chart] = []
    for design in DESIGNS:
        curves = design.curves or _phases(run, design)
        lines = [line for curve in curves if (line := _line(run, curve, curve.label)) is not None]
        if lines:
            key = curves[0].key
            charts.append(_chart(design, lines, healthy.get(key), bool(design.prefix)))
    return charts


def compared_charts(runs: Sequence[RunData]) -> list[Chart]:
    """The first curve of every chart, one line per run; phases as their sum."""
    charts: list[Chart] = []
    for design in DESIGNS:
        lines: list[Line] = []
        for run in runs:
            line = (
                _summed(run, design)
                if design.prefix
                else _line(run, design.curves[0], run.name, with_spread=False)
            )
            if line is not None:
                lines.append(line)
        if lines:
            charts.append(_chart(design, lines, None, False))
    return charts


def bands_of(run: RunData) -> list[dict[str, object]]:
    """The healthy bands that the run itself recorded: metric, low, high, read_first."""
    return list(run.started.get("bands", ()))


def _chart(
    design: Design, lines: list[Line], healthy: tuple[float, float] | None, stacked: bool
) -> Chart:
    return Chart(
        design.key,
        design.title,
        design.unit,
        tuple(lines),
        design.about,
        healthy,
        design.log,
        stacked,
    )


def _line(run: RunData, curve: Curve, label: str, with_spread: bool = True) -> Line | None:
    present = [i for i, record in enumerate(run.records) if curve.key in record]
    if not present:
        return None
    values, steps = run.series(curve.key), run.steps
    divisors = run.series(curve.per) if curve.per else [1.0] * len(values)
    spread = run.series(curve.spread) if curve.spread and with_spread else []
    return Line(
        label,
        tuple(steps[i] for i in present),
        tuple(_ratio(values[i], divisors[i] * curve.scale) for i in present),
        tuple(spread[i] for i in present) if spread else (),
        curve.points,
    )


def _ratio(value: float, divisor: float) -> float:
    return value / divisor if divisor else math.nan


def _phases(run: RunData, design: Design) -> tuple[Curve, ...]:
    keys = {key for record in run.records for key in record if key.startswith(design.prefix)}
    known = [design.prefix + name for name in design.names]
    ordered = [k for k in known if k in keys] + sorted(keys - set(known))
    return tuple(Curve(key, key.removeprefix(design.prefix)) for key in ordered)


def _summed(run: RunData, design: Design) -> Line | None:
    keys = [curve.key for curve in _phases(run, design)]
    if not keys:
        return None
    sums = [
        math.fsum(number(record[key]) for key in keys if key in record) for record in run.records
    ]
    return Line(run.name, tuple(run.steps), tuple(sums))
