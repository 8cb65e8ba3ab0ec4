"""A model's answers to a task, one row per example, clean or under an intervention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM, evaluating
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.encode import Prompt, answer_of, opening, prompt_of
from rotoscope.tasks.forward import Row, Scored, generate, score

if TYPE_CHECKING:
    import pandas as pd


def evaluate(
    lm: LM,
    task: Task | str,
    *,
    n: int = 60,
    seed: int = 0,
    under: Any = None,
    examples: Sequence[Example] | None = None,
    template: bool = False,
    batch_tokens: int = 2048,
) -> pd.DataFrame:
    """Score a model on a task.

    Parameters
    ----------
    lm : LM
        In evaluation mode while it runs, in its own mode after.
    task : Task or str
        A task, or its name with parameters, as `find` reads it.
    n, seed : int
        How many examples, and which; fewer where the task has no more.
    under : optional
        An intervention: anything whose ``on(lm, prompt=P)`` is a context manager. It is on around every batch, whose
        first ``P`` columns, padding on the left included, are the prompt.
    examples : sequence of Example, optional
        These instead of the task's own for `n` and `seed`.
    template : bool
        Whether the prompt is a user's message under the tokenizer's chat template.
    batch_tokens : int
        Most tokens of a batch, padding and answers included; one row is always a batch.

    Returns
    -------
    pandas.DataFrame
        In the order of the examples: ``task``, ``variant``, ``id``, ``correct`` (0 to 1), ``logprob`` (of the first
        gold answer, summed over its tokens, nats), ``gold_tokens``, ``prompt_tokens``, ``chance``, ``gold``,
        ``answer`` (what was generated, the most likely tokens, or the choice that won), ``template``, ``first_ids``
        (the first four ids of the prompt: whether it begins with a special token moves accuracies a lot).

    Raises
    ------
    BadInput
        If there are no examples, prompts are longer than what the model was trained on, or the tokenizer belongs to
        another model; if there is no tokenizer, or no chat template where one is asked for.
    """
    task = _task(task)
    if own := getattr(task, "evaluate", None):  # a task that brings its own prompts, answers and metrics
        table: pd.DataFrame = own(lm, n=n, seed=seed, under=under, examples=examples, template=template)
        return table
    items = prepared(lm, task, n=n, seed=seed, examples=examples, template=template)
    with evaluating(lm.model), torch.no_grad():
        scored = score(lm, items.rows, under, batch_tokens)
        made = None
        if task.scoring == "generate":
            made = generate(lm, [prompt.ids for prompt in items.prompts], task.new_tokens, under, batch_tokens)
    return items.table(scored, made)


@dataclass(frozen=True)
class Prepared:
    """A task's examples as a model reads them.

    Attributes
    ----------
    examples, prompts
        One each per example.
    own
        What must be scored to judge each example, the first gold answer first.
    """

    lm: LM
    task: Task
    examples: Sequence[Example]
    prompts: Sequence[Prompt]
    own: Sequence[Sequence[Row]]
    template: bool

    @property
    def rows(self) -> list[Row]:
        """All that must be scored, example after example."""
        return [row for own in self.own for row in own]

    def table(self, scored: Sequence[Scored], made: Sequence[tuple[int, ...]] | None = None) -> pd.DataFrame:
        """One row per example, as `evaluate` returns them, from its scored rows and what was generated, if anything."""
        import pandas as pd

        following = iter(scored)
        told = [[next(following) for _ in own] for own in self.own]
        return pd.DataFrame(
            {
                "task": self.task.name,
                "variant": self.task.variant,
                "id": example.id,
                **_judged(self.lm, self.task, example, prompt, own, ids),
                "prompt_tokens": len(prompt.ids),
                "chance": self.task.chance(example),
                "gold": example.gold[0],
                "template": self.template,
                "first_ids": list(prompt.ids[:4]),
            }
            for example, prompt, own, ids in zip(
                self.examples, self.prompts, told, made or [()] * len(told), strict=True
            )
        )


def prepared(
    lm: LM, task: Task, *, n: int, seed: int, examples: Sequence[Example] | None = None, template: bool = False
) -> Prepared:
    """A task's examples, encoded; arguments and errors are those of `evaluate`."""
    if examples is None:
        examples = task.examples(lm, n, seed) if n > 0 else []
    if not examples:
        raise BadInput(f"{task.spec} has no examples to run: ask for 1 or more")
    prompts = [prompt_of(lm, example, template) for example in examples]
    rows = [_rows(lm, task, example, prompt) for example, prompt in zip(examples, prompts, strict=True)]
    _check(lm, task, rows)
    return Prepared(lm, task, examples, prompts, rows, template)


