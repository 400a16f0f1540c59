"""``--json [FILE]``, an option of every benchmark: one JSON object, printed last, kept in FILE."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_PRINT_ONLY = Path("-")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``; its value is for ``save_json`` and ``print_json``."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=_PRINT_ONLY,
        type=Path,
        metavar="FILE",
        help="print one JSON object last, and write it to FILE",
    )


def save_json(option: Path | None, figures: dict[str, Any]) -> None:
    """Write ``figures`` into the file that ``--json`` named, if it named one."""
    if option and option != _PRINT_ONLY:
        option.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def print_json(option: Path | None, figures: dict[str, Any]) -> None:
    """Write ``figures`` and print them as one line, if ``--json`` was given; the last output."""
    save_json(option, figures)
    if option:
        print(json.dumps(figures), flush=True)
