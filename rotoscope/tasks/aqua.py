"""AQuA-RAT: algebra with five options (Ling et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rotoscope.errors import BadInput
from rotoscope.tasks.base import Example, Knowledge, Scoring
from rotoscope.tasks.data import DataTask
from rotoscope.tasks.rows import Row, Source

LETTERS = ("A", "B", "C", "D", "E")


@dataclass(frozen=True)
class Aqua(DataTask):
    """Right if the right option's letter is the likeliest. The options stand in the prompt."""

    name: ClassVar[str] = "aqua"
    summary: ClassVar[str] = "algebra with the options A-E in the prompt"
    knowledge: ClassVar[Knowledge] = "reasoning"
    scoring: ClassVar[Scoring] = "choice"
    source: ClassVar[Source] = Source("deepmind/aqua_rat", "raw", "test", ("question", "options", "correct"))
    specimen: ClassVar[Row] = {
        "question": "A train runs 180 km in 3 hours. How far does it run in 5 hours at the same speed?",
        "options": ["A)240 km", "B)280 km", "C)300 km", "D)320 km", "E)360 km"],
        "correct": "C",
    }

    def example(self, row: Row, id: str) -> Example:
        """Each option on a line of its own, its letter first."""
        options, right = row["options"], row["correct"]
        if not isinstance(options, list) or len(options) != len(LETTERS) or right not in LETTERS:
            raise BadInput(f"{self.spec}, {id}: five options and a letter A-E as correct are needed")
        texts = [o.removeprefix(f"{letter})").strip() for letter, o in zip(LETTERS, options, strict=True)]
        lines = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, texts, strict=True))
        lead = "The right option is"
        prompt = f"Question: {row['question'].strip()}\nOptions:\n{lines}\nAnswer: {lead}"
        return Example(id=id, prompt=prompt, gold=(right,), choices=LETTERS, lead=lead)