def _task(task: Task | str) -> Task:
    if isinstance(task, Task):
        return task
    from rotoscope.tasks import find  # which names this function too

    return find(task)


def _rows(lm: LM, task: Task, example: Example, prompt: Prompt) -> list[Row]:
    """What must be scored to judge an example, the first gold answer first."""
    answers = [answer_of(lm, prompt, text) for text in _compared(task, example)]
    if task.scoring == "choice" and all(len(answer) == 1 for answer in answers):
        return [Row(prompt.ids, answers[0], tuple(answer[0] for answer in answers))]
    if task.scoring in ("first", "generate"):
        return [Row(prompt.ids, answers[0])]
    return [Row(prompt.ids, answer) for answer in answers]


def _compared(task: Task, example: Example) -> list[str]:
    """The first gold answer, and what else may be right or, of several choices, wrong."""
    if task.scoring != "choice":
        return list(example.gold)
    return [example.gold[0], *(choice for choice in example.choices if choice != example.gold[0])]


def _judged(
    lm: LM, task: Task, example: Example, prompt: Prompt, told: list[Scored], made: tuple[int, ...]
) -> dict[str, Any]:
    """The columns ``correct``, ``answer``, ``logprob`` and ``gold_tokens`` of one example."""
    correct, answer = _verdict(lm, task, example, prompt, told, made)
    return {
        "correct": float(correct),
        "answer": answer,
        "logprob": told[0].logprob,
        "gold_tokens": len(told[0].row.answer),
    }


def _verdict(
    lm: LM, task: Task, example: Example, prompt: Prompt, told: list[Scored], made: tuple[int, ...]
) -> tuple[float, str]:
    likeliest = told[0].likeliest
    if task.scoring == "generate":
        text = lm.tokenizer.decode(made)
        return task.score(example, text), text.strip()
    if task.scoring == "choice":
        likely = told[0].also or tuple(scored.logprob for scored in told)
        won = _compared(task, example)[max(range(len(likely)), key=likely.__getitem__)]
        return won in example.gold, won
    if task.scoring == "exact":
        return any(scored.exact for scored in told), lm.tokenizer.decode(likeliest).strip()
    begin = [opening(lm, answer_of(lm, prompt, gold)) for gold in example.gold]
    right = any(likeliest[: len(first)] == first for first in begin)
    return right, lm.tokenizer.decode(likeliest[: len(begin[0])]).strip()


def _check(lm: LM, task: Task, rows: list[list[Row]]) -> None:
    """Refuse what the model cannot read."""
    every = [row for own in rows for row in own]
    largest = max(max(row.prompt + row.answer) for row in every)
    if largest >= lm.anatomy.vocabulary:
        raise BadInput(
            f"the tokenizer of {lm.source} gives ids up to {largest} where the model has {lm.anatomy.vocabulary} "
            "embeddings: it belongs to another model"
        )
    more = task.new_tokens if task.scoring == "generate" else 0
    longest = max(len(row.prompt) + max(len(row.answer) - 1, more) for row in every)
    if lm.trained_length is not None and longest > lm.trained_length:
        raise BadInput(
            f"{task.spec}: prompts and answers of up to {longest} tokens, where {lm.source} was trained on "
            f"{lm.trained_length}: make them shorter"
        )
