"""Rows of prompt files: JSONL and parquet, one at a time, with a reason for those that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm_lora.errors import DataError
from glm_lora.json_numbers import jsonable


class BadRowError(Exception):
    """Why one row cannot be used; the reader of the file puts file and row to it."""


def rows(path: Path, keys: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Rows of a file with their number; one that cannot be parsed comes as its ``BadRowError``.

    Args:
        path: A file that ends in .jsonl, .json or .parquet.
        keys: Columns that a parquet file must have.
        optional: Columns that are read where it has them; others are not.

    Raises:
        DataError: The file as a whole cannot be used.
    """
    if not path.is_file():
        raise DataError(f"prompt file {path} does not exist", "a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path, keys, optional)
    elif path.suffix in (".jsonl", ".json"):
        yield from _jsonl_rows(path)
    else:
        raise DataError(f"prompt file {path} has an unknown kind", "a .jsonl or .parquet file")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parsed(line)
    except OSError as error:
        raise DataError(f"prompt file {path} cannot be read: {error}") from error


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=_without_repeats)
    except BadRowError as error:
        return error
    except UnicodeDecodeError:
        return BadRowError("not UTF-8 text")
    except json.JSONDecodeError as error:
        return BadRowError(f"invalid JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return BadRowError("invalid JSON: nested too deeply")
    except ValueError as error:  # a number of more digits than Python reads
        return BadRowError(f"invalid JSON: {error}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        repeated = _repeated([key for key, _ in pairs])
        raise BadRowError(f"the key {repeated!r} stands there twice")
    return row


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _parquet_rows(
    path: Path, keys: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = _wanted_columns(path, file.schema_arrow.names, keys, optional)
            # A column that is not read may hold what Python cannot.
            for batch in file.iter_batches(columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except DataError:
        raise
    # A ValueError: a date that Python has none for, text that is no Unicode.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"prompt file {path} cannot be read: {error}", "a parquet file") from error


def _wanted_columns(
    path: Path, names: Sequence[str], keys: Sequence[str], optional: Sequence[str]
) -> list[str]:
    repeated = _repeated(names)
    if repeated is not None:
        raise DataError(f"prompt file {path} has the column {repeated!r} twice", "each name once")
    for key in keys:
        if key not in names:
            raise DataError(
                f"prompt file {path} has no column {key!r} (it has {', '.join(names) or 'none'})",
                "the columns that --input-key and --label-key name",
            )
    return [name for name in names if name in keys or name in optional]


def plain(value: Any) -> Any:
    """``value`` in JSON's own words, as it reaches every kind of reward.

    NaN and infinity become the texts "NaN", "Infinity" and "-Infinity", and what parquet knows and
    JSON does not (times, decimals, bytes) becomes Python's text of it.

    Raises:
        BadRowError: It is nested too deeply.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise BadRowError("nested too deeply") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]  # pyright: ignore
    if isinstance(value, float):
        return jsonable(value)
    return value if value is None or isinstance(value, str | bool | int) else str(value)
