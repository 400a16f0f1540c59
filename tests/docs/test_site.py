"""The pages: they build without a dead link, and name only options, files and metrics there are."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import typer.main

from glm_lora.cli import app, main
from tests.conftest import ROOT
from tests.tiny_runs import train

PAGES = sorted((ROOT / "docs").glob("*.md"))
ELSEWHERE = {
    # of SGLang's server and other programs that the pages call
    "--enable-lora", "--lora-paths", "--lora-backend", "--moe-runner-backend", "--model-path",
    "--disable-shared-experts-fusion", "--lora-target-modules", "--peer", "--no-deps",
    "--sglang-NAME", "--sglang-api-key", "--api-key", "--config", "--host",
    "--traceback", "--help", "--shutdown-timeout",
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


def shapes() -> list[tuple[str, str, str]]:
    """Machines, engines and command of the train page's rows that name a GLM model."""
    text = (ROOT / "docs" / "3-train.md").read_text()
    row = r"^\| (\d+ x \d+)[^|]* \| (\d+ of \d+) GPUs \| `glm-lora (train [^`]+)` \|$"
    return re.findall(row, text, re.MULTILINE)


def test_the_train_page_has_every_shape():
    assert [machines for machines, _, _ in shapes()] == ["1 x 8", "3 x 8", "8 x 4", "16 x 4"]


@pytest.mark.parametrize(("machines", "engines", "command"), shapes())
def test_a_shape_on_the_train_page_is_planned_as_it_stands(
    machines, engines, command, tmp_path, capsys, monkeypatch
):
    """Typed literally where nothing is prepared: the plan, with the engines that the page says."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command), "--dry-run"]) == 2, "there is no base"
    captured = capsys.readouterr()
    assert "there is no base" in captured.err
    nodes, gpus = map(int, machines.split(" x "))
    assert len(re.findall(r"^machine \d+: ", captured.out, re.MULTILINE)) == nodes
    assert f"rank 0 of {nodes * gpus}: " in captured.out
    count, size = map(int, engines.split(" of "))
    started = re.findall(r"^  engine (\d+).*on GPU\(s\) ([\d,]+): HTTP", captured.out, re.MULTILINE)
    assert len({number for number, _ in started}) == count
    assert sum(len(held.split(",")) for _, held in started) == count * size


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
