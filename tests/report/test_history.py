"""How a run ended, as its events tell."""

from __future__ import annotations

import json

from glm_lora.report.history import EVENTS, RunHistory


def test_an_output_that_was_closed_is_named_and_not_the_exit_it_leads_to(tmp_path):
    try:
        try:
            raise BrokenPipeError(32, "Broken pipe")
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 - as the console does, without a cause
    except SystemExit as error:
        RunHistory(tmp_path).ended(error)
    (event,) = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert event["event"] == "failed" and event["error"] == "BrokenPipeError"
    assert "Broken pipe" in event["text"]
