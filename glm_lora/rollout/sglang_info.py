"""What an SGLang server says of itself: read once before the first step, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import RolloutError, SyncError
from glm_lora.protocols import LOGPROB_LIMITS, Capabilities
from glm_lora.rollout.sglang_client import SglangClient
from glm_lora.rollout.sglang_plugin import REPORT_KEY
from glm_lora.rollout.sglang_plugin.widths import PARTS, module_names


@dataclass(frozen=True)
class ServerInfo:
    """One server's account of itself."""

    version: str
    dtype: str
    max_rank: int
    targets: frozenset[str]
    """Leaf names of adaptable projections."""
    tensor_parallel: int
    max_loaded: int | None
    """Adapters the server holds at once (``--max-loaded-loras``); None: no limit."""
    memory_saver: bool
    cpu_backup: bool
    routed_experts: bool
    plugin: Mapping[str, Any]
    """The plugin's report from inside the scheduler; empty where it is not active."""

    @property
    def verifies(self) -> bool:
        """Whether the plugin checks and accounts for what this server receives."""
        return bool(self.plugin.get("prepared"))

    def capabilities(self, api: str) -> Capabilities:
        """The record the loop works with; ``api`` names the chosen adapter interface."""
        return Capabilities(
            engine="sglang",
            version=self.version,
            max_rank=self.max_rank,
            target_leaves=self.targets,
            dtype=self.dtype,
            routed_experts=self.routed_experts,
            api=api,
        )

    def check_plugin(self, spec: ModelSpec) -> None:
        """RolloutError unless the plugin serves every targeted module of a model of ``spec``."""
        if not self.verifies:
            raise RolloutError(
                f"the glm-lora plugin is not active in SGLang {self.version}",
                "its report in /server_info",
                "Install this package into SGLang's environment: pip install --no-deps glm-lora",
            )
        targeted = set(self.plugin.get("target_modules", ()))
        expected = sum(n.rsplit(".", 1)[-1] in targeted for n in module_names(spec))
        if self.plugin.get("modules") != expected:
            raise RolloutError(
                f"SGLang wraps {self.plugin.get('modules')} modules with LoRA", str(expected)
            )

    def received(self, name: str, digest: str) -> int:
        """Number of tensors held for ``name``; SyncError unless they have ``digest``."""
        account = self.plugin.get("adapters", {}).get(name)
        if account is None:
            raise SyncError(f"the server does not list adapter {name} after loading it")
        if account.get("digest") != digest:
            raise SyncError(
                f"the server received digest {str(account.get('digest'))[:16]}", digest[:16]
            )
        return int(account.get("num_tensors", 0))


async def read_info(client: SglangClient) -> ServerInfo:
    """Ask ``client``'s server what it is.

    Raises:
        RolloutError: No answer, no adapters enabled, or an answer without the fields needed.
    """
    data = await client.get("/server_info")
    try:
        states = data.get("internal_states") or [{}]
        merged: dict[str, Any] = {**data, **states[0]}
        if not merged.get("enable_lora"):
            raise RolloutError(
                f"SGLang at {client.url} serves no adapters", "a server with --enable-lora"
            )
        targets = merged.get("lora_target_modules") or ()
        names = [targets] if isinstance(targets, str) else sorted(targets)
        dtype = str(merged["dtype"]).removeprefix("torch.").replace("auto", "bfloat16")
        plugin = states[0].get(REPORT_KEY)
        if dtype not in LOGPROB_LIMITS:
            raise RolloutError(
                f"SGLang at {client.url} computes in {dtype}",
                "one of " + ", ".join(LOGPROB_LIMITS),
                "Start it with --dtype",
            )
        limit = merged.get("max_loaded_loras")
        return ServerInfo(
            version=str(data["version"]),
            dtype=dtype,
            max_rank=int(merged["max_lora_rank"]),
            targets=frozenset(leaf for n in names for leaf in PARTS.get(n, (n,))),
            tensor_parallel=int(merged.get("tp_size", 1)),
            max_loaded=None if limit is None else int(limit),
            memory_saver=bool(merged.get("enable_memory_saver")),
            cpu_backup=bool(merged.get("enable_weights_cpu_backup")),
            routed_experts=bool(merged.get("enable_return_routed_experts")),
            plugin=plugin if isinstance(plugin, dict) else {},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"{client.url}/server_info lacks {error!r}", "the answer of an SGLang server"
        ) from error


async def read_routes(client: SglangClient, wanted: Iterable[str]) -> frozenset[str]:
    """Which of the routes ``wanted`` the server takes a POST on.

    Its own description (``/openapi.json``) says so; a server that publishes none is asked route by
    route, without calling any.

    Raises:
        RolloutError: The server does not answer.
    """
    try:
        paths = (await client.get("/openapi.json"))["paths"]
        return frozenset(path for path in wanted if "post" in paths.get(path, ()))
    except (RolloutError, AttributeError, KeyError, TypeError):
        return frozenset([path for path in wanted if await client.takes_post(path)])


_ALIKE = (
    "version",
    "dtype",
    "max_rank",
    "targets",
    "tensor_parallel",
    "memory_saver",
    "cpu_backup",
    "routed_experts",
    "verifies",
)


def same_info(first_url: str, first: ServerInfo, url: str, info: ServerInfo) -> None:
    """RolloutError unless two servers agree on everything that pushes and samples depend on."""
    for what in _ALIKE:
        if getattr(first, what) != getattr(info, what):
            raise RolloutError(
                f"{what} is {getattr(info, what)} at {url}, {getattr(first, what)} at {first_url}",
                "the same on all servers",
            )
