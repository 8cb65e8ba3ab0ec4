"""GSM8K: school arithmetic in words (Cobbe et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rotoscope.errors import BadInput
from rotoscope.tasks.base import Example, Knowledge, Scoring
from rotoscope.tasks.data import DataTask
from rotoscope.tasks.rows import Row, Source
from rotoscope.tasks.score import final_number


@dataclass(frozen=True)
class GSM8K(DataTask):
    """Right if the number after "####", or else the last one, of what is generated is the answer's."""

    name: ClassVar[str] = "gsm8k"
    summary: ClassVar[str] = "word problems, worked out freely; the final number counts"
    knowledge: ClassVar[Knowledge] = "reasoning"
    scoring: ClassVar[Scoring] = "generate"
    new_tokens: ClassVar[int] = 256
    source: ClassVar[Source] = Source("openai/gsm8k", "main", "test", ("question", "answer"))
    specimen: ClassVar[Row] = {
        "question": "A crate holds 1,200 nails. A carpenter buys 2 crates and uses 300 nails. How many nails are left?",
        "answer": "2 crates hold 2 * 1200 = <<2*1200=2400>>2400 nails.\nThere are 2400 - 300 = 2100 left.\n#### 2,100",
    }

    def example(self, row: Row, id: str) -> Example:
        """The gold answer is the number alone, without thousands separators."""
        final = row["answer"].partition("####")[2].strip().replace(",", "")
        try:
            float(final)
        except ValueError:
            raise BadInput(f"{self.spec}, {id}: the column answer must end in '#### NUMBER'") from None
        prompt = f"Question: {row['question'].strip()}\nAnswer:"
        return Example(id=id, prompt=prompt, gold=(final,), lead="Answer:")

    def score(self, example: Example, answer: str) -> float:
        """1 or 0. What follows when a model goes on to a question of its own does not count."""
        return float(final_number(answer.split("\nQuestion:")[0]) == float(example.gold[0]))
