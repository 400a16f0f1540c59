"""SGLang's own environment, asked through its interpreter: version, model, plugin."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm_lora.doctor.finding import Finding, broken, missing, ok
from glm_lora.rollout.sglang_plugin import KNOWN_VERSIONS

DEFAULT_PYTHON = Path(".venv-sglang/bin/python")
BUILD = "make sglang-env"
SECONDS = 60
_ASK = """
import importlib.metadata as m, importlib.util as u, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({
    "sglang": version("sglang"), "torch": version("torch"), "glm_lora": version("glm-lora"),
    "model": bool(version("sglang")) and u.find_spec("sglang") is not None
        and u.find_spec("sglang.srt.models.glm5_next") is not None,
    "plugin": [e.value for e in m.entry_points(group="sglang.srt.plugins") if e.name == "glm_lora"],
}))
"""


def sglang(python: Path | None) -> Iterator[Finding]:
    """What SGLang in the environment of ``python`` can serve.

    Args:
        python: Its interpreter; None looks in ``.venv-sglang``.
    """
    interpreter = python or DEFAULT_PYTHON
    if not interpreter.exists():
        if python is not None:
            yield broken("sglang", f"{python} does not exist", BUILD)
        else:
            yield missing("sglang", f"no {DEFAULT_PYTHON}: only the embedded engine", BUILD)
        return
    answer = _ask(interpreter)
    if isinstance(answer, str):
        yield broken("sglang", f"{interpreter}: {answer}", BUILD)
        return
    yield from describe(answer, interpreter)


def _ask(interpreter: Path) -> dict[str, Any] | str:
    """The interpreter's account, or why there is none."""
    try:
        done = subprocess.run(
            [str(interpreter), "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no answer"
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return "not a Python interpreter"


def describe(answer: dict[str, Any], interpreter: Path) -> Iterator[Finding]:
    """The lines that an environment's account amounts to."""
    version, pip = answer["sglang"], f"{interpreter} -m pip install"
    if version is None:
        yield broken("sglang", f"not installed for {interpreter}", BUILD)
        return
    if version not in KNOWN_VERSIONS:
        known = " or ".join(KNOWN_VERSIONS)
        yield broken(
            "sglang",
            f"{version}; the plugin knows {known}",
            f"{pip} sglang=={KNOWN_VERSIONS[-1]}",
        )
        return
    yield ok("sglang", f"{version}, torch {answer['torch']} ({interpreter})")
    if not answer["model"]:
        yield broken("sglang serves glm5_next", "this SGLang has no glm5_next", BUILD)
    yield from _kda(answer, pip)


def _kda(answer: dict[str, Any], pip: str) -> Iterator[Finding]:
    """Whether adapters on the KDA layers can be served."""
    stock = "stock SGLang adapts only some DSA and MLP projections"
    if answer["plugin"]:
        yield ok("sglang serves KDA adapters", f"with the plugin of glm-lora {answer['glm_lora']}")
    else:
        yield missing("sglang serves KDA adapters", stock, f"{pip} --no-deps glm-lora")
