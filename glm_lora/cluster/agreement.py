"""All processes of a run must be the same program doing the same thing: found at the start."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import glm_lora
from glm_lora.config import TrainConfig
from glm_lora.errors import ConfigError
from glm_lora.targets.selection import Selection

PACKAGES = ("torch", "megatron-core", "transformers", "peft", "ray", "numpy")
Software = Mapping[str, str]
"""Name and version of what decides the numbers, this package's own source among it."""


@cache
def installed() -> Software:
    """What is installed here; the source digest tells two wheels of one version apart."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found | {"glm-lora": f"{glm_lora.__version__} (source {_source_digest()})"}


def _source_digest() -> str:
    root = Path(glm_lora.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def check_same_software(named: Mapping[str, Software]) -> None:
    """Compare what is installed in several places with the first of them.

    Raises:
        ConfigError: Lists every difference.
    """
    places = list(named)
    first = named[places[0]]
    differences = [
        f"{package} {found.get(package)} on {place}, {own} on {places[0]}"
        for place, found in named.items()
        for package, own in first.items()
        if found.get(package) != own
    ]
    if differences:
        raise ConfigError(
            "the machines do not run the same software: " + "; ".join(differences),
            "equal versions everywhere",
            "Install the same wheel and the same pins on every machine",
        )


def check_same_on_all_ranks(config: TrainConfig, selection: Selection) -> None:
    """Every rank of the default process group must run the same software on the same command.

    Raises:
        ConfigError: On every rank, with the ranks that differ.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    if world == 1:
        return
    mine = statement(config, selection)
    all_of_them: list[Any] = [None] * world
    dist.all_gather_object(all_of_them, mine)
    compare(all_of_them)


def statement(config: TrainConfig, selection: Selection) -> dict[str, Any]:
    """What one rank says of itself."""
    text = json.dumps(config.model_dump(mode="json", exclude={"run_dir"}), sort_keys=True)
    return {
        "software": dict(installed()),
        "selection": selection.hash,
        "configuration": hashlib.sha256(text.encode()).hexdigest(),
    }


def compare(statements: Sequence[Mapping[str, Any]]) -> None:
    """Compare the statements of all ranks, in rank order; ConfigError names those that differ."""
    check_same_software({f"rank {n}": s["software"] for n, s in enumerate(statements)})
    for what in ("selection", "configuration"):
        odd = [n for n, s in enumerate(statements) if s[what] != statements[0][what]]
        if odd:
            raise ConfigError(
                f"rank(s) {', '.join(map(str, odd))} have another {what} than rank 0",
                "the same command on every rank",
            )
