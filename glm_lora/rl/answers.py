r"""Finding the final answer in what a model wrote: after its thinking, in a box, or on a line.

Only text is looked at here; whether two answers are equal is ``math_equal``'s business. The last
candidate decides: a malformed final box earns nothing from an earlier one.
"""

from __future__ import annotations

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*")
_ANSWER_LINE = re.compile(r"\banswer[\s*_]*:[\s*_]*", re.IGNORECASE)
_PLAIN_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def is_plain_number(text: str) -> bool:
    """Whether a label is a decimal number, which needs no parser of mathematics."""
    return _PLAIN_NUMBER.fullmatch(text) is not None


def after_thinking(response: str, thinking: bool) -> str:
    """The part of a response that answers.

    Args:
        response: Decoded response.
        thinking: Whether the prompt ended inside an open ``<think>``; then a response that never
            closes it has not answered, and the result is empty.
    """
    _, close, tail = response.rpartition(THINK_CLOSE)
    unfinished = THINK_OPEN in tail or (thinking and not close)
    return "" if unfinished else tail


def last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` or ``\fbox{...}``; None without one or if it is open."""
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None or not text.startswith("{", start):
        return None
    depth = 0
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1  # an escaped brace does not count
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position].strip()
        position += 1
    return None


def answer_line(text: str) -> str | None:
    r"""What follows the last ``Answer:``, to the end of its line (DAPO's prompt asks for it).

    Markdown emphasis, dollar signs and a final full stop around it are removed; a box on the line
    is opened. None without such a line or when nothing follows.
    """
    matches = list(_ANSWER_LINE.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :]
    line = rest.split("\n", 1)[0].strip()
    if _BOX.search(line):
        # A box may span lines, so it is read from the whole rest.
        return last_box(rest) or None
    line = line.strip("*_ \t").rstrip(".").strip()
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(line) > len(left) + len(right) and line.startswith(left) and line.endswith(right):
            line = line[len(left) : -len(right)].strip().rstrip(".").strip()
            break
    return line or None
