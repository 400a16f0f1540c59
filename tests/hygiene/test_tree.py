"""What the tree promises its next maintainer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCES = sorted([*(ROOT / "glm_lora").rglob("*.py"), *(ROOT / "launchers").rglob("*.py")])
LONGEST_FILE = 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_and_stays_readable(path: Path):
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    said = ast.get_docstring(ast.parse(text)) or ""
    assert said, "no docstring"
    if text.count("\n") > LONGEST_FILE:
        assert "The file is long because" in said


def test_the_flow_is_on_one_page():
    assert (ROOT / "glm_lora" / "pipeline.py").read_text().count("\n") <= 100


def test_nothing_is_called_utils():
    assert not [p for p in SOURCES if p.stem in ("utils", "helpers", "misc", "common")]
