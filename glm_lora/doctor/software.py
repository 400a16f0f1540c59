"""Packages of this environment, compared with what ``pyproject.toml`` asks for."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from glm_lora import __version__
from glm_lora.doctor.finding import Finding, broken, missing, ok

PACKAGE = "glm-lora"
MODULES = {"torch": "torch", "megatron-core": "megatron.core", "ray": "ray", "peft": "peft"}
"""Large packages whose import is tried: an installation can be there and not load."""
OLDEST_PYTHON = (3, 11)


def python() -> Finding:
    """The interpreter."""
    detail = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return broken("python", detail, f"make a virtual environment with Python {wanted} or later")
    return ok("python", detail)


def packages() -> Iterator[Finding]:
    """Every declared dependency; the ``gpu`` and ``wandb`` extras are optional."""
    try:
        declared = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        yield missing(PACKAGE, f"{__version__}, not installed", "pip install -e .", required=True)
        return
    for text in declared:
        requirement = Requirement(text)
        extra = _extra(requirement)
        if extra in (None, "gpu", "wandb"):
            yield _package(requirement, extra)


def _extra(requirement: Requirement) -> str | None:
    """The extra a requirement belongs to; None for those that are always installed."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return None
    names = ("gpu", "wandb", "dev", "docs")
    return next((n for n in names if requirement.marker.evaluate({"extra": n})), "")


def _package(requirement: Requirement, extra: str | None) -> Finding:
    name = requirement.name
    wanted = f"{name}{requirement.specifier}"
    mend = f"pip install '{wanted}'" if extra is None else f"pip install 'glm-lora[{extra}]'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        why = f"not installed (optional: {extra})" if extra else "not installed"
        return missing(name, why, mend, required=extra is None)
    if not requirement.specifier.contains(version, prereleases=True):
        return broken(name, f"{version}, not {requirement.specifier}", mend)
    if name in MODULES:
        try:
            importlib.import_module(MODULES[name])
        except (ImportError, OSError, RuntimeError) as error:
            return broken(name, f"{version} does not import: {error}", f"{mend} --force-reinstall")
    return ok(name, version)


def architecture() -> Finding:
    """Whether transformers knows the model."""
    name = "glm5_next in transformers"
    try:
        module = importlib.import_module("transformers.models.glm5_next")
    except ImportError as error:
        return broken(name, str(error), "pip install -U transformers")
    return ok(name, module.__name__)
