"""Prompts: read from JSONL and parquet files and checked row by row.

All bad rows of all files are reported together: file, row and reason.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from glm_lora.errors import DataError
from glm_lora.rl import word_problems
from glm_lora.rl.rows import BadRowError, plain, rows

Messages = tuple[Mapping[str, Any], ...]
ROLES = ("system", "user", "assistant", "tool")
PACKAGED = {"word-problems": word_problems.PATH}
"""Data sets that ship with the package, by the name that ``--prompt-data`` takes."""
_EXACT = 2.0**53
"""Below this, a float that is a whole number is that number."""
_SHOWN = 20
"""Bad rows listed in full in one report."""


@dataclass(frozen=True)
class Prompt:
    """One usable row."""

    ids: tuple[int, ...]
    """Prompt tokens, chat template applied."""
    prompt: str | Messages
    label: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """``file:row``, rows from 1 (lines for JSONL)."""

    @property
    def text(self) -> str:
        """The prompt as text: as given, or the last message's content."""
        return self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1]["content"])


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.row}: {self.reason}"


@dataclass(frozen=True)
class PromptFile:
    """The usable rows of one file and its share of the mix."""

    path: Path
    weight: float
    """Relative share of prompts drawn from this file."""
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class PromptData:
    """All files of a run."""

    files: tuple[PromptFile, ...]
    bad_rows: tuple[BadRow, ...] = ()
    """Rows left out by ``skip_bad_rows``."""

    def __len__(self) -> int:
        return sum(len(f.prompts) for f in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over what decides which prompt comes when (tokens, labels, weights)."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.weight!r} {len(file.prompts)}\n".encode())
            for prompt in file.prompts:
                digest.update(f"{prompt.ids} {prompt.label!r}\n".encode())
        return digest.hexdigest()


def load_prompts(
    sources: Sequence[str],
    encode: Callable[[str | Messages], Sequence[int]],
    *,
    input_key: str = "prompt",
    label_key: str = "label",
    metadata_key: str = "metadata",
    check_label: Callable[[str], str | None] | None = None,
    max_prompt_tokens: int | None = None,
    skip_bad_rows: bool = False,
) -> PromptData:
    """Read, check and tokenise all prompt files.

    Args:
        sources: Paths ending in .jsonl, .json or .parquet, or names in ``PACKAGED``, each
            optionally ``PATH@WEIGHT``. Without weights every row has the same chance.
        encode: Prompt text or messages to tokens, chat template included; a DataError makes the
            row a bad one.
        input_key: Field with the prompt: text, or a list of ``{role, content}`` messages.
        label_key: Field with the expected answer (text or a number).
        metadata_key: Optional field with an object for the reward.
        check_label: Why a label can never be matched, or None (``Reward.check_label``).
        max_prompt_tokens: Longest usable prompt.
        skip_bad_rows: Leave bad rows out instead of refusing them all.

    Raises:
        DataError: A file is missing, of another kind or without a usable row, or (unless skipped)
            a row is bad; the message lists file, row and reason.
    """
    if not sources or not all(sources):
        raise DataError("no prompt file was given", "at least one --prompt-data FILE")
    reader = _RowReader(encode, input_key, label_key, metadata_key, check_label, max_prompt_tokens)
    parsed = [_split_weight(source) for source in sources]
    if len({weight is None for _, weight in parsed}) > 1:
        raise DataError("some prompt files have a weight and some have none", "all or none")
    files: list[PromptFile] = []
    bad: list[BadRow] = []
    for path, weight in parsed:
        known = len(bad)
        prompts = list(reader.read(path, bad))
        if not prompts and (skip_bad_rows or not bad):
            shown = _listed(bad[known:])
            raise DataError(f"{path} has no usable prompt{shown}", "at least one row")
        files.append(PromptFile(path, len(prompts) if weight is None else weight, tuple(prompts)))
    if bad and not skip_bad_rows:
        raise _report(bad)
    return PromptData(tuple(files), tuple(bad))


def _report(bad: Sequence[BadRow]) -> DataError:
    return DataError(
        f"{len(bad)} prompt rows cannot be used{_listed(bad)}",
        "usable rows only",
        "Correct them, or leave them out with --skip-bad-rows",
    )


