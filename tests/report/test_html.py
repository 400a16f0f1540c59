"""The report's numbers, texts and files; ``test_browser.py`` opens it in a browser."""

import json
import math
import os
import re
import shutil
import subprocess

import pytest

from glm_lora.cli import main
from glm_lora.errors import ConfigError, RunError
from glm_lora.report.charts import DESIGNS, Chart, Line, charts_of, compared_charts
from glm_lora.report.history import TEXT_KEPT, RunHistory, Scored, shorten
from glm_lora.report.html import write_comparison, write_report
from glm_lora.report.run_data import load_run, read_lines
from glm_lora.report.svg import HEIGHT, WIDTH, short, svg, thin, ticks, x_scale, y_scale
from glm_lora.report.watch import watch
from tests.report.run_folders import NASTY, write_run
from tests.support import small_disk, words
from tests.tiny_runs import train


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_every_chart_is_there_and_drawn_twice(run):
    path = write_report(run)
    page = path.read_text()
    assert re.findall(r'data-chart="(\w+)"', page) == [design.key for design in DESIGNS]
    for design in DESIGNS:
        assert (run / "report" / f"{design.key}.png").read_bytes()[:4] == b"\x89PNG"


def test_charts_hold_the_values_of_metrics_jsonl(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    charts = {chart.key: chart for chart in charts_of(load_run(run))}
    rewards = charts["reward"].lines[0].values
    assert math.isnan(rewards[3]) and records[3]["rollout/raw_reward"] == "NaN"
    expected = [r["rollout/raw_reward"] for r in records]
    assert [v for v in rewards if math.isfinite(v)] == expected[:3] + expected[4:]
    assert charts["reward"].lines[1].steps == (1, 3, 5), "evaluation points where they were made"
    assert charts["tokens"].lines[1].values == tuple(
        r["train/tokens"] / r["time/train"] for r in records
    )
    assert charts["memory"].lines[0].values == (1.5,) * 6
    assert [line.label for line in charts["time"].lines] == ["rollout", "train", "sync"]
    assert charts["grad_norm"].healthy == (1e-8, 10.0)
    assert charts["reward"].not_finite == 1


def test_the_drawn_curve_gives_the_numbers_back(run):
    (chart,) = [c for c in charts_of(load_run(run)) if c.key == "length"]
    x, y = x_scale(chart), y_scale(chart)
    path = re.findall(r'class="line c0" d="M([^"]+)"', svg(chart))[0]
    for point, step, value in zip(
        path.split("L"), chart.lines[0].steps, chart.lines[0].values, strict=True
    ):
        at_x, at_y = map(float, point.split(","))
        back = y.low + (at_y - y.start) / (y.end - y.start) * (y.high - y.low)
        assert abs(back - value) < 0.01 * (y.high - y.low), "coordinates have two decimals"
        assert at_x == pytest.approx(x(step), abs=0.01)


def test_a_gap_where_a_value_is_not_finite():
    chart = Chart("k", "t", "", (Line("a", (0, 1, 2, 3), (1.0, math.nan, 2.0, math.inf)),))
    (path,) = re.findall(r'class="line c0" d="([^"]*)"', svg(chart))
    assert path.count("M") == 2, "two stretches of one point each"
    assert svg(chart).count("<circle") == 2, "which would be invisible as paths"


@pytest.mark.parametrize(
    "values", [(0.0,), (5.0, 5.0), (-1.0, 1.0), (math.nan,), (1e-12, 1e9), (math.inf, 1.0)]
)
@pytest.mark.parametrize("log", [False, True])
def test_any_values_stay_inside_of_the_picture(values, log):
    chart = Chart("k", "t", "", (Line("a", tuple(range(len(values))), values),), log=log)
    drawn = svg(chart)
    assert "nan" not in drawn and "inf" not in drawn.replace("infinity", "")
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", "".join(re.findall(r' d="([^"]*)"', drawn))):
        assert 0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT
    assert len(ticks(y_scale(chart))) >= 2


def test_long_curves_keep_their_extremes():
    points = [(i, math.sin(i / 50) + (9 if i == 4321 else 0)) for i in range(20_000)]
    kept = thin(points)
    assert len(kept) <= 900
    assert max(kept, key=lambda p: p[1])[0] == 4321
    assert set(kept) <= set(points)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0068, "0.0068"), (1.5e-7, "1.5e-7"), (65955840.0, "6.6e7"), (1234.5, "1,234")],
)
def test_numbers_for_people(value, text):
    assert short(value) == text


