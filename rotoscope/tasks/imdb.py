"""IMDB: is a film review positive or negative? (Maas et al. 2011)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rotoscope.errors import BadInput
from rotoscope.tasks.base import Example, Knowledge, Scoring
from rotoscope.tasks.data import DataTask
from rotoscope.tasks.rows import Row, Source

CHOICES = ("negative", "positive")


@dataclass(frozen=True)
class IMDB(DataTask):
    """Right if the right word is the likelier. The data are sorted by class, so both are drawn in turn."""

    name: ClassVar[str] = "imdb"
    summary: ClassVar[str] = "sentiment of film reviews, both classes equally often"
    knowledge: ClassVar[Knowledge] = "contextual"
    scoring: ClassVar[Scoring] = "choice"
    source: ClassVar[Source] = Source("stanfordnlp/imdb", None, "test", ("text", "label"))
    specimen: ClassVar[Row] = {"text": "Two hours of my life, wasted.<br /><br />The plot is dull.", "label": 0}

    def balance(self, row: Row) -> object:
        """The class."""
        return row["label"]

    def example(self, row: Row, id: str) -> Example:
        """The label is 0 or "negative", 1 or "positive"."""
        if row["label"] not in (0, 1, *CHOICES):
            raise BadInput(f"{self.spec}, {id}: label must be 0 (negative) or 1 (positive), not {row['label']!r}")
        gold = row["label"] if isinstance(row["label"], str) else CHOICES[row["label"]]
        lead = "The sentiment of this review is"
        text = row["text"].replace("<br />", "\n").strip()
        return Example(id=id, prompt=f"Review: {text}\n{lead}", gold=(gold,), choices=CHOICES, lead=lead)
