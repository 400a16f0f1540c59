"""A verifier in a process of its own: reads one JSON request per line, writes one JSON reply.

``main(KIND [FILE])`` is started by ``glm_lora.rl.workers`` and killed by it when a call takes too
long. What a user's verifier prints goes to standard error, line by line.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, cast

Reply = dict[str, Any]
Handler = Callable[[Mapping[str, Any]], Reply]

MEMORY_LIMIT = 4 * 2**30
"""Address space of a worker that runs sympy on what a model wrote, in bytes."""
GRACE = 5.0
"""Seconds after the caller's limit at which the worker ends itself, should the caller be gone."""


def math_handler(kind: str) -> Handler:
    """The built-in rewards ``math`` and ``dapo``."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    from glm_lora.rl import math_equal

    grade = {"math": math_equal.grade_math, "dapo": math_equal.grade_dapo}[kind]

    def handle(request: Mapping[str, Any]) -> Reply:
        if "check" in request:
            return {"reason": math_equal.label_problem(request["check"]) or ""}
        value, parts = grade(request["response"], request["label"], request["thinking"])
        return {"value": value, "parts": parts}

    return handle


def file_handler(path: Path) -> Handler:
    """A user's ``reward(prompt, response, label, metadata) -> float``, sync or async."""
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location("glm_lora_user_reward", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    reward = getattr(module, "reward", None)
    if not callable(reward):
        raise AttributeError(
            f"{path} defines no function reward(prompt, response, label, metadata)"
        )
    inspect.signature(reward).bind("prompt", "response", "label", {})

    def handle(request: Mapping[str, Any]) -> Reply:
        value = reward(
            request["prompt"], request["response"], request["label"], request["metadata"]
        )
        if inspect.isawaitable(value):
            value = asyncio.run(_result(value))
        return {"value": as_reward(value)}

    return handle


async def _result(awaitable: Any) -> Any:
    return await awaitable


def as_reward(value: Any) -> float:
    """A verifier's return value as a finite float; TypeError or ValueError says why it is none."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()  # a numpy or torch scalar
    if not isinstance(value, int | float):
        raise TypeError(f"the verifier returned a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("the verifier returned a whole number too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"the verifier returned {number}")
    return number


def serve(handle: Handler, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until the input ends; an exception of the verifier becomes the reply."""
    for line in requests:
        request = json.loads(line)
        # The default action of SIGALRM ends the process even inside C code.
        signal.setitimer(signal.ITIMER_REAL, request["limit"] + GRACE)
        try:
            reply = handle(request)
        except (Exception, SystemExit) as error:  # a process border: any failure is an answer
            reply = {"value": None, "reason": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main(arguments: list[str]) -> int:
    """Load the verifier, say whether that worked, then serve."""
    # Replies keep the real standard output to themselves; prints of a verifier must not mix in.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # A worker is killed in the end, and what it had buffered would be lost.
    cast("TextIOWrapper", sys.stdout).reconfigure(line_buffering=True, errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        kind = arguments[0]
        handle = file_handler(Path(arguments[1])) if kind == "file" else math_handler(kind)
    except (Exception, SystemExit) as error:  # a process border: the caller reports it
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        replies.flush()
        return 1
    replies.write(json.dumps({"ready": True}) + "\n")
    replies.flush()
    serve(handle, sys.stdin, replies)
    return 0
