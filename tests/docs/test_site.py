"""The pages: they build without a dead link, and name only options, files and metrics there are."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from glm_lora.arch.spec import builtin
from glm_lora.cli import app
from glm_lora.model.plan import check_topology
from glm_lora.settings import resolve_train
from tests.conftest import ROOT
from tests.tiny_runs import train

PAGES = sorted((ROOT / "docs").glob("*.md"))
ELSEWHERE = {
    # of SGLang's server and other programs that the pages call
    "--enable-lora", "--lora-paths", "--lora-backend", "--moe-runner-backend", "--model-path",
    "--disable-shared-experts-fusion", "--lora-target-modules", "--peer", "--no-deps",
    "--sglang-NAME", "--sglang-api-key", "--api-key", "--config", "--host",
    "--traceback", "--help",
}  # fmt: skip


def options() -> set[str]:
    found = set()
    for command in typer.main.get_group(app).commands.values():
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                found |= {*parameter.opts, *parameter.secondary_opts}
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.name)
def test_every_option_that_a_page_names_exists(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text()))
    assert named <= options() | ELSEWHERE


def test_every_shape_on_the_train_page_fits_the_model():
    text = (ROOT / "docs" / "3-train.md").read_text()
    commands = re.findall(r"`glm-lora (train --model-name GLM[^`]+)`", text)
    assert len(commands) == 3
    for command in commands:
        given = dict(re.findall(r"--([\w-]+) (\S+)", command))
        parallel = {
            k.replace("-", "_"): int(v) for k, v in given.items() if k.endswith("parallel-size")
        }
        values = {
            "model_name": given["model-name"],
            "num_nodes": int(given["num-nodes"]),
            "num_gpus_per_node": int(given["num-gpus-per-node"]),
            "parallel": parallel,
        }
        config = resolve_train(values, models=Path("m"), ckpts=Path("c"), data=Path("d"))
        check_topology(builtin(config.model_name), config.parallel, config.world_size)


def test_every_metric_that_a_page_names_is_written(tiny_root, tmp_path):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "1") == 0
    written = set(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]))
    written |= {"time/save", "time/save_wait", "time/eval"}  # of rollouts after which one was due
    for page in PAGES:
        pattern = r"\b(?:rollout|train|sync|time)/[a-z_]+\b(?![/.*])"
        named = set(re.findall(rf"[`\"]({pattern})", page.read_text()))
        assert named <= written, page.name


def test_links_of_the_readme_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name}: {target}"


def test_when_it_breaks_has_every_part_of_every_entry():
    text = (ROOT / "docs" / "when-it-breaks.md").read_text()
    entries = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(entries) >= 25
    for entry in entries:
        for part in ("* **Symptom.** ", "* **Cause.** ", "* **Show it.** ", "* **Met in** [", "`"):
            assert part in entry, entry.splitlines()[0]


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="pip install 'glm-lora[docs]'"
)
def test_the_site_builds_strictly_and_the_reference_is_complete(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference" / "cli" / "index.html").read_text()
    missing = {name for name in options() if name.startswith("--") and name not in page}
    assert missing <= {"--help"}
    config = (tmp_path / "reference" / "config" / "index.html").read_text()
    assert "drift_check_interval" in config and "updates_per_rollout" in config
    python = (tmp_path / "reference" / "python" / "index.html").read_text()
    assert "resolve_targets" in python and "load_adapter" in python
    for html in tmp_path.rglob("index.html"):
        fonts = re.findall(r"fonts\.g\w+\.com", html.read_text())
        assert not fonts, "the site loads no fonts from elsewhere"