def _listed(bad: Sequence[BadRow]) -> str:
    """The end of a sentence about rows: one line for each, or nothing."""
    lines = [f"  {row}" for row in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  and {len(bad) - _SHOWN} more")
    return ":\n" + "\n".join(lines) + "\n" if lines else ""


def _split_weight(source: str) -> tuple[Path, float | None]:
    """``PATH@WEIGHT`` or ``PATH``; an existing file's own name wins, then a packaged one's."""
    head, at, tail = source.rpartition("@")
    if not at or Path(source).exists():
        return _located(source), None
    try:
        weight = float(tail)
    except ValueError:
        return _located(source), None
    if not (weight > 0 and math.isfinite(weight)):
        raise DataError(f"weight {tail} of {head}", "a positive number")
    return _located(head), weight


def _located(name: str) -> Path:
    path = Path(name)
    return PACKAGED[name] if name in PACKAGED and not path.exists() else path


@dataclass(frozen=True)
class _RowReader:
    encode: Callable[[str | Messages], Sequence[int]]
    input_key: str
    label_key: str
    metadata_key: str
    check_label: Callable[[str], str | None] | None
    max_prompt_tokens: int | None

    def read(self, path: Path, bad: list[BadRow]) -> Iterator[Prompt]:
        """The usable rows of one file; the others are appended to ``bad``."""
        keys = (self.input_key, self.label_key)
        for number, row in rows(path, keys, (self.metadata_key,)):
            try:
                yield self._prompt(row, f"{path}:{number}")
            except BadRowError as error:
                bad.append(BadRow(str(path), number, str(error)))

    def _prompt(self, row: Any, source: str) -> Prompt:
        if isinstance(row, BadRowError):
            raise row
        if not isinstance(row, dict):
            raise BadRowError(f"the row is a {_kind(row)}, not an object")
        for key in (self.input_key, self.label_key):
            if key in row and row[key] is None:
                raise BadRowError(f"{key!r} is null")
            if key not in row:
                raise BadRowError(
                    f"missing key {key!r} (it has {', '.join(sorted(row)) or 'none'})"
                )
        label = self._label(row[self.label_key])
        metadata = row.get(self.metadata_key)
        if metadata is not None and not isinstance(metadata, dict):
            raise BadRowError(f"{self.metadata_key!r} is a {_kind(metadata)}, not an object")
        prompt = _checked_prompt(row[self.input_key], self.input_key)
        try:
            ids = tuple(int(i) for i in self.encode(prompt))
        except DataError as error:
            raise BadRowError(str(error)) from None
        except (TypeError, ValueError) as error:  # text that is no Unicode: a lone surrogate
            raise BadRowError(f"the prompt cannot be tokenised: {error}") from None
        if not ids:
            raise BadRowError("the prompt has no token")
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise BadRowError(
                f"the prompt has {len(ids)} tokens after the chat template, "
                f"the limit is {self.max_prompt_tokens}"
            )
        return Prompt(ids, prompt, label, self._metadata(metadata or {}), source)

    def _metadata(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return plain(value)
        except BadRowError as error:
            raise BadRowError(f"{self.metadata_key!r} is {error}") from None

    def _label(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadRowError(f"{self.label_key!r} is a {_kind(value)}, not text or a number")
        if isinstance(value, float):
            if not math.isfinite(value):  # in a table, NaN is how a missing number is written
                raise BadRowError(f"{self.label_key!r} is {value}, which is no label")
            if value.is_integer() and abs(value) < _EXACT:
                value = int(value)  # a column of whole numbers with a gap is one of floats
        label = str(value)
        if not label.strip():
            raise BadRowError("the label is empty")
        reason = self.check_label(label) if self.check_label else None
        if reason:
            raise BadRowError(f"label {label[:60]!r} cannot be used: {reason}")
        return label


def _checked_prompt(value: Any, key: str) -> str | Messages:
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError("the prompt is empty")
        return value
    if not isinstance(value, list):
        raise BadRowError(f"{key!r} is a {_kind(value)}, not text or a list of messages")
    if not value:
        raise BadRowError("the prompt has no message")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadRowError("a message is not an object with role and content (text)")
        if message.get("role") not in ROLES:
            raise BadRowError(f"a message has role {message.get('role')!r}, not {', '.join(ROLES)}")
    if value[-1]["role"] == "assistant":
        raise BadRowError("the last message is the assistant's, so there is nothing to answer")
    if not any(m["content"].strip() for m in value):
        raise BadRowError("the prompt is empty")
    return tuple(value)


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "truth value", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, int | float) else "value")
