"""Rewards that run elsewhere: in worker processes, or behind HTTP.

The built-in math rewards and a user's Python file run in workers. A call that fails or takes too
long gives a score without a value and the reason; it never ends the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from glm_lora.errors import DataError
from glm_lora.rl.answers import is_plain_number
from glm_lora.rl.rewards import Answer, Score
from glm_lora.rl.worker_main import as_reward
from glm_lora.rl.workers import WorkerPool

HTTP_AT_ONCE = 64
"""Requests to an HTTP verifier in flight at the same time."""
_JSON = {"Content-Type": "application/json"}


def _request(answer: Answer) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "response": answer.response,
        "label": answer.label,
        "metadata": dict(answer.metadata),
        "thinking": answer.thinking,
    }


class WorkerReward:
    """A reward whose calls run in worker processes.

    Args:
        arguments: ``("math",)``, ``("dapo",)`` or ``("file", PATH)``.
        limit: Seconds one call may take.
        workers: Processes; by default one per core, at most 8.

    Raises:
        DataError: The verifier cannot be loaded.
    """

    def __init__(self, arguments: Sequence[str], limit: float, workers: int | None = None) -> None:
        self._checks_labels = arguments[0] != "file"
        self._pool = WorkerPool(arguments, limit, workers)

    def check_label(self, label: str) -> str | None:
        """Refuse labels that the math rewards cannot read; a user's file sees any label."""
        if not self._checks_labels or is_plain_number(label.strip()):
            return None
        return self._pool.run([{"check": label}])[0].get("reason") or None

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score per answer; lost calls have none."""
        replies = self._pool.run([_request(answer) for answer in answers])
        return [Score(r.get("value"), r.get("parts", {}), r.get("reason", "")) for r in replies]

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()


def file_reward(path: Path, limit: float, workers: int | None = None) -> WorkerReward:
    """A user's Python file with ``reward(prompt, response, label, metadata) -> float``.

    Raises:
        DataError: The file does not exist or does not define the function.
    """
    if not path.is_file():
        raise DataError(
            f"reward file {path} does not exist",
            "a Python file with reward(prompt, response, label, metadata)",
        )
    return WorkerReward(("file", str(path)), limit, workers)


def _url_problem(url: str) -> str | None:
    """Why no request can be sent to ``url``, whatever listens there; None where one can."""
    try:
        address = httpx.URL(url)
        address.raw_host.decode("ascii").encode("idna")  # as the look-up of the name does
        httpx.Client().close()  # a proxy or certificates that the environment names
    except (httpx.InvalidURL, ValueError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    if not address.host:
        return "it names no host"
    if address.port is not None and not 0 < address.port < 1 << 16:
        return f"there is no port {address.port}"
    return None


class HttpReward:
    """POSTs ``{prompt, response, label, metadata}`` and reads ``{"reward": number}``.

    Args:
        url: Where to post to.
        limit: Seconds one call may take in all.

    Raises:
        DataError: No request can ever be sent to ``url``.
    """

    def __init__(self, url: str, limit: float) -> None:
        problem = _url_problem(url)
        if problem:
            raise DataError(
                f"the reward {url!r} cannot be called: {problem}",
                "an address such as http://127.0.0.1:8000/score",
            )
        self._url = url
        self._limit = limit

    def check_label(self, label: str) -> str | None:
        """Every label is the server's business."""
        return None

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score per answer; a call that fails or is late has none."""
        # A thread of its own, because the caller may already run an event loop.
        with ThreadPoolExecutor(max_workers=1) as executor:
            return executor.submit(asyncio.run, self._all(answers)).result()

    def close(self) -> None:
        """Connections end with each batch."""

    async def _all(self, answers: Sequence[Answer]) -> list[Score]:
        gate = asyncio.Semaphore(HTTP_AT_ONCE)
        async with httpx.AsyncClient(timeout=self._limit) as client:
            return list(await asyncio.gather(*(self._one(client, gate, a) for a in answers)))

    async def _one(
        self, client: httpx.AsyncClient, gate: asyncio.Semaphore, answer: Answer
    ) -> Score:
        body = _request(answer)
        del body["thinking"]
        async with gate:
            try:
                # As for a worker: what JSON has no word for is sent as text.
                text = json.dumps(body, default=str)
                # httpx limits each read; only this limits the whole call.
                async with asyncio.timeout(self._limit):
                    response = await client.post(self._url, content=text, headers=_JSON)
                    response.raise_for_status()
                    return Score(as_reward(response.json()["reward"]))
            except TimeoutError:
                return Score(None, reason=f"{self._url} took longer than {self._limit:g} s")
            except Exception as error:  # a process border: any failure is a missing score
                return Score(None, reason=f"{self._url}: {type(error).__name__}: {error}"[:500])
