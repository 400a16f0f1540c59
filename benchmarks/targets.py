"""How long the front half takes: resolving a selection at full size, and the ``targets`` command.

    python benchmarks/targets.py [--repeat 5] [--json [FILE]]

``resolve_*_ms``: first resolution in a fresh process, GLM-5.3-Flash with its 36,288 routed-expert
sites listed (``list_36784_sites_ms`` is the listing itself); globs are matched in both spellings.
``resolve_expert_pattern_ms`` has an exclude that tells single experts apart, so that every expert's
name is matched. ``targets_*_s``: the whole command, Python's start included. All are medians, with
the CPU time beside the wall time (the two agree on an idle machine). ``torch_imported`` counts
commands that loaded torch. Limits: resolution 100 ms, command 1 s, torch never.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.json_output import add_json, print_json

RESOLVE = """
import sys, time
from glm_lora.arch.projections import all_sites
from glm_lora.arch.spec import FULL
from glm_lora.config import SelectionConfig
from glm_lora.targets.resolve import resolve
config = SelectionConfig(target_modules=sys.argv[1], exclude_modules=sys.argv[2])
def clocks():
    return time.perf_counter(), time.process_time()
start = clocks()
sites = all_sites(FULL)
listed = clocks()
selection = resolve(FULL, "GLM-5.3-Flash", config).selection
done = clocks()
assert len(sites) == 36_784, len(sites)
assert selection.num_sites == 485, selection.num_sites
assert "torch" not in sys.modules
print(*(b - a for a, b in zip(start + listed, listed + done)))
"""
RECIPE = ("attn,mlp", "*.mlp.experts.*,*.self_attn.kv_b_proj")
GLOBS = (
    "*.self_attn.*_proj,*.forget_gate.f_?_proj,*.kv_a_proj_with_mqa,*.mlp.*",
    "*.mlp.experts.*,*.self_attn.kv_b_proj",
)
EXPERT_PATTERN = ("attn,mlp", "*.mlp.experts.*,*.self_attn.kv_b_proj,*.experts.[0-9].*_proj")
COMMAND = "import sys; from glm_lora.cli import main; sys.exit(main())"


def resolve_times(name: str, selection: tuple[str, str], repeat: int) -> dict[str, float]:
    """Median milliseconds, wall and CPU, to list all sites and to resolve."""
    runs = [[1000 * float(x) for x in _run(RESOLVE, *selection).split()] for _ in range(repeat)]
    keys = ("list_36784_sites_ms", "list_36784_sites_cpu_ms", f"{name}_ms", f"{name}_cpu_ms")
    medians = [round(statistics.median(column), 2) for column in zip(*runs, strict=True)]
    return dict(zip(keys, medians, strict=True))


def command_times(name: str, repeat: int, *options: str) -> dict[str, float]:
    """Median seconds, wall and CPU, of ``glm-lora targets`` with ``options``."""
    walls: list[float] = []
    cpus: list[float] = []
    for _ in range(repeat):
        start, before = time.perf_counter(), _children_cpu()
        _run(COMMAND, "targets", "--model-name", "GLM-5.3-Flash", *options)
        walls.append(time.perf_counter() - start)
        cpus.append(_children_cpu() - before)
    medians = {f"{name}_s": statistics.median(walls), f"{name}_cpu_s": statistics.median(cpus)}
    return {key: round(value, 3) for key, value in medians.items()}


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def torch_imported(*options: str) -> int:
    """1 when the command loads torch."""
    code = (
        "import sys\nfrom glm_lora.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    return int(_run(code, "targets", *options).rstrip().endswith("True"))


def _run(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    ).stdout


def figures(repeat: int) -> dict[str, float | int | str]:
    """All figures by name."""
    return {
        **resolve_times("resolve_recipe", RECIPE, repeat),
        **resolve_times("resolve_globs_both_spellings", GLOBS, repeat),
        **resolve_times("resolve_expert_pattern", EXPERT_PATTERN, repeat),
        **command_times("targets_table", repeat),
        **command_times("targets_json", repeat, "--json"),
        **command_times("targets_list", repeat, "--list"),
        "torch_imported": sum(map(torch_imported, ("--json", "--list", "--help"))),
        "repeat": repeat,
        "python": platform.python_version(),
        "cpus": os.cpu_count() or 0,
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=5, help="Runs of each measurement.")
    add_json(parser)
    options = parser.parse_args()
    found = figures(options.repeat)
    for name, value in found.items():
        print(f"{name:34} {value}")
    print_json(options.json, found)


if __name__ == "__main__":
    main()
