"""Tasks from data: rows become examples, drawn with a seed, from a local file or the data set's own place."""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, ClassVar

from rotoscope.errors import BadInput
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.rows import Row, Source, from_hub, local

if TYPE_CHECKING:
    from rotoscope.model.lm import LM


@dataclass(frozen=True)
class DataTask(Task):
    """A task whose items are rows.

    A subclass says how a row becomes an example. Items that would not fit into the length that the model was trained
    on, generated tokens included, are passed over.

    Attributes
    ----------
    file
        A local JSONL or Parquet file; empty for the data set itself.

    Class attributes
    ----------------
    source
        The data set, and the columns that a local file must have too.
    specimen
        A row made by hand, by which the task can be shown and checked without the data.
    """

    file: str = ""

    reads_files: ClassVar[bool] = True
    source: ClassVar[Source]
    specimen: ClassVar[Row]

    @abstractmethod
    def example(self, row: Row, id: str) -> Example:
        """What the model is asked, and the accepted answers."""

    def balance(self, row: Row) -> object:
        """Rows of all values of this are drawn in turn; by default all rows are alike."""
        return None

    @property
    def variant(self) -> str:
        """The local file, where there is one."""
        return self.file

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        """``n`` rows drawn without replacement, fewer where the data have no more that fit."""
        rows = self.rows()
        room = float("inf") if lm.trained_length is None else lm.trained_length - self.new_tokens
        out: list[Example] = []
        for index in self._drawn(rows, seed):
            if len(out) == n:
                break
            example = self.example(rows[index], f"{self.name}-{index}")
            if len(lm.encode(example.prompt)) <= room:
                out.append(example)
        if not out and n:
            raise BadInput(f"{self.spec}: no item fits into the {lm.trained_length} tokens that {lm.source} reads")
        return out

    def rows(self) -> Sequence[Row]:
        """All rows, of the local file or of the data set."""
        return local(self.file, self.source.columns) if self.file else from_hub(self.name, self.source)

    def _drawn(self, rows: Sequence[Row], seed: int) -> Iterator[int]:
        """Indices in the order of drawing: a shuffle of each class, one of each in turn."""
        classes: dict[object, list[int]] = {}
        for index, row in enumerate(rows):
            classes.setdefault(self.balance(row), []).append(index)
        rng = random.Random(f"{self.name}/{seed}")
        shuffled = [rng.sample(classes[key], len(classes[key])) for key in sorted(classes, key=str)]
        return (index for index in chain.from_iterable(zip_longest(*shuffled)) if index is not None)


def from_file(kind: type[Task] | None, path: str) -> Task:
    """A task on the rows of a local file; without a task, items of the user's own.

    Parameters
    ----------
    kind
        A task from data, whose columns the file has; ``None`` for the columns prompt, answer and perhaps choices.
    path
        A ``.jsonl`` or ``.parquet`` file.

    Raises
    ------
    BadInput
        If the file is missing, unreadable, empty, or lacks a column; if a row holds what the task cannot use; or if
        the task does not read files.
    """
    if kind is None:
        kind = _own(path)
    if not issubclass(kind, DataTask):
        raise BadInput(f"{kind.name} makes its own items and reads no file")
    task = kind(file=path)
    for number, row in enumerate(task.rows(), 1):  # a fault anywhere in the file shows before a model is run
        try:
            task.example(row, f"row {number}")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            like = json.dumps(task.specimen, ensure_ascii=False)
            raise BadInput(f"{path}, row {number}: not what {kind.name} reads; a row is like {like}") from None
    return task


def _own(path: str) -> type[Task]:
    """Whether the user's items are answered freely or among choices."""
    from rotoscope.tasks.jsonl import Choices, Open

    if not path:
        raise BadInput("jsonl needs a file: jsonl:FILE, with the columns prompt, answer and perhaps choices")
    among = [row.get("choices") is not None for row in local(path, Open.source.columns)]
    if any(among) and not all(among):
        raise BadInput(f"{path}, row {among.index(False) + 1}: no choices, which other rows have; make two files of it")
    return Choices if all(among) else Open
