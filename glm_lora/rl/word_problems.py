r"""Arithmetic word problems made by rule: the data set that ships with the package.

``word_problems.jsonl`` beside this file holds ``make(COUNT, SEED)``. Answers are computed with
exact fractions; each row's metadata holds the expression, so that a reader can check the label.
The texts are this project's own and under its licence. Write the file again with
``python -m glm_lora.rl.word_problems PATH``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

COUNT = 400
SEED = 2025
PATH = Path(__file__).with_suffix(".jsonl")
"""The packaged file."""

INSTRUCTION = (
    "Think step by step. End with a line of the form 'Answer: \\boxed{...}' that holds only the "
    "number, as an integer or a fraction in lowest terms."
)
_NAMES = ("Ada", "Ben", "Chloe", "Dario", "Emi", "Farid", "Greta", "Hugo", "Ines", "Jonas")
_THINGS = ("apples", "stamps", "marbles", "postcards", "shells", "pencils", "tokens", "bolts")

Problem = tuple[str, str]
"""Question, and an expression of integers, + - * / and parentheses that gives the answer."""


def _gains_and_losses(r: random.Random) -> Problem:
    a, b = r.randint(12, 90), r.randint(3, 60)
    c = r.randint(1, a)
    name, thing = r.choice(_NAMES), r.choice(_THINGS)
    text = f"{name} has {a} {thing}, gives {c} of them away and then finds {b} more."
    return f"{text} How many {thing} does {name} have now?", f"{a} - {c} + {b}"


def _packs(r: random.Random) -> Problem:
    packs, each, used = r.randint(3, 15), r.randint(4, 24), r.randint(1, 11)
    name, thing = r.choice(_NAMES), r.choice(_THINGS)
    text = f"{name} buys {packs} packs of {each} {thing} and uses {used} {thing}."
    return f"{text} How many {thing} are left?", f"{packs} * {each} - {used}"


def _sharing(r: random.Random) -> Problem:
    friends, each, rest = r.randint(3, 12), r.randint(4, 30), r.randint(0, 2)
    total = friends * each + rest
    thing = r.choice(_THINGS)
    text = f"{total} {thing} are shared equally among {friends} friends, each getting as many whole"
    return (
        f"{text} {thing} as possible. How many does each friend get?",
        f"({total} - {rest}) / {friends}",
    )


def _two_prices(r: random.Random) -> Problem:
    n, p, m, q = (r.randint(2, 9) for _ in range(4))
    paid = n * p + m * q + r.randint(1, 40)
    text = f"A notebook costs {p} coins and a folder costs {q} coins. {r.choice(_NAMES)} buys {n}"
    return (
        f"{text} notebooks and {m} folders and pays with {paid} coins. What is the change?",
        f"{paid} - ({n} * {p} + {m} * {q})",
    )


def _speed(r: random.Random) -> Problem:
    speed, minutes = r.randint(4, 90), r.choice((10, 15, 20, 30, 40, 45, 50, 75, 90))
    return (
        f"A tram moves at a steady {speed} kilometres per hour. How many kilometres does it cover "
        f"in {minutes} minutes?",
        f"{speed} * {minutes} / 60",
    )


def _tank(r: random.Random) -> Problem:
    inflow = r.randint(8, 30)
    outflow, minutes, start = r.randint(1, inflow - 1), r.randint(3, 25), r.randint(0, 200)
    return (
        f"A tank holds {start} litres. Each minute {inflow} litres flow in and {outflow} litres "
        f"flow out. How many litres does it hold after {minutes} minutes?",
        f"{start} + ({inflow} - {outflow}) * {minutes}",
    )


def _fraction_left(r: random.Random) -> Problem:
    a, b = r.sample(range(2, 10), 2)
    return (
        f"{r.choice(_NAMES)} reads 1/{a} of a book on Monday and 1/{b} of what is left on Tuesday. "
        "Which fraction of the book is still unread?",
        f"(1 - 1 / {a}) * (1 - 1 / {b})",
    )


def _average(r: random.Random) -> Problem:
    values = [r.randint(1, 40) for _ in range(r.choice((3, 4, 5)))]
    listed = ", ".join(map(str, values))
    return (
        f"The daily visitor counts of a small museum were {listed}. What was their average?",
        f"({' + '.join(map(str, values))}) / {len(values)}",
    )


def _percent(r: random.Random) -> Problem:
    price, percent = r.randint(2, 40) * 10, r.choice((5, 10, 15, 20, 25, 30, 40, 60))
    return (
        f"A lamp costs {price} coins. Its price is lowered by {percent} percent. What does it cost "
        "now, in coins?",
        f"{price} * (100 - {percent}) / 100",
    )


def _ages(r: random.Random) -> Problem:
    young, factor, years = r.randint(3, 14), r.randint(2, 5), r.randint(1, 15)
    first, second = r.sample(_NAMES, 2)
    return (
        f"{first} is {young} years old and {second} is {factor} times as old. What will the sum of "
        f"their ages be in {years} years?",
        f"{young} + {factor} * {young} + 2 * {years}",
    )


def _rectangle(r: random.Random) -> Problem:
    length, width, gate = r.randint(5, 40), r.randint(3, 30), r.randint(1, 4)
    return (
        f"A garden is {length} metres long and {width} metres wide. A fence runs all around it "
        f"except for a gate of {gate} metres. How many metres long is the fence?",
        f"2 * ({length} + {width}) - {gate}",
    )


def _below_zero(r: random.Random) -> Problem:
    start, drop, rise = r.randint(-8, 12), r.randint(10, 30), r.randint(1, 9)
    return (
        f"At noon it is {start} degrees. By midnight the temperature falls by {drop} degrees, and "
        f"by morning it rises by {rise} degrees. How many degrees is it in the morning?",
        f"{start} - {drop} + {rise}",
    )


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "gains": _gains_and_losses,
    "packs": _packs,
    "sharing": _sharing,
    "prices": _two_prices,
    "speed": _speed,
    "tank": _tank,
    "fraction": _fraction_left,
    "average": _average,
    "percent": _percent,
    "ages": _ages,
    "fence": _rectangle,
    "temperature": _below_zero,
}


def value_of(expression: str) -> Fraction:
    """The exact value of an expression of integers, ``+ - * /`` and parentheses."""
    import ast

    def visit(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -visit(node.operand)
        assert isinstance(node, ast.BinOp), "only + - * / of integers"
        left, right = visit(node.left), visit(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case _:
                raise AssertionError("only + - * / of integers")

    return visit(ast.parse(expression, mode="eval").body)


def make(count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` different problems, all kinds in turn: rows of prompt, label and metadata."""
    r = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    kinds = list(KINDS.items())
    while len(rows) < count:
        kind, problem = kinds[len(rows) % len(kinds)]
        question, expression = problem(r)
        rows[question] = {
            "prompt": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}],
            "label": str(value_of(expression)),
            "metadata": {"kind": kind, "expression": expression},
        }
    return list(rows.values())


def write(path: Path) -> None:
    """Write the packaged data set to ``path`` as JSONL."""
    lines = [json.dumps(row) + "\n" for row in make(COUNT, SEED)]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else PATH)