def test_gates_say_what_left_its_band_and_when(run):
    page = write_report(run).read_text()
    gates = page[page.index("<h2>Gates") : page.index("<h2>Responses")]
    assert "train/grad_norm" in gates and "1 of 6 rollouts, 3 to 3" in gates
    assert "55 in rollout 3; healthy is 1e-08 to 10" in gates
    assert "train/ppo_kl" not in gates
    RunHistory(run).ended(RunError("the engine is gone", "an engine"))
    page = write_report(run).read_text()
    assert "the engine is gone; expected an engine." in page and "failed" in page


def test_text_of_the_run_cannot_become_markup(run):
    page = write_report(run).read_text()
    assert NASTY not in page
    assert "&lt;/script&gt;" in page
    assert page.count("<script") == 2 and page.count("</script>") == 2


def test_the_page_loads_nothing(run):
    page = write_report(run).read_text()
    assert "default-src 'none'" in page
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", page)


def test_selection_configuration_versions_and_base(run):
    page = write_report(run).read_text()
    assert "43 projections, 41,056 parameters" in page
    assert "<td>optimizer.lr</td>" in page and "f" * 64 in page
    for what in ("megatron-core", "transformers", "embedded 1"):
        assert what in page


def test_selection_without_the_model(run):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('"tiny"', '"gone"'))
    rows = load_run(run).selection
    assert sum(row.count for row in rows) == 43 and {row.parameters for row in rows} == {None}


def test_samples_keep_the_best_and_the_worst_of_the_widest_groups(tmp_path):
    history = RunHistory(tmp_path)
    wide = [Scored("wide", "", str(r), r, 1, "stop") for r in (0.0, -2.0, 3.0)]
    same = [Scored("same", "", "x", 1.0, 1, "stop")] * 4
    medium = [Scored("medium", "", "y" * 10_000, r, 1, "stop") for r in (0.0, 1.0)]
    history.samples(7, [same, medium, [], wide])
    rows = read_lines(tmp_path / "samples.jsonl")
    assert [row["prompt"] for row in rows] == ["wide", "medium"]
    assert (rows[0]["best"]["reward"], rows[0]["worst"]["reward"]) == (3.0, -2.0)
    assert len(rows[1]["best"]["text"]) < TEXT_KEPT + 60
    history.started(7)
    assert read_lines(tmp_path / "samples.jsonl") == [], "rollout 7 will be sampled again"


def test_shorten_keeps_both_ends():
    text = "a" * 5000 + "b" * 5000
    assert shorten(text).startswith("a" * 1000) and shorten(text).endswith("b" * 1000)
    assert "8000 characters" in shorten(text)
    assert shorten("short") == "short"


def test_a_run_that_just_began(tmp_path):
    run = write_run(tmp_path / "run", rollouts=0)
    assert "No rollout is finished yet" in write_report(run).read_text()


