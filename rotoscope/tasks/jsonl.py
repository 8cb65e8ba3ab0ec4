"""Items of the user's own: a prompt, its answer or accepted answers, and perhaps choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rotoscope.errors import BadInput
from rotoscope.tasks.base import Example, Knowledge, Scoring
from rotoscope.tasks.data import DataTask
from rotoscope.tasks.rows import Row, Source
from rotoscope.tasks.score import begins_with

OPEN = Source("", None, "", ("prompt", "answer"))


@dataclass(frozen=True)
class Open(DataTask):
    """Right if what greedy generation gives begins with an accepted answer, case and punctuation aside."""

    name: ClassVar[str] = "jsonl"
    summary: ClassVar[str] = "your own items, answered freely"
    knowledge: ClassVar[Knowledge] = "contextual"
    scoring: ClassVar[Scoring] = "generate"
    source: ClassVar[Source] = OPEN
    specimen: ClassVar[Row] = {"prompt": "The sky is", "answer": ["blue", "azure"]}

    def example(self, row: Row, id: str) -> Example:
        """Answers in the order of the row; the likelihood of the first is measured."""
        return Example(id=id, prompt=_prompt(self, row, id), gold=_answers(self, row, id))

    def score(self, example: Example, answer: str) -> float:
        """1 or 0."""
        return float(any(begins_with(answer, gold) for gold in example.gold))


@dataclass(frozen=True)
class Choices(DataTask):
    """Right if the answer is the likeliest of the row's choices."""

    name: ClassVar[str] = "jsonl"
    summary: ClassVar[str] = "your own items, with choices"
    knowledge: ClassVar[Knowledge] = "contextual"
    scoring: ClassVar[Scoring] = "choice"
    source: ClassVar[Source] = Source("", None, "", (*OPEN.columns, "choices"))
    specimen: ClassVar[Row] = {"prompt": "The sky is", "answer": "blue", "choices": ["blue", "green"]}

    def example(self, row: Row, id: str) -> Example:
        """As many choices as the row has."""
        gold, choices = _answers(self, row, id), _texts(row["choices"])
        if len(set(choices)) < 2 or len(set(choices)) < len(choices):
            raise BadInput(f"{self.file}, {id}: choices must be two or more different texts")
        if len(gold) != 1 or gold[0] not in choices:
            raise BadInput(f"{self.file}, {id}: answer must be one of the choices")
        return Example(id=id, prompt=_prompt(self, row, id), gold=gold, choices=choices)


def _prompt(task: DataTask, row: Row, id: str) -> str:
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadInput(f"{task.file}, {id}: prompt must be a text")
    return prompt.rstrip(" ")


def _answers(task: DataTask, row: Row, id: str) -> tuple[str, ...]:
    answers = _texts(row["answer"])
    if not answers or not all(answers):
        raise BadInput(f"{task.file}, {id}: answer must be a text or a list of texts")
    return answers


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(v).strip() for v in (value if isinstance(value, list) else [value]))
