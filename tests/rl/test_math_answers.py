"""Both math rewards on a table of answers: right, wrong, LaTeX forms and traps."""

from __future__ import annotations

import pytest

from glm_lora.rl.answers import after_thinking, answer_line, last_box
from glm_lora.rl.math_equal import equal, grade_dapo, grade_math, label_problem

RIGHT = [
    ("5", "5"),
    ("-3", "-3"),
    ("+7", "7"),
    ("12", "012"),
    ("5", "5.0"),
    ("1/2", "0.5"),
    ("1/2", r"\frac{1}{2}"),
    (r"\frac12", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", r"\tfrac12"),
    ("-0.5", r"-\frac{1}{2}"),
    ("2/4", "1/2"),
    (r"1\frac12", "1.5"),
    ("1234", "1,234"),
    ("1,234,567", "1234567"),
    ("1234", "1{,}234"),
    ("1234", r"1\,234"),
    ("12345", "12 345"),
    ("1000000", r"10^6"),
    (r"10^{3}", "1000"),
    ("300000000", r"3 \times 10^8"),
    (r"\sqrt{2}", r"2^{1/2}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\pi/2", r"\frac{\pi}{2}"),
    ("x+1", "1+x"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("5", r"5\text{ cm}"),
    ("5", r"\$5"),
    ("45", r"45^\circ"),
    ("50", r"50\%"),
    (r"\text{(A)}", "A"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", r"\{2, 1\}"),
    ("[0,1)", r"\left[0, 1\right)"),
    (r"\infty", r"\infty"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("5040", "7!"),
    ("$8$", "8"),
    (r"\boxed{8}", "8"),
]
WRONG = [
    ("5", "6"),
    ("5", "-5"),
    ("5", "55"),
    ("5", "5.01"),
    ("1/2", "0.51"),
    ("1/3", "0.333"),
    ("1/2", "2"),
    ("1234", "1.234"),
    ("1234", "234"),
    ("3.14", r"\pi"),
    (r"\sqrt{2}", "1.41"),
    ("[1,2]", "(1,2)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("5", "5, 6"),
    ("5", "5 or 6"),
    ("x+1", "x-1"),
    ("x", "y"),
    ("A", "B"),
    ("5", ""),
    ("5", "{}"),
    ("5", "?"),
    ("5", r"\frac{5}{"),
    ("5", "the answer"),
    ("10", "1" * 2000),
    (r"\infty", r"-\infty"),
]


def test_the_table_is_large_enough():
    assert len(RIGHT) + len(WRONG) >= 60


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_right(gold, answer):
    assert equal(gold, answer)
    assert label_problem(gold) is None
    text = f"So it is clear.</think>The result is \\boxed{{{answer}}}."
    assert grade_math(text, gold, True) == (1.0, {"accuracy": 1.0, "format": 1.0})
    for line in (f"Answer: {answer}", f"**Answer:** ${answer}$", f"Answer: \\boxed{{{answer}}}."):
        assert grade_dapo(f"So.</think>Well.\n{line}\n", gold, True)[0] == 1.0, line


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong(gold, answer):
    assert not equal(gold, answer)
    assert grade_math(f"Hm.</think>\\boxed{{{answer}}}", gold, True)[0] == 0.0
    assert grade_dapo(f"Hm.</think>Answer: {answer}", gold, True)[0] == -1.0


MATH_TEXTS = [
    ("no box, no credit: 5", 0, 0),
    (r"\boxed{5}", 1, 1),
    (r"\fbox{5}", 1, 1),
    (r"\boxed {5}", 1, 1),
    (r"$$\boxed{5}$$ and nothing else", 1, 1),
    (r"first \boxed{4} then \boxed{5}", 1, 1),
    (r"first \boxed{5} then \boxed{4}", 0, 1),
    (r"\boxed{5} but the last is open: \boxed{5", 0, 0),
    (r"\boxed{5} but the last is empty: \boxed{}", 0, 0),
    (r"\boxed{5} but the last has no braces: \boxed 5", 0, 0),
    (r"\boxed{\boxed{5}}", 1, 1),
    (r"\boxed{\text{5}}", 1, 1),
    (r"\boxed{5}" + " explained at length." * 200, 1, 1),
    (r"\boxedx{5}", 0, 0),
    ("", 0, 0),
]


@pytest.mark.parametrize(("text", "accuracy", "form"), MATH_TEXTS)
def test_boxes(text, accuracy, form):
    expected = (float(accuracy), {"accuracy": float(accuracy), "format": float(form)})
    assert grade_math(text, "5", False) == expected
    assert grade_math(f"thought \\boxed{{9}}</think>{text}", "5", True) == expected


DAPO_TEXTS = [
    ("5", 0, 0),
    (r"\boxed{5}", 0, 0),
    ("Answer: 5", 1, 1),
    ("answer : 5.", 1, 1),
    ("ANSWER: $5$", 1, 1),
    ("**Answer**: 5", 1, 1),
    ("Final answer: \\(5\\)", 1, 1),
    ("Answer: 4\nAnswer: 5", 1, 1),
    ("Answer: 5\nAnswer: 4", 0, 1),
    ("Answer: 5\nAnswer:", 0, 0),
    ("Answer:\n5", 1, 1),
    ("Answer: 5\n" + "That follows from the above. " * 20, 1, 1),
    ("Answer: $$5$$", 1, 1),
    ("Answer: \\boxed{5", 0, 0),
    ("Answer: 5 or 6", 0, 1),
    ("Answers: 5", 0, 0),
    ("", 0, 0),
]


@pytest.mark.parametrize(("text", "accuracy", "form"), DAPO_TEXTS)
def test_answer_lines(text, accuracy, form):
    value = 1.0 if accuracy else -1.0
    expected = (value, {"accuracy": float(accuracy), "format": float(form)})
    assert grade_dapo(text, "5", False) == expected


@pytest.mark.parametrize(
    ("response", "thinking", "answer"),
    [
        ("so </think>the answer", True, "the answer"),
        ("<think>so</think>the answer", False, "the answer"),
        ("a </think> b </think>c", True, "c"),
        ("a</think>b<think>opened again \\boxed{5}", True, ""),
        ("never closed \\boxed{5}", True, ""),
        ("<think>opened by itself \\boxed{5}", False, ""),
        ("no thinking at all", False, "no thinking at all"),
    ],
)
def test_only_what_follows_the_thinking_counts(response, thinking, answer):
    assert after_thinking(response, thinking) == answer


def test_box_content_is_balanced():
    assert last_box(r"\boxed{\frac{1}{2}} {") == r"\frac{1}{2}"
    assert last_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_box(r"\boxed{a \} b}") == r"a \} b"
    assert last_box("no box") is None
    assert answer_line("no line") is None


@pytest.mark.parametrize("label", ["", "  ", "$$", "\\boxed{}", "x" * 1001])
def test_labels_that_nothing_could_equal(label):
    assert label_problem(label)
    assert not equal(label, label)
