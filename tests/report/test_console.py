"""What is said while a run goes on, for people and for machines."""

import io
import json

from rich.console import Console

from glm_lora.report.console import ConsoleListener, JsonListener
from glm_lora.report.sinks import JsonlSink
from tests.tiny_runs import train

METRICS = {"rollout/raw_reward": 0.5, "train/grad_norm": float("nan"), "time/rollout": 1.25}


def test_without_a_terminal_one_plain_line_per_rollout():
    text = io.StringIO()
    with ConsoleListener(Console(file=text, force_terminal=False), 0, 2) as listener:
        listener.phase("sample")
        listener.rollout(0, METRICS)
        listener.note("[bold]not markup[/bold]")
    lines = text.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in text.getvalue()
    assert lines[1] == "[bold]not markup[/bold]"
    assert lines[0] == "rollout    0  reward 0.500  grad norm nan  s 1.25"


def test_json_lines_hold_what_metrics_jsonl_holds(tmp_path):
    lines: list[str] = []
    listener = JsonListener(lines.append)
    listener.phase("train")
    listener.rollout(3, METRICS)
    listener.note("a\nb")
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["phase", "rollout", "note"]
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(3, METRICS)
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert {"rollout/step": 3, **events[1]["metrics"]} == written


def test_the_command_prints_nothing_but_json(tiny_root, tmp_path, capfd):
    run = tmp_path / "run"
    assert train(tiny_root, run, "--num-rollout", "2", "--log-format", "json") == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [e["step"] for e in events if e["event"] == "rollout"] == [0, 1]
    assert events[-1] == {"event": "finished", "run_dir": str(run)}
    assert train(tiny_root, run, "--log-format", "yaml") == 2


def test_what_ends_a_run_is_an_event_too(tiny_root, tmp_path, capfd):
    run = tmp_path / "run"
    options = ["--num-rollout", "1", "--log-format", "json"]
    assert train(tiny_root, run, *options) == 0
    capfd.readouterr()
    assert train(tiny_root, run, *options) == 2
    told = capfd.readouterr()
    (event,) = [json.loads(line) for line in told.out.splitlines()]
    assert event["event"] == "failed" and event["error"] == "ConfigError"
    assert str(run) in event["what"] and "--resume" in event["expected"] + event["next_step"]
    assert event["what"].split()[0] in told.err, "people find it where they look for it"
