"""The reference pages, made from the code when the site is built (a hook of mkdocs)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

EXAMPLES = Path(__file__).parent / "examples"


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    pages = {"cli": cli_page, "config": config_page, "python": python_page}
    for name, make in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
    return files


def cli_page() -> str:
    """Every command with its options, their defaults and what they mean."""
    import typer.main

    from glm_lora.cli import app

    parts = ["# Command line", "", "`glm-lora COMMAND ...`; `COMMAND --help` shows the same.", ""]
    for name, command in typer.main.get_group(app).commands.items():
        parts += [f"## {name}", "", command.help or "", "", "| option | meaning |", "|---|---|"]
        parts += [f"| {flags} | {text} |" for flags, text in _options(command)]
        parts.append("")
    return "\n".join(parts)


def _options(command: Any) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        if parameter.param_type_name == "argument":
            names = [parameter.name.upper()]
        text = _cell(getattr(parameter, "help", "") or "")
        default = parameter.default
        if isinstance(default, str | int | float | Path) and default not in ("", True, False):
            text += f" (default {default})"
        yield ", ".join(f"`{name}`" for name in names), text


def config_page() -> str:
    """Every configuration class with its fields."""
    from glm_lora.config import TINY_DEFAULTS, PrepareConfig, TrainConfig

    sections = [("TrainConfig", TrainConfig, "")]
    for name, field in TrainConfig.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            sections.append((name, field.annotation, name))
    sections.append(("PrepareConfig", PrepareConfig, ""))
    parts = [
        "# Configuration",
        "",
        "A run's `config.toml` holds these keys, resolved. Each is also an option: `lora_rank` is "
        "`--lora-rank`. An unknown key is an error that names the nearest.",
        "",
    ]
    for title, cls, section in sections:
        parts += [f"## {title}", "", cls.__doc__ or "", ""]
        parts += ["| key | type | default | tiny | meaning |", "|---|---|---|---|---|"]
        tiny = {} if cls is PrepareConfig else TINY_DEFAULTS.get(section, {})
        parts += list(_fields(cls, tiny))
        parts.append("")
    return "\n".join(parts)


def _fields(cls: type[BaseModel], tiny: dict[str, Any]) -> Iterator[str]:
    for name, field in cls.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            continue
        kind = inspect.formatannotation(field.annotation).replace("typing.", "")
        factory = field.default_factory is not None
        default = "" if field.is_required() or factory else f"`{field.default!r}`"
        changed = f"`{tiny[name]!r}`" if name in tiny else ""
        cells = (f"`{name}`", f"`{kind}`", default, changed, field.description or "")
        yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def python_page() -> str:
    """The names of ``import glm_lora`` with signature, documentation and example."""
    import glm_lora

    parts = ["# Python", "", "`import glm_lora`: these names, loaded when they are used.", ""]
    for name in glm_lora.__all__:
        value = getattr(glm_lora, name)
        parts += [f"## {name}", ""]
        if inspect.isfunction(value):
            parts += ["```python", f"{name}{_signature(value)}", "```", ""]
        parts += ["```text", inspect.getdoc(value) or "", "```", ""]
        example = EXAMPLES / f"{_file_name(name)}.py"
        parts += ["```python", example.read_text(encoding="utf-8").strip(), "```", ""]
    return "\n".join(parts)


def _signature(function: Any) -> str:
    text = str(inspect.signature(function))
    return text.replace("'", "").replace(", ", ",\n    ").replace("(", "(\n    ", 1)


def _file_name(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
