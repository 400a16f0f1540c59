"""One SGLang server over HTTP: requests, adapters, memory. Knows the protocol, decides nothing.

Every request for tokens takes ``lora_path`` as a required argument: a request that forgot its
adapter would be answered by the base without a word. ``None`` asks for the base explicitly.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from glm_lora.errors import ConfigError, RolloutError, SyncError

logger = logging.getLogger(__name__)

UNLOAD_ROUTE = "/unload_lora_adapter"
VERSION_ROUTE = "/update_weight_version"
RETRIES = 3
"""Attempts of one sampling request; the same seed makes a repeated request the same request."""
_RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_PAUSE = 0.5
"""Seconds before the second attempt; doubled each time."""


class Refused(SyncError):
    """A server answered a command with ``success`` false: it is alive and did not do it."""


@dataclass(frozen=True)
class Completion:
    """One answer of ``/generate``."""

    prompt_logprobs: tuple[float, ...]
    """Of prompt tokens 1.. (empty unless asked for)."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    """SGLang's word: stop, length or abort."""
    weight_version: str
    routed_experts: Any = None


def server_urls(texts: Sequence[str]) -> list[str]:
    """The addresses of servers, without a slash at the end.

    Raises:
        ConfigError: One is not ``http://host:port`` (or https, with or without a path), or two
            are the same.
    """
    urls: list[str] = []
    for text in texts:
        expected = "http://HOST:PORT"
        try:
            url = httpx.URL(text.strip())
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{text!r} is no server's URL ({error})", expected) from error
        odd = url.query or url.fragment or not 0 < (url.port or 80) < 65536
        if url.scheme not in ("http", "https") or not url.host or odd:
            raise ConfigError(f"{text!r} is no server's URL", expected)
        if url.userinfo:
            raise ConfigError(
                "a server's URL carries a password", expected, "See --rollout-engine-key-file"
            )
        urls.append(str(url).rstrip("/"))
        if urls.count(urls[-1]) > 1:
            raise ConfigError(f"{urls[-1]} is named twice", "every server once")
    return urls


