"""How an adapter reaches a server: SGLang's own interface, or the streamed one of its RL branch.

Released SGLang takes a whole adapter in one request. The branch ``sglang-miles`` has no such route:
there an adapter is registered, which makes it zero, and its tensors then travel in a weight-update
session and are applied together when the session ends. Which one a server speaks is read from its
routes. Both give every version a name of its own and say how many tensors arrived.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from glm_lora.errors import RolloutError, RunError, SyncError
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.lora.serving import padded_tensors, serving_config
from glm_lora.protocols import AdapterState
from glm_lora.rollout.sglang_client import UNLOAD_ROUTE, VERSION_ROUTE, Refused, SglangClient
from glm_lora.rollout.sglang_info import ServerInfo, read_info
from glm_lora.rollout.sglang_payload import (
    STREAM_ROUTE,
    TENSORS_ROUTE,
    LoadRequest,
    request_with_bytes,
    request_with_folder,
    stream_request,
    tensor_checksums,
)
from glm_lora.rollout.sglang_plugin import DIGEST_KEY

logger = logging.getLogger(__name__)

Transport = Literal["bytes", "folder"]
SHARED_MEMORY = Path("/dev/shm")
REGISTER_ROUTE = "/register_lora_adapter"
BEGIN_ROUTE = "/begin_weight_update"
END_ROUTE = "/end_weight_update"
STREAM_ROUTES = frozenset({REGISTER_ROUTE, BEGIN_ROUTE, STREAM_ROUTE, END_ROUTE})
COMMON_ROUTES = frozenset({UNLOAD_ROUTE, VERSION_ROUTE})
ROUTES = COMMON_ROUTES | STREAM_ROUTES | {TENSORS_ROUTE}
"""Every route that the choice depends on."""


class Parcel(Protocol):
    """One adapter version, packed for any number of servers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the requests that carry tensors, for one server."""
        ...

    async def deliver(self, client: SglangClient) -> int:
        """Load it into one server; the number of tensors that arrived.

        Raises:
            SyncError: The server refused it or received something else.
            RolloutError: The server did not answer.
        """
        ...


class AdapterApi(Protocol):
    """One way to send adapters."""

    name: str
    """Its first route without the slash, as ``Capabilities.api`` shows it."""
    needs_plugin: bool
    """Whether only this package's plugin can account for what a server received."""

    async def check(self, client: SglangClient) -> None:
        """RolloutError unless the server does what this way relies on."""
        ...

    def pack(self, state: AdapterState, served: str) -> AbstractContextManager[Parcel]:
        """``state`` under the name ``served``, ready to be delivered inside the context."""
        ...


def choose_api(
    routes: frozenset[str], url: str, info: ServerInfo, *, transport: Transport, base_model: str
) -> AdapterApi:
    """The interface of the server at ``url``, from those of ``ROUTES`` that it has.

    Raises:
        RolloutError: It has neither; lists what is missing.
    """
    upstream = routes >= COMMON_ROUTES | {TENSORS_ROUTE}
    streamed = routes >= COMMON_ROUTES | STREAM_ROUTES
    if upstream:
        if streamed:
            logger.info("%s has both adapter interfaces; using %s", url, TENSORS_ROUTE)
        return WholeAdapterApi(info, transport, base_model)
    if streamed:
        logger.info("adapters are streamed to %s (%s)", url, REGISTER_ROUTE)
        return StreamedApi(info.tensor_parallel, base_model)
    raise RolloutError(
        f"SGLang {info.version} at {url} has no interface that takes adapters: it lacks "
        + ", ".join(sorted(ROUTES - routes)),
        f"{TENSORS_ROUTE}, or {', '.join(sorted(STREAM_ROUTES))}; with each "
        + " and ".join(sorted(COMMON_ROUTES)),
        "Serve with a version of SGLang that docs/4-sync.md names",
    )


class WholeAdapterApi:
    """SGLang's own interface: one request loads a whole adapter, by bytes or from a folder.

    Args:
        info: What the servers say of themselves.
        transport: ``folder`` puts tensors into shared memory, for servers on this machine.
        base_model: Name of the base, written into adapter configurations.
    """

    name = TENSORS_ROUTE.lstrip("/")
    needs_plugin = True

    def __init__(self, info: ServerInfo, transport: Transport, base_model: str) -> None:
        self._info, self._transport, self._base_model = info, transport, base_model

    async def check(self, client: SglangClient) -> None:
        """Nothing: the plugin's account is compared after every load."""

    @contextlib.contextmanager
    def pack(self, state: AdapterState, served: str) -> Iterator[WholeAdapter]:
        """See ``AdapterApi``."""
        tensors = padded_tensors(state)
        padded = any(tensors[key] is not state.tensors[key] for key in tensors)
        digest = fingerprint_tensors(tensors) if padded else state.digest
        config = serving_config(state.selection, self._base_model)
        verifies = self._info.verifies
        if verifies:
            config[DIGEST_KEY] = digest
        if self._transport == "folder":
            shared = str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
            with tempfile.TemporaryDirectory(dir=shared) as parent:
                folder = Path(parent) / "adapter"
                request = request_with_folder(served, tensors, config, folder)
                yield WholeAdapter(request, digest, verifies)
            return
        copies = self._info.tensor_parallel
        request = request_with_bytes(served, tensors, config, copies=copies, checksums=not verifies)
        yield WholeAdapter(request, digest, verifies)


