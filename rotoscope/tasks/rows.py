"""Rows of data: from a local JSONL or Parquet file, or by a data set's id through `datasets`."""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rotoscope.errors import BadInput
from rotoscope.model.quiet import in_short

Row = Mapping[str, Any]


class Source(NamedTuple):
    """Where a data set lies on the hub, and the columns that are read."""

    id: str
    config: str | None
    split: str
    columns: tuple[str, ...]


def local(file: str, columns: Sequence[str]) -> list[Row]:
    """All rows of a ``.jsonl`` (one JSON object a line) or ``.parquet`` file.

    Raises
    ------
    BadInput
        If the file is missing, unreadable, empty, or lacks one of the columns.
    """
    path = Path(file).expanduser()
    if not is_file(file):
        raise BadInput(f"there is no file {file}; give a .jsonl or .parquet file with the columns {', '.join(columns)}")
    rows = _reader(path)(path)
    if not rows:
        raise BadInput(f"{file} has no rows")
    for number, row in enumerate(rows, 1):
        if missing := [name for name in columns if row.get(name) is None]:
            has = ", ".join(row) or "none"
            raise BadInput(f"{file}, row {number}: no {', '.join(missing)}; its columns: {has}")
    return rows


def is_file(name: str) -> bool:
    """Whether there is a file of this name; one that no file can have is none."""
    return os.path.isfile(os.path.expanduser(name))  # Path.is_file raises where the name is too long


def _reader(path: Path) -> Callable[[Path], list[Row]]:
    readers = {".parquet": _parquet, ".jsonl": _jsonl, ".json": _jsonl}
    if path.suffix not in readers:
        raise BadInput(f"{path} is neither .jsonl nor .parquet")
    return readers[path.suffix]


def _jsonl(path: Path) -> list[Row]:
    rows = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_object(path, number, line))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; convert it first") from None
    return rows


def _object(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(row, dict):
        raise BadInput(f'{path}, line {number}: not a JSON object, such as {{"prompt": …, "answer": …}}')
    return row


def _parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        rows: list[Row] = ParquetFile(path).read().to_pylist()
    except (OSError, ArrowException) as error:
        raise BadInput(f"{path} is no readable Parquet file: {in_short(error)}") from None
    return rows


def from_hub(name: str, source: Source) -> Sequence[Row]:
    """One split of a data set on the hub, or from the cache of `datasets`.

    Raises
    ------
    BadInput
        If `datasets` is not installed or the data set cannot be had.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise BadInput(f"{name} needs the package datasets: pip install 'rotoscope[eval]'") from None
    try:
        rows: Sequence[Row] = load_dataset(source.id, source.config, split=source.split)
    except (OSError, ValueError, RuntimeError) as error:
        why, columns = in_short(error), ", ".join(source.columns)
        raise BadInput(f"{name}: {why}; give a local file, {name}:FILE.jsonl, with the columns {columns}") from None
    return rows