@dataclass
class SglangClient:
    """Talks to the server at ``url``; all methods are coroutines of one event loop.

    Args:
        url: ``http://host:port``.
        request_limit: Seconds one sampling request may take.
        control_limit: Seconds any other call may take.
        concurrency: Requests in flight at once.
        api_key: Sent as a bearer token when not empty.
    """

    url: str
    request_limit: float = 1800.0
    control_limit: float = 120.0
    concurrency: int = 64
    api_key: str = field(default="", repr=False)
    _http: httpx.AsyncClient | None = field(default=None, repr=False)
    _slots: asyncio.Semaphore | None = field(default=None, repr=False)

    def _client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        if self._http is None or self._slots is None:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            # A proxy from the environment must not see traffic to a server of our own.
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                trust_env=False,
                limits=httpx.Limits(max_connections=self.concurrency + 4),
            )
            self._slots = asyncio.Semaphore(self.concurrency)
        return self._http, self._slots

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def get(self, path: str) -> Any:
        """A GET whose answer is JSON; RolloutError otherwise."""
        http, _ = self._client()
        try:
            response = await http.get(path, timeout=self.control_limit)
        except httpx.HTTPError as error:
            raise RolloutError(f"{self.url}{path} failed: {_said(error)}") from error
        return self._decoded(path, response)

    async def healthy(self) -> bool:
        """Whether the server answers ``/health`` with success."""
        http, _ = self._client()
        try:
            return (await http.get("/health", timeout=20.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def takes_post(self, path: str) -> bool:
        """Whether the server has a route ``path`` for POST, asked without calling it.

        Web servers of SGLang's kind answer OPTIONS on such a route with 405 and what it allows, and
        with 404 where there is none.
        """
        http, _ = self._client()
        try:
            response = await http.request("OPTIONS", path, timeout=self.control_limit)
        except httpx.HTTPError as error:
            raise RolloutError(f"{self.url}{path} failed: {_said(error)}") from error
        return response.status_code == 405 and "POST" in response.headers.get("Allow", "")

    async def post(self, path: str, body: Mapping[str, Any] | Sequence[bytes]) -> Any:
        """A POST that must succeed at the first attempt; RolloutError with the server's words.

        Args:
            path: Route.
            body: A JSON object, or its text in pieces (sent without joining them).
        """
        return self._decoded(path, await self._send(path, body))

    async def command(
        self, path: str, body: Mapping[str, Any] | Sequence[bytes]
    ) -> Mapping[str, Any]:
        """A POST whose answer must say ``success``; arguments as those of ``post``.

        Returns:
            The answer.

        Raises:
            Refused: The server says that it did not do it, and why.
            RolloutError: It did not say either; whether it was done is unknown.
        """
        response = await self._send(path, body)
        answer = _object(response)
        success = answer.get("success")
        if success is True and response.status_code == 200:
            return answer
        if success is False:
            reason = answer.get("error_message") or answer.get("message") or response.text
            raise Refused(f"{self.url}{path} refused: {str(reason)[:500]}")
        raise RolloutError(
            f"{self.url}{path} answered {response.status_code}: {response.text[:500]}",
            "an answer with success true or false",
        )

    async def _send(self, path: str, body: Mapping[str, Any] | Sequence[bytes]) -> httpx.Response:
        http, _ = self._client()
        chunks = [json.dumps(body).encode()] if isinstance(body, Mapping) else body
        headers = {**_JSON, "Content-Length": str(sum(map(len, chunks)))}
        try:
            return await http.post(
                path, content=_stream(chunks), headers=headers, timeout=self.control_limit
            )
        except httpx.HTTPError as error:
            raise RolloutError(f"{self.url}{path} failed: {_said(error)}") from error

    def _decoded(self, path: str, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise RolloutError(
                f"{self.url}{path} answered {response.status_code}: {response.text[:500]}",
                next_step=_ABOUT_KEYS if response.status_code in (401, 403) else "",
            )
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            return response.text

    async def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: Sequence[Mapping[str, Any]],
        *,
        lora_path: str | None,
        prompt_logprobs: bool = False,
        routed_experts: bool = False,
    ) -> list[Completion]:
        """Sample one completion per entry of ``input_ids``, retrying what may be retried.

        Raises:
            RolloutError: The server refused, kept failing, or its answer is not one.
        """
        body = {
            "input_ids": [list(ids) for ids in input_ids],
            "sampling_params": [dict(p) for p in sampling_params],
            "lora_path": [lora_path] * len(input_ids),
            "return_logprob": True,
            "logprob_start_len": 0 if prompt_logprobs else -1,
        }
        if routed_experts:
            body["return_routed_experts"] = True
        answer = await self._post_with_retries("/generate", json.dumps(body).encode())
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != len(input_ids):
            raise RolloutError(
                f"{self.url} returned {len(answers)} completions", f"{len(input_ids)}"
            )
        return [_completion(a, self.url, prompt_logprobs) for a in answers]

    async def _post_with_retries(self, path: str, content: bytes) -> Any:
        http, slots = self._client()
        reason = ""
        for attempt in range(RETRIES):
            if attempt:
                await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
            try:
                async with slots:
                    response = await http.post(
                        path, content=content, headers=_JSON, timeout=self.request_limit
                    )
            except httpx.HTTPError as error:
                reason = _said(error)
            else:
                if response.status_code not in _RETRY_STATUS:
                    return self._decoded(path, response)
                reason = f"status {response.status_code}: {response.text[:300]}"
            logger.warning("%s%s failed (%s), attempt %d", self.url, path, reason, attempt + 1)
        raise RolloutError(
            f"{self.url}{path} failed {RETRIES} times; the last time: {reason}",
            next_step="See the server's log",
        )

    async def unload_adapter(self, name: str) -> None:
        """Unload ``name``; the server waits for the requests that use it."""
        await self.command(UNLOAD_ROUTE, {"lora_name": name})

    async def set_version(self, version: str) -> None:
        """Name the state that answers carry as ``weight_version``; running requests go on."""
        await self.command(VERSION_ROUTE, {"new_version": version, "abort_all_requests": False})


_JSON = {"Content-Type": "application/json"}
_ABOUT_KEYS = (
    "The server asks for its API key: name a file with it (--rollout-engine-key-file); one that "
    "was started with an --admin-api-key lets only that key load adapters"
)


async def _stream(chunks: Sequence[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def _object(response: httpx.Response) -> Mapping[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _said(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__} {error}".strip()


def _completion(answer: Any, url: str, want_prompt: bool) -> Completion:
    try:
        meta = answer["meta_info"]
        output = meta["output_token_logprobs"]
        prompt = meta["input_token_logprobs"][1:] if want_prompt else []
        finish = meta["finish_reason"]
        completion = Completion(
            prompt_logprobs=tuple(float(entry[0]) for entry in prompt),
            token_ids=tuple(int(entry[1]) for entry in output),
            logprobs=tuple(float(entry[0]) for entry in output),
            finish=str(finish["type"]),
            weight_version=str(meta.get("weight_version", "")),
            routed_experts=meta.get("routed_experts"),
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise RolloutError(
            f"{url} sent an answer without {error!r}: {str(answer)[:300]}"
        ) from error
    bad = sum(not math.isfinite(value) for value in completion.logprobs)
    if bad:
        raise RolloutError(
            f"{url} sampled with {bad} of {len(completion.logprobs)} log-probabilities that are "
            "not finite",
            "finite numbers",
            "The server's weights or its adapter are damaged; see its log",
        )
    if completion.finish == "abort":
        logger.warning("%s aborted a request: %s", url, finish.get("message", ""))
    return completion
