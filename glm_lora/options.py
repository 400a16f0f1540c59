"""Command-line options made from the configuration classes, so that each is written once.

Every leaf field of a configuration becomes ``--field-name`` with the field's doc line as help text
and its default shown. ``with_options`` gives a function the signature that typer reads; ``collect``
turns what typer parsed back into the nested mapping that ``config.build`` validates. An option that
was not given is absent from the mapping, so that a model's default can be told from a user's wish.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from glm_lora.errors import ConfigError


def home(path: Path) -> Path:
    """``path`` with ``~`` and ``~user`` written out; ConfigError for a user that does not exist."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}", "a path without ~, or one of a known user") from None


def given_path(text: str | Path) -> Path:
    """A path as it was typed, ``~`` written out; the empty text, pathlib's ``.``, is refused."""
    if not str(text):
        raise typer.BadParameter("it is empty; expected the path of a file or folder.")
    try:
        return home(Path(text))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def path_option(help: str, **more: Any) -> Any:
    """``typer.Option`` of a path."""
    return typer.Option(help=help, parser=given_path, metavar="<path>", **more)


class Leaf(NamedTuple):
    """One field that is an option."""

    section: str
    """Name of the nested configuration, or the empty string."""
    name: str
    field: FieldInfo


def leaves(cls: type[BaseModel], section: str = "") -> Iterator[Leaf]:
    """All fields of ``cls`` and its nested configurations that can be options."""
    for name, field in cls.model_fields.items():
        kind = field.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield from leaves(kind, name)
        elif get_origin(kind) is not dict:
            yield Leaf(section, name, field)


def _option_type(kind: Any) -> Any:
    """The type typer parses: tuples become comma-separated text, ``X | None`` becomes X."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _option_type(next(a for a in get_args(kind) if a is not type(None)))
    if origin is Literal:
        return str
    if origin is tuple:
        return str
    return kind if kind in (int, float, bool, str, Path) else str


def _help(leaf: Leaf, defaults: Mapping[str, Mapping[str, Any]]) -> str:
    text = leaf.field.description or ""
    if get_origin(leaf.field.annotation) is Literal:
        text += " One of: " + ", ".join(map(str, get_args(leaf.field.annotation))) + "."
    if not leaf.field.is_required() and leaf.field.default not in ("", (), None):
        text += f" (default {leaf.field.default}"
        tiny = defaults.get(leaf.section, {}).get(leaf.name)
        text += f"; tiny {tiny})" if tiny is not None else ")"
    return text


def with_options(
    cls: type[BaseModel],
    *,
    skip: tuple[str, ...] = (),
    other_defaults: Mapping[str, Mapping[str, Any]] | None = None,
    repeatable: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function gets one keyword option per leaf of ``cls`` beside its own.

    Args:
        cls: The configuration class.
        skip: Fields that are no options here (the function declares or computes them).
        other_defaults: Defaults of the tiny model by section, shown in the help.
        repeatable: Text options that may be given several times (joined with commas).
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True)
        params = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for leaf in leaves(cls):
            if leaf.name in skip:
                continue
            kind = _option_type(leaf.field.annotation)
            flag = "--" + leaf.name.replace("_", "-")
            decls = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
            make = path_option if kind is Path else functools.partial(typer.Option, *decls)
            option = make(
                help=_help(leaf, other_defaults or {}),
                rich_help_panel=(leaf.section or "run").capitalize(),
                show_default=False,
            )
            many = leaf.name in repeatable
            annotation = Annotated[list[kind] | None if many else kind | None, option]
            params.append(
                inspect.Parameter(
                    leaf.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
                )
            )
        function.__signature__ = own.replace(parameters=params)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in params}
        return function

    return decorate


def collect(cls: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """The nested mapping of the options that were given (those not None)."""
    values: dict[str, Any] = {}
    for leaf in leaves(cls):
        value = given.get(leaf.name)
        if value is None:
            continue
        if isinstance(value, list):
            value = ",".join(value)
        if get_origin(leaf.field.annotation) is tuple and not isinstance(value, tuple):
            value = tuple(part.strip() for part in str(value).split(",") if part.strip())
        target = values.setdefault(leaf.section, {}) if leaf.section else values
        target[leaf.name] = value
    return values


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings laid over each other; later ones win."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
                result[key] = merge(result[key], value)
            else:
                result[key] = value
    return result
