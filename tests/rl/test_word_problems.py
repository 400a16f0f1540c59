"""The packaged data set: made by its script, with labels that another evaluation confirms."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import sympy

from glm_lora.rl import word_problems
from glm_lora.rl.data import load_prompts
from glm_lora.rl.math_equal import grade_dapo, grade_math


def rows():
    return [json.loads(line) for line in word_problems.PATH.read_text().splitlines()]


def test_the_file_is_what_the_script_makes(tmp_path):
    word_problems.write(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == word_problems.PATH.read_bytes()


def test_labels_are_the_values_of_the_expressions():
    for row in rows():
        expected = sympy.sympify(row["metadata"]["expression"], rational=True)
        assert Fraction(row["label"]) == Fraction(int(expected.p), int(expected.q)), row


def test_the_rows_are_varied_and_self_contained():
    all_rows = rows()
    assert len(all_rows) == word_problems.COUNT >= 300
    assert len({row["prompt"][0]["content"] for row in all_rows}) == len(all_rows)
    kinds = Counter(row["metadata"]["kind"] for row in all_rows)
    assert set(kinds) == set(word_problems.KINDS) and min(kinds.values()) >= 20
    assert len({row["label"] for row in all_rows}) > 100
    assert any("/" in row["label"] for row in all_rows)
    for row in all_rows:
        numbers = [part for part in row["metadata"]["expression"].split() if part.isdigit()]
        missing = [n for n in numbers if n not in row["prompt"][0]["content"]]
        # Constants of the calculation (60 minutes, 100 percent, twice) and the remainder.
        assert len(missing) <= 2, row


def test_it_loads_by_name_and_both_math_rewards_accept_its_labels():
    data = load_prompts(["word-problems"], lambda prompt: [1], skip_bad_rows=False)
    assert len(data) == word_problems.COUNT and not data.bad_rows
    weighted = load_prompts(["word-problems@2"], lambda prompt: [1])
    assert weighted.files[0].weight == 2
    for row in rows()[:40]:
        text = f"so</think>Answer: \\boxed{{{row['label']}}}"
        assert grade_math(text, row["label"], True)[0] == 1.0
        assert grade_dapo(text, row["label"], True)[0] == 1.0
