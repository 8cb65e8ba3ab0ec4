"""What there is of tasks, what they ask, and whether they tell a right answer from a wrong one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rotoscope.errors import BadInput
from rotoscope.tasks import TASKS, evaluate, find, names
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.data import DataTask
from rotoscope.tasks.encode import begins_alike
from rotoscope.tasks.jsonl import Open
from rotoscope.tasks.lm_eval import LMEval
from rotoscope.tasks.script import Script

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

_OTHERWISE = ("nothing of the kind", "7", "no")
"""Wrong answers for a task that has no other item's to give."""


@dataclass(frozen=True)
class Checked:
    """How one answer to one item was scored.

    Attributes
    ----------
    task, kind, answer
        The task; ``gold`` or ``wrong``; the answer that was given.
    score
        What the task made of it, 0 to 1.
    """

    task: str
    kind: str
    answer: str
    score: float

    @property
    def ok(self) -> bool:
        """A right answer scores 1, a wrong one less than a half."""
        return self.score == 1 if self.kind == "gold" else self.score < 0.5

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}


def listing() -> list[dict[str, str]]:
    """Every task that `rotoscope.tasks.find` knows: name, knowledge, scoring, metric, parameters, summary."""
    rows = [_about(kind, kind.name) for kind in TASKS.values()]
    return [*rows, *_installed(), _about(Open, "jsonl:FILE"), _about(LMEval, "lm_eval:NAME")]


def _installed() -> Iterator[dict[str, str]]:
    """Tasks of other packages; one that cannot be loaded is listed with what is wrong, and the others stay."""
    for name in names():
        if name in TASKS:
            continue
        try:
            yield _about(type(find(name)), name)
        except BadInput as error:
            unknown = dict.fromkeys(("knowledge", "scoring", "metric", "parameters"), "")
            yield {"name": name, **unknown, "summary": str(error)}


def _about(kind: type[Task], name: str) -> dict[str, str]:
    own = [f"{f.name}={f.default}" for f in fields(kind) if f.default not in ("", MISSING)]
    parameters = ", ".join([*own, *(["FILE"] if kind.reads_files and ":" not in name else [])])
    return {
        "name": name,
        "knowledge": kind.knowledge,
        "scoring": kind.scoring,
        "metric": kind.metric,
        "parameters": parameters,
        "summary": kind.summary,
    }


def samples(lm: LM, task: Task | str, n: int = 3, seed: int = 0) -> list[Example]:
    """The first ``n`` items that an evaluation with this seed would ask.

    Raises
    ------
    BadInput
        If there is no such task, or its data cannot be had.
    """
    task = find(task) if isinstance(task, str) else task
    return task.examples(lm, n, seed)


def check(lm: LM, task: Task | str) -> list[Checked]:
    """Score a right and a wrong answer on the task's own way from a model's output to a score.

    A scripted model takes the place of `lm`'s and says one, then the other; of `lm` only the tokenizer counts.
    A data set that is not at hand is checked on a row made by hand.

    Returns
    -------
    list of Checked
        The right answer first.
    """
    task = find(task) if isinstance(task, str) else task
    items = _items(lm, task)
    example, wrong = items[0], _wrong(lm, items)
    return [
        Checked(task.spec, kind, answer, _scored(lm, task, example, answer))
        for kind, answer in (("gold", example.gold[0]), ("wrong", wrong))
    ]


def _items(lm: LM, task: Task) -> Sequence[Example]:
    if isinstance(task, DataTask) and not task.file:
        return [task.example(task.specimen, "specimen")]
    items = task.examples(lm, 1 if isinstance(task, LMEval) else 8, seed=0)
    if not items:
        raise BadInput(f"{task.spec} makes no items with this tokenizer")
    return items


def _wrong(lm: LM, items: Sequence[Example]) -> str:
    """Another choice, another item's answer or any other text, that does not begin like an accepted answer."""
    example = items[0]
    candidates = (*example.choices, *(other.gold[0] for other in items[1:]), *_OTHERWISE)
    return next(text for text in candidates if not any(begins_alike(lm, gold, text) for gold in example.gold))


def _scored(lm: LM, task: Task, example: Example, answer: str) -> float:
    scripted = replace(lm, model=Script(lm, example, answer))
    rows = evaluate(scripted, task, examples=[example])
    return float(rows.correct.iloc[0])


def listed(rows: Sequence[dict[str, str]]) -> str:
    """`listing` for people: a line of facts and a line of what it is."""
    wide = max(len(row["name"]) for row in rows)
    facts = ("{knowledge:11}  {scoring:8}  {metric:13}  {parameters}".format(**row).rstrip() for row in rows)
    return "\n".join(
        f"{row['name']:{wide}}  {line}\n{'':{wide}}  {row['summary']}" for row, line in zip(rows, facts, strict=True)
    )


def shown(examples: Sequence[Example]) -> str:
    """`samples` for people: each prompt as it is, then what is accepted and what it is chosen from."""
    return "\n\n".join(
        "\n".join(
            [
                f"--- {example.id}",
                example.prompt,
                f"--- right: {' | '.join(example.gold)}",
                *([f"--- of: {' | '.join(example.choices)}"] if example.choices else []),
            ]
        )
        for example in examples
    )


def checked(rows: Sequence[Checked]) -> str:
    """`check` for people: a line for each answer."""
    wide = max(len(row.task) for row in rows)
    return "\n".join(
        f"{'ok   ' if row.ok else 'FAULT'}  {row.task:{wide}}  {row.kind:5}  {row.score:.2f}  {row.answer[:60]!r}"
        for row in rows
    )
