"""The SGLang rollout engine: ``protocols.RolloutEngine`` over one or several servers.

Adapters are loaded under a new name for every version, so that nothing cached under an old name
can be reused; at most two versions are loaded, and the server unloads the older one after the last
request that uses it. The file is long because an adapter's whole life on the servers is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import RolloutError, RunError, SyncError
from glm_lora.protocols import (
    BASE,
    AdapterRef,
    AdapterState,
    Capabilities,
    Receipt,
    Request,
    Sample,
)
from glm_lora.rollout.agreement import check_agreement
from glm_lora.rollout.sglang_adapters import ROUTES, AdapterApi, Parcel, Transport, choose_api
from glm_lora.rollout.sglang_client import Completion, SglangClient, server_urls
from glm_lora.rollout.sglang_info import ServerInfo, read_info, read_routes, same_info
from glm_lora.rollout.sglang_samples import check_version, sample_of, sampling
from glm_lora.rollout.sglang_server import (
    START_LIMIT,
    ServerOptions,
    SglangServer,
    start_servers,
)

logger = logging.getLogger(__name__)

MAX_LOADED = 2
"""Adapter versions a server holds at once."""
T = TypeVar("T")


class SglangEngine:
    """Samples, scores and takes adapters; requests are spread over all servers.

    Args:
        clients: One per server; all must serve the same model with the same flags.
        servers: Those that ``close`` is to stop (started by us).
        transport: ``bytes`` sends tensors over HTTP; ``folder`` puts them into shared memory, for
            servers on this machine.
        base_model: Name of the base, written into adapter configurations.

    Raises:
        RolloutError: A server cannot be asked, serves no adapters, or differs from the others.
    """

    def __init__(
        self,
        clients: Sequence[SglangClient],
        *,
        servers: Sequence[SglangServer] = (),
        transport: Transport = "bytes",
        base_model: str = "base",
    ) -> None:
        if not clients:
            raise RolloutError("no SGLang server was named", "at least one URL")
        self._clients = list(clients)
        self._servers = list(servers)
        self._session = uuid.uuid4().hex[:8]
        self._infos: list[ServerInfo] = []
        self._loaded: dict[AdapterRef, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._released = False
        self._spec: ModelSpec | None = None
        try:
            self._api = self._run(self._connect(transport, base_model))
        except BaseException:
            self._stop_loop()
            raise

    def _check_open(self) -> None:
        if not self._thread.is_alive():
            raise RolloutError("the SGLang engine is closed")
        if self._released:
            raise RolloutError("the engine's memory is released", "resume() before requests")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self, transport: Transport, base_model: str) -> AdapterApi:
        apis: list[AdapterApi] = []
        for client in self._clients:
            info = await read_info(client)
            self._infos.append(info)
            same_info(self._clients[0].url, self.info, client.url, info)
            if info.max_loaded is not None and info.max_loaded < MAX_LOADED:
                raise RolloutError(
                    f"{client.url} holds {info.max_loaded} adapters (--max-loaded-loras)",
                    f"at least {MAX_LOADED}: the new version beside the one in use",
                )
            routes = await read_routes(client, ROUTES)
            apis.append(
                choose_api(routes, client.url, info, transport=transport, base_model=base_model)
            )
            if apis[-1].name != apis[0].name:
                raise RolloutError(
                    f"{client.url} takes adapters by {apis[-1].name}, {self._clients[0].url} by "
                    f"{apis[0].name}",
                    "the same on all servers",
                )
            await apis[0].check(client)
        return apis[0]

    @property
    def info(self) -> ServerInfo:
        """What the first server says of itself; the others agree in all that matters."""
        return self._infos[0]

    def require_plugin(self, spec: ModelSpec) -> None:
        """Check that every server that needs this package's plugin runs it on ``spec``'s sites.

        Raises:
            RolloutError: The plugin is not active in a scheduler, or wraps another number of
                modules than the targets have.
        """
        if self._api.needs_plugin:
            for info in self._infos:
                info.check_plugin(spec)
        self._spec = spec

    def capabilities(self) -> Capabilities:
        """What the servers can do, as they said themselves."""
        return self.info.capabilities(self._api.name)

    # Adapters

    def push(self, state: AdapterState, name: str = "policy") -> Receipt:
        """Load ``state`` into every server under a name of its own, in parallel.

        Raises:
            SyncError: A server refused it, received something else, or did not answer. No server
                keeps it then; versions loaded before stay.
            RolloutError: The engine is closed or its memory is released.
        """
        self._check_open()
        start = time.perf_counter()
        ref = state.ref(name)
        if ref in self._loaded:
            raise SyncError(f"{ref} is loaded already", "a new version")
        if state.selection.rank > self.info.max_rank:
            raise SyncError(
                f"the adapter has rank {state.selection.rank}", f"at most {self.info.max_rank}"
            )
        served = f"{name}-{ref.version}-{self._session}"
        with self._api.pack(state, served) as parcel:
            num_tensors = self._run(self._load(parcel, served))
            num_bytes = parcel.num_bytes * len(self._clients)
        self._loaded[ref] = served
        return Receipt(
            ref=ref,
            digest=state.digest,
            num_tensors=num_tensors,
            bytes=num_bytes,
            seconds=time.perf_counter() - start,
        )

    async def _load(self, parcel: Parcel, served: str) -> int:
        while len(self._loaded) >= MAX_LOADED:
            await self._unload(next(iter(self._loaded)))
        results = await asyncio.gather(
            *(self._load_one(client, parcel, served) for client in self._clients),
            return_exceptions=True,
        )
        failures = [r for r in results if isinstance(r, BaseException)]
        if failures:
            await self._forget(served)
            reasons = "; ".join(str(f).rstrip(".") for f in failures)
            raise SyncError(
                f"{len(failures)} of {len(self._clients)} SGLang servers did not take the "
                f"adapter: {reasons}" + self._deaths()
            ) from failures[0]
        return min(count for count in results if isinstance(count, int))

    async def _load_one(self, client: SglangClient, parcel: Parcel, served: str) -> int:
        count = await parcel.deliver(client)
        await client.set_version(served)
        return count

    async def _forget(self, served: str) -> None:
        for client in self._clients:
            with contextlib.suppress(RunError):
                await client.unload_adapter(served)
        with contextlib.suppress(RunError):
            await self._name_newest()

    async def _unload(self, ref: AdapterRef) -> None:
        served = self._loaded.pop(ref)
        await asyncio.gather(*(client.unload_adapter(served) for client in self._clients))

    def discard(self, ref: AdapterRef) -> None:
        """Unload ``ref`` from every server, if it is loaded; the one before is the newest again.

        Raises:
            RolloutError, SyncError: A server did not unload it.
        """
        if ref in self._loaded:
            self._run(self._unload(ref))
            self._run(self._name_newest())

    @property
    def _newest(self) -> str | None:
        """The name under which the newest version is served."""
        return next(reversed(self._loaded.values()), None)

    async def _name_newest(self) -> None:
        if (newest := self._newest) is not None:
            await asyncio.gather(*(client.set_version(newest) for client in self._clients))

    # Requests

    def generate(self, requests: Sequence[Request], adapter: AdapterRef) -> list[Sample]:
        """Sample every request with ``adapter`` (``BASE``: the model without one).

        Seeds count only where the server runs with ``--enable-deterministic-inference``.

        Raises:
            RolloutError: ``adapter`` is not loaded, a server failed, or an answer was made under
                another version than the one asked for.
        """
        served = self._served_name(adapter)
        groups = self._run(self._generate(requests, served))
        return [
            sample_of(request, completion, adapter, self._spec)
            for request, group in zip(requests, groups, strict=True)
            for completion in group
        ]

    def _served_name(self, adapter: AdapterRef) -> str | None:
        self._check_open()
        if adapter == BASE:
            return None
        if adapter not in self._loaded:
            loaded = ", ".join(map(str, self._loaded)) or "none"
            raise RolloutError(f"{adapter} is not loaded", f"one of: {loaded}")
        return self._loaded[adapter]

    async def _generate(
        self, requests: Sequence[Request], served: str | None
    ) -> list[list[Completion]]:
        newest = self._newest

        async def one(index: int, request: Request) -> list[Completion]:
            client = self._clients[index % len(self._clients)]
            completions = await client.generate(
                [request.prompt_ids] * request.n,
                [sampling(request.sampling, i) for i in range(request.n)],
                lora_path=served,
                routed_experts=self.info.routed_experts and self._spec is not None,
            )
            if served is not None and served == newest:
                check_version(completions, served, client.url)
            return completions

        return await self._gather([one(i, r) for i, r in enumerate(requests)])

    def score(self, sequences: Sequence[Sequence[int]], adapter: AdapterRef) -> list[np.ndarray]:
        """Log-probability (temperature 1) of tokens 1.. of each sequence given those before.

        Every server is asked, and all must agree; the answer is the first one's.

        Raises:
            RolloutError: ``adapter`` is not loaded, a server failed, or one differs from the first.
        """
        served = self._served_name(adapter)
        asked = [_score(c, s, served) for c in self._clients for s in sequences]
        scored = self._run(self._gather(asked))
        count = len(sequences)
        answers = [scored[i * count : (i + 1) * count] for i in range(len(self._clients))]
        urls = [client.url for client in self._clients]
        check_agreement(urls, answers, adapter, self.info.dtype)
        return answers[0]

    async def _gather(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        tasks = [asyncio.ensure_future(w) for w in work]
        try:
            return list(await asyncio.gather(*tasks))
        except RolloutError as error:
            deaths = self._deaths()
            raise (RolloutError(error.what + deaths) if deaths else error) from error
        finally:
            for task in tasks:
                task.cancel()

    def alive(self) -> bool:
        """Whether every server that was started here is still running."""
        return all(server.alive() for server in self._servers)

    def _deaths(self) -> str:
        dead = [s for s in self._servers if not s.alive()]
        return "".join(f"\nSGLang at {s.url} has ended; its log ends:\n{s.tail()}" for s in dead)

    # Memory

    def release(self) -> None:
        """Give the servers' device memory back; their weights stay in host memory.

        Raises:
            RolloutError: The servers run without the flags that make this safe.
        """
        if not (self.info.memory_saver and self.info.cpu_backup):
            raise RolloutError(
                "the SGLang server cannot release its memory and come back as it was",
                "--enable-memory-saver and --enable-weights-cpu-backup",
                "Start it with both",
            )
        self._run(self._everywhere("/flush_cache", {}))
        self._run(self._everywhere("/release_memory_occupation", {}))
        self._released = True

    def resume(self) -> None:
        """Take the device memory again; check the base afterwards (``sync.push.check_base``)."""
        if self._released:
            self._run(self._everywhere("/resume_memory_occupation", {}))
            self._released = False

    async def _everywhere(self, path: str, body: Mapping[str, Any]) -> None:
        await asyncio.gather(*(client.post(path, body) for client in self._clients))

    def close(self) -> None:
        """Unload our adapters, close connections, stop the servers we started."""
        if not self._thread.is_alive():
            return
        if not self._servers:
            for ref in list(self._loaded):
                with contextlib.suppress(RunError):
                    self._run(self._unload(ref))
        for client in self._clients:
            self._run(client.close())
        self._stop_loop()
        for server in self._servers:
            server.stop()
        for server in self._servers:
            shutil.rmtree(server.options.work_dir / "model", ignore_errors=True)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)


async def _score(client: SglangClient, sequence: Sequence[int], served: str | None) -> np.ndarray:
    params = [{"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}]
    (answer,) = await client.generate([sequence], params, lora_path=served, prompt_logprobs=True)
    if len(answer.prompt_logprobs) != len(sequence) - 1:
        raise RolloutError(
            f"{client.url} scored {len(answer.prompt_logprobs)} tokens", f"{len(sequence) - 1}"
        )
    return np.asarray(answer.prompt_logprobs, dtype=np.float32)


def start_engine(
    options: Sequence[ServerOptions],
    spec: ModelSpec,
    *,
    transport: Transport = "folder",
    base_model: str = "base",
    limit: float = START_LIMIT,
) -> SglangEngine:
    """Start servers on this machine and connect to them; the plugin must be active in each.

    Raises:
        ConfigError: The interpreter or the checkpoint is not there.
        RolloutError: A server does not start, or serves other projections than this model has.
            Every server is stopped then.
    """
    servers = start_servers(options, limit)
    try:
        engine = SglangEngine(
            [SglangClient(s.url) for s in servers],
            servers=servers,
            transport=transport,
            base_model=base_model,
        )
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return _checked(engine, spec)


def attach_engine(
    urls: Sequence[str], spec: ModelSpec, *, base_model: str = "base", api_key: str = ""
) -> SglangEngine:
    """Connect to running servers (``--rollout-engine-urls``); ``close`` leaves them running.

    Raises:
        ConfigError: A URL is not one, or is named twice.
        RolloutError: A server does not answer, serves no adapters, has no active plugin where it
            needs one, or differs from the others.
    """
    clients = [SglangClient(url, api_key=api_key) for url in server_urls(urls)]
    return _checked(SglangEngine(clients, base_model=base_model), spec)


def _checked(engine: SglangEngine, spec: ModelSpec) -> SglangEngine:
    try:
        engine.require_plugin(spec)
    except RolloutError:
        engine.close()
        raise
    return engine
