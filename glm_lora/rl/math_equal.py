r"""Whether two mathematical answers are equal, by math-verify (LaTeX to sympy).

Nothing here limits time or memory: a hostile answer such as ``2003^{2002^{2001}}`` can take both
without end. Call it only in a worker process that somebody may kill (``glm_lora.rl.workers``).
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from glm_lora.rl.answers import after_thinking, answer_line, is_plain_number, last_box

MAX_ANSWER = 1000
"""Longer answers (characters) are wrong without being looked at."""

_EXTRACT = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;: !]|\{,\}|~| |\\thinspace )\d{3})+(?!\d)")
_SEPARATOR = re.compile(r"\\[,;: !]|\{,\}|~| |\\thinspace ")

for _name in ("math_verify", "latex2sympy2_extended"):
    # They warn that no time limit is set; the worker process has one.
    logging.getLogger(_name).setLevel(logging.CRITICAL)


def grade_math(response: str, label: str, thinking: bool) -> tuple[float, dict[str, float]]:
    r"""The ``math`` reward: 1 when the last ``\boxed{}`` after the thinking equals the label.

    Returns:
        The reward, and the parts ``accuracy`` and ``format`` (a closed box that is not empty).
    """
    answer = last_box(after_thinking(response, thinking))
    right = float(answer is not None and equal(label, answer))
    return right, {"accuracy": right, "format": float(bool(answer))}


def grade_dapo(response: str, label: str, thinking: bool) -> tuple[float, dict[str, float]]:
    """The ``dapo`` reward: 1 when the last ``Answer:`` line equals the label, else -1.

    Yu et al. 2025 (DAPO, arXiv:2503.14476), equation 7.

    Returns:
        The reward, and the parts ``accuracy`` (0 or 1) and ``format`` (a line with an answer).
    """
    answer = answer_line(after_thinking(response, thinking))
    right = answer is not None and equal(label, answer)
    parts = {"accuracy": float(right), "format": float(bool(answer))}
    return (1.0 if right else -1.0), parts


def equal(gold: str, answer: str) -> bool:
    """Whether ``answer`` is the same mathematical object as ``gold``; symmetric up to parsing."""
    gold, answer = _cleaned(gold), _cleaned(answer)
    if not gold or not answer or len(answer) > MAX_ANSWER:
        return False
    if gold == answer:
        return True
    left, right = _parsed(gold), _parsed(answer)
    return bool(left and right) and verify(left, right, timeout_seconds=None)


def label_problem(label: str) -> str | None:
    """Why no answer could ever equal this label, or None."""
    text = _cleaned(label)
    if not text:
        return "the label is empty"
    if len(text) > MAX_ANSWER:
        return f"the label is longer than {MAX_ANSWER} characters"
    if is_plain_number(text) or _parsed(text):
        return None
    return "math-verify cannot read it as a mathematical expression"


def _cleaned(text: str) -> str:
    """The bare expression: box and dollar signs removed, thousands joined, spaces trimmed."""
    text = text.strip()
    inner = last_box(text)
    if inner is not None and text.startswith("\\"):
        text = inner
    text = text.strip().strip("$").strip()
    return _GROUPED.sub(lambda m: _SEPARATOR.sub("", m.group()), text)


def _parsed(text: str) -> list[Any]:
    found = parse(
        rf"\boxed{{{text}}}",
        extraction_config=_EXTRACT,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
    return list(found)
