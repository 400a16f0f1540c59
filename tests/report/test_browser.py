"""The report in a real browser (Debian's chromium): it draws, says nothing on the console, and
shows the numbers of metrics.jsonl."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from glm_lora.report.charts import DESIGNS
from glm_lora.report.html import write_comparison, write_report
from tests.report.run_folders import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)
DARK, LIGHT = "0", "1"
PROBE = """<script>
const px = (c) => c.match(/[\\d.]+/g).map(Number);
const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const shade = (c) => px(c).slice(0, 3).map((v) => linear(v / 255))
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const body = getComputedStyle(document.body);
const soft = getComputedStyle(document.querySelector(".soft"));
const ratio = (a, b) => {
  const [x, y] = [shade(a), shade(b)].sort((p, q) => q - p);
  return (x + .05) / (y + .05);
};
const root = document.documentElement;
root.dataset.overflow = root.scrollWidth - window.innerWidth;
root.dataset.wide = window.innerWidth;
root.dataset.page = shade(body.backgroundColor);
root.dataset.text = ratio(body.color, body.backgroundColor);
root.dataset.soft = ratio(soft.color, body.backgroundColor);
</script></body>"""


def browse(page: Path, folder: Path, width: int = 1200, scheme: str = LIGHT) -> tuple[str, str]:
    """The page's DOM after its script has run, and what the browser said on its console."""
    command = [
        str(CHROMIUM), "--headless", "--disable-gpu", "--no-first-run", "--dump-dom",
        "--enable-logging=stderr", f"--window-size={width},900", "--virtual-time-budget=3000",
        f"--user-data-dir={folder}", f"--blink-settings=preferredColorScheme={scheme}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []), page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


class Page(HTMLParser):
    """Tags, table cells and read-outs of a DOM."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.charts: list[str] = []
        self.outputs: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.root: dict[str, str | None] = {}
        self._at = ""
        self._in_metrics = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "html":
            self.root = values
        if tag == "figure":
            self.charts.append(values["data-chart"])
            self.outputs[self.charts[-1]] = []
        if tag == "output":
            self.outputs[self.charts[-1]].append("")
        if tag == "table":
            self._in_metrics = values.get("data-table") == "metrics"
        if tag == "tr" and self._in_metrics:
            self.rows.append([])
        self._at = tag

    def handle_endtag(self, tag):
        self._at = ""

    def handle_data(self, data):
        if self._at == "output":
            self.outputs[self.charts[-1]][-1] += data
        if self._at == "td" and self._in_metrics:
            self.rows[-1].append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("browser") / "run")


@pytest.fixture(scope="module")
def opened(run, tmp_path_factory) -> tuple[str, str]:
    return browse(write_report(run), tmp_path_factory.mktemp("profile"))


def test_the_script_ran_over_every_chart_without_a_word(opened):
    dom, console = opened
    page = Page(dom)
    assert page.charts == [design.key for design in DESIGNS]
    assert page.root["data-ready"] == str(len(DESIGNS))
    assert console == ""
    assert len(re.findall(r"<svg[^>]*role=\"img\"", dom)) == len(DESIGNS)


def test_its_numbers_are_those_of_metrics_jsonl(opened, run):
    page = Page(opened[0])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = {row[0]: row[1:] for row in page.rows if row}
    keys = {key for record in records for key in record} - {"rollout/step"}
    assert set(rows) == keys
    for key in keys:
        values = [float(record[key]) for record in records if key in record]
        finite = [v for v in values if v == v]
        assert list(map(float, rows[key])) == [values[0], values[-1], min(finite), max(finite)]
    last = records[-1]
    for chart, key in (("grad_norm", "train/grad_norm"), ("length", "rollout/response_length")):
        assert float(page.outputs[chart][0]) == pytest.approx(last[key], rel=1e-3), "four digits"
    shown = float(page.outputs["logprob_diff"][0])
    assert shown == pytest.approx(last["train/train_rollout_logprob_abs_diff"], rel=1e-2)


def test_responses_of_the_model_run_no_script(opened):
    assert "<title>glm-lora: run</title>" in opened[0]


@pytest.mark.parametrize(("scheme", "dark"), [(LIGHT, False), (DARK, True)])
def test_it_fits_a_phone_and_is_readable(run, tmp_path, scheme, dark):
    page = tmp_path / "probe.html"
    page.write_text(write_report(run, tmp_path / "r.html").read_text().replace("</body>", PROBE))
    dom, console = browse(page, tmp_path / "profile", width=400, scheme=scheme)
    root = Page(dom).root
    assert console == ""
    assert int(root["data-wide"]) <= 500, "as narrow as the browser allows"
    assert int(root["data-overflow"]) <= 0, "nothing is wider than the screen"
    assert (float(root["data-page"]) < 0.1) is dark
    # WCAG 2.1, 1.4.3: 4.5 to 1 for text.
    assert float(root["data-text"]) >= 4.5 and float(root["data-soft"]) >= 4.5


def test_a_comparison_opens_too(run, tmp_path):
    other = write_run(tmp_path / "other", shift=0.2)
    dom, console = browse(write_comparison([run, other], tmp_path / "c.html"), tmp_path / "profile")
    page = Page(dom)
    assert console == "" and page.root["data-ready"] == str(len(DESIGNS))
    assert len(page.outputs["reward"]) == 2


def test_a_console_message_would_be_seen(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<html><script>nothing.here()</script></html>")
    assert "ReferenceError" in browse(page, tmp_path / "profile")[1]
