"""Plot tokens/s against the size of a step: ``plot_train_step.py RESULT.json PLOT.svg``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def main(source: Path, target: Path) -> None:
    """One panel per recompute setting; bars for both sides, a line for the roofline."""
    rows = json.loads(source.read_text(encoding="utf-8"))["rows"]
    kinds = list(dict.fromkeys(row["recompute"] for row in rows))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True), kinds, strict=True):
        chosen = [row for row in rows if row["recompute"] == kind]
        for offset, side, label in (
            (-0.2, "ours", "glm-lora"),
            (0.2, "peer", "transformers + PEFT"),
        ):
            heights = [row.get(side, {}).get("tokens_per_s", 0) for row in chosen]
            axes.bar([i + offset for i in range(len(chosen))], heights, 0.4, label=label)
        axes.axhline(
            chosen[0]["roofline"], color="gray", linestyle="--", label="matrix products only"
        )
        axes.set_xticks(range(len(chosen)), [row["size"] for row in chosen])
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_title(f"recompute {kind}")
        axes.set_xlabel("sequences x tokens")
    figure.axes[0].set_ylabel("tokens/s")
    figure.axes[0].legend(fontsize="small")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
