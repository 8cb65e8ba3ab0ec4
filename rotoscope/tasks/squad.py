"""SQuAD 1.1: the answer is a span of the paragraph (Rajpurkar et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rotoscope.errors import BadInput
from rotoscope.tasks.base import Example, Knowledge, Scoring
from rotoscope.tasks.data import DataTask
from rotoscope.tasks.rows import Row, Source
from rotoscope.tasks.score import exact, f1, line


@dataclass(frozen=True)
class Squad(DataTask):
    """The best overlap of words, F1, of the generated line with an accepted answer."""

    name: ClassVar[str] = "squad"
    summary: ClassVar[str] = "questions on a paragraph; F1 of words with the accepted answers"
    knowledge: ClassVar[Knowledge] = "contextual"
    scoring: ClassVar[Scoring] = "generate"
    new_tokens: ClassVar[int] = 24
    metric: ClassVar[str] = "F1"
    source: ClassVar[Source] = Source("rajpurkar/squad", None, "validation", ("context", "question", "answers"))
    specimen: ClassVar[Row] = {
        "context": "The lighthouse was built by Ada Brandt in 1871 and burnt down twice.",
        "question": "Who built the lighthouse?",
        "answers": {"text": ["Ada Brandt", "Brandt", "Ada Brandt"], "answer_start": [28, 32, 28]},
    }

    def example(self, row: Row, id: str) -> Example:
        """Accepted answers once each, in the order of the data."""
        texts = row["answers"]["text"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadInput(f"{self.spec}, {id}: the text of answers must be a list of texts")
        gold = tuple(dict.fromkeys(texts))
        if not gold:
            raise BadInput(f"{self.spec}, {id}: a question without an answer; the task is SQuAD 1.1")
        prompt = f"{row['context'].strip()}\nQuestion: {row['question'].strip()}\nAnswer:"
        return Example(id=id, prompt=prompt, gold=gold, lead="Answer:")

    def score(self, example: Example, answer: str) -> float:
        """0 to 1, of the first line: models go on to questions of their own."""
        return max(f1(line(answer), gold) for gold in example.gold)


@dataclass(frozen=True)
class SquadExact(Squad):
    """The same items; right only if the generated line is an accepted answer, case, articles and punctuation aside."""

    name: ClassVar[str] = "squad_em"
    summary: ClassVar[str] = "squad, scored by exact match"
    metric: ClassVar[str] = "exact match"

    def score(self, example: Example, answer: str) -> float:
        """1 or 0."""
        return max(exact(line(answer), gold) for gold in example.gold)