def test_a_line_that_is_being_written_is_left_out_and_a_bad_one_is_named(run):
    metrics = run / "metrics.jsonl"
    with metrics.open("a") as stream:
        stream.write('{"rollout/step": 6, "a"')
    assert len(load_run(run).records) == 6
    metrics.write_text('{"rollout/step": 0}\nnonsense\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl line 2 is not valid JSON"):
        load_run(run)


def test_compare_draws_one_line_per_run_and_lists_what_differs(tmp_path):
    runs = [
        write_run(tmp_path / n / "run", shift=s, lr=lr)
        for n, s, lr in (("a", 0, 0.1), ("b", 1, 0.2))
    ]
    charts = compared_charts([load_run(path, path.parent.name) for path in runs])
    assert [line.label for line in charts[0].lines] == ["a", "b"]
    assert charts[0].lines[1].values[0] == 1.3
    (total,) = [c for c in charts if c.key == "time"]
    assert total.lines[0].values[2] == 0.5 + 3.25 + 0.25
    page = write_comparison(runs, tmp_path / "compare.html").read_text()
    assert "a/run" in page and "b/run" in page, "as many parents as it takes"
    assert "<td>optimizer.lr</td>" in page and "<td>seed</td>" not in page
    assert (tmp_path / "compare-png" / "reward.png").exists()


def test_watch_writes_when_something_is_new_and_stops_at_the_end(run):
    events = run / "events.jsonl"
    finished = events.read_text().splitlines(keepends=True)
    events.write_text(finished[0])  # running: this process started it and it has no end yet
    written, pages = [], []

    def wrote(path):
        written.append(path)
        pages.append(path.read_text())

    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            events.write_text("".join(finished))

    watch(run, None, 5, wrote, sleep)
    assert len(naps) == 3 and len(written) == 2, (
        "once at first, not while nothing is new, at the end"
    )
    assert 'http-equiv="refresh" content="5"' in pages[0]
    assert 'http-equiv="refresh"' not in pages[1]


def test_a_run_whose_process_died_is_not_running(run):
    events = run / "events.jsonl"
    start = json.loads(events.read_text().splitlines()[0])
    events.write_text(json.dumps(start | {"pid": 2**22 + 1}) + "\n")
    assert not load_run(run).running


def test_the_command(run, tmp_path, capsys):
    assert main(["report", "--run", str(run), "--output", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").exists() and (tmp_path / "r-png" / "reward.png").exists()
    assert (
        main(["report", "--compare", str(run), str(run), "--output", str(tmp_path / "c.html")]) == 0
    )
    assert "run (2)" in (tmp_path / "c.html").read_text()
    for wrong in (
        ["report"],
        ["report", "--compare", str(run)],
        ["report", "--run", str(tmp_path)],
    ):
        assert main(wrong) == 2
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_report(tmp_path)


def test_a_run_leaves_its_report(tiny_root, tmp_path):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "2") == 0
    data = load_run(run)
    assert data.end["event"] == "finished" and not data.running
    assert data.started["versions"]["python"] and "transformers" in data.started["engine"]
    assert {row["rollout/step"] for row in data.samples} == {0, 1}
    assert {chart.key for chart in charts_of(data)} == {design.key for design in DESIGNS}
    page = (run / "report.html").read_text()
    assert "finished" in page and data.base["fingerprint"] in page
    assert (run / "report" / "reward.png").exists()


def test_a_run_that_went_wrong_leaves_its_report_too(tiny_root, tmp_path):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "2", "--logprob-diff-limit", "1e-12") == 1
    page = (run / "report.html").read_text()
    assert "trainer and engine differ" in page and ">failed" in page


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_report_that_cannot_be_written(run, tmp_path, capsys, wide_errors):
    """A disk without room for the page, one without room for all PNGs, and one to read only."""
    for size in ("16k", "256k", "32m"):
        with small_disk(tmp_path / f"disk{size}", f"size={size}") as disk:
            other = shutil.copytree(run, disk / "run") if size == "32m" else run
            read_only = size == "32m"
            if read_only:
                subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            reason = "Read-only file system" if read_only else "No space left on device"
            for options in (
                ["--run", str(other)] if read_only else ["--run", str(run)],
                ["--compare", str(run), str(other)],
            ):
                if not (read_only and options[0] == "--run"):
                    options += ["--output", str(disk / "x" / "page.html")]
                assert main(["report", *options]) == 2, (size, options)
                said = words(capsys.readouterr().err)
                assert f"cannot be written ({reason}" in said and "--output" in said, said
                assert not list(disk.rglob("*.tmp*"))
                for picture in disk.rglob("*.png"):
                    assert picture.read_bytes()[-8:-4] == b"IEND", f"{picture} is not whole"