@dataclass(frozen=True)
class WholeAdapter:
    """One load request, and what the plugin must say of it afterwards."""

    request: LoadRequest
    digest: str
    verifies: bool

    @property
    def num_bytes(self) -> int:
        """See ``Parcel``."""
        return self.request.num_bytes

    async def deliver(self, client: SglangClient) -> int:
        """See ``Parcel``."""
        await client.command(self.request.path, self.request.chunks)
        if not self.verifies:
            return self.request.num_tensors
        return (await read_info(client)).received(self.request.name, self.digest)


class StreamedApi:
    """Register a name, then stream its tensors in a session of its own.

    The session leaves the base alone (``sync_base`` false) and ends with the sha256 of every
    tensor; each rank compares them and applies nothing when one differs, is missing or too many.

    Args:
        tensor_parallel: Ranks of a server; each gets a copy.
        base_model: Name of the base, written into adapter configurations.
    """

    name = REGISTER_ROUTE.lstrip("/")
    needs_plugin = False

    def __init__(self, tensor_parallel: int, base_model: str) -> None:
        self._copies, self._base_model = tensor_parallel, base_model

    async def check(self, client: SglangClient) -> None:
        """Prove that the server compares checksums: it must refuse those of a missing adapter.

        Otherwise a stream that lost a tensor would be served without a word: the registered
        adapter is zero where nothing arrived.
        """
        try:
            await client.command(BEGIN_ROUTE, {"sync_base": False})
        except Refused as error:
            raise RolloutError(
                error.what,
                "a server that no one else is updating",
                "Let the other run end, or restart the server",
            ) from error
        try:
            await client.command(END_ROUTE, _end({"never-streamed": {"no.tensor": "0" * 64}}))
        except Refused:
            return
        raise RolloutError(
            f"{client.url}{END_ROUTE} accepts the checksums of an adapter that was never sent",
            "a server that compares expected_lora_checksums",
            "Use a newer build of the branch, or SGLang with this package's plugin",
        )

    @contextlib.contextmanager
    def pack(self, state: AdapterState, served: str) -> Iterator[StreamedAdapter]:
        """See ``AdapterApi``."""
        if ":" in served:
            raise SyncError(f"the adapter's name {served!r} has a colon", "a name without one")
        tensors = padded_tensors(state)
        yield StreamedAdapter(
            config=serving_config(state.selection, self._base_model),
            request=stream_request(served, tensors, copies=self._copies),
            checksums={served: tensor_checksums(tensors)},
        )


@dataclass(frozen=True)
class StreamedAdapter:
    """The configuration to register, the tensors, and their checksums by adapter and key."""

    config: Mapping[str, Any]
    request: LoadRequest
    checksums: Mapping[str, Mapping[str, str]]

    @property
    def num_bytes(self) -> int:
        """See ``Parcel``."""
        return self.request.num_bytes

    async def deliver(self, client: SglangClient) -> int:
        """See ``Parcel``; a session that was opened is closed whatever happens."""
        # Servers that can keep the name unservable until the session ends do so; on others it
        # answers as the base until then, and nothing asks for it before this returns.
        body = {"lora_name": self.request.name, "config_dict": dict(self.config)}
        await client.command(REGISTER_ROUTE, {**body, "pinned": False, "defer_publish": True})
        try:
            await client.command(BEGIN_ROUTE, {"sync_base": False})
        except RolloutError:
            # No answer: it may still open. A refusal means that a session is open that is not ours.
            await self._abort(client)
            raise
        try:
            await client.command(STREAM_ROUTE, self.request.chunks)
        except RunError:
            await self._abort(client)
            raise
        await client.command(END_ROUTE, _end(self.checksums))
        return self.request.num_tensors

    async def _abort(self, client: SglangClient) -> None:
        # With the checksums a server that knows no abort refuses what did arrive.
        with contextlib.suppress(RunError):
            await client.command(END_ROUTE, {**_end(self.checksums), "abort": True})


def _end(checksums: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    return {"expected_lora_checksums": {k: dict(v) for k, v in checksums.items()}}
