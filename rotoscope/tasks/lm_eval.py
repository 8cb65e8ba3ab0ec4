"""Every task of lm-eval, by its own API: its prompts, its answers, its metrics, our interventions around the model.

On lm-eval's own command line the model is called ``rotoscope``::

    rotoscope-lm-eval --model rotoscope --model_args pretrained=demo,intervention=disrupt:selection=top-1 --tasks …

lm-eval finds no models of other packages by itself. ``rotoscope-lm-eval`` is its command with this one made known, and
takes the same options. Plain ``lm_eval`` knows it too where one of the task files that are given by their paths
(``--tasks FILE.yaml``) has the line ``metadata: {model: !function rotoscope.tasks.lm_eval_model.Rotoscope}``. An
intervention with commas is quoted: ``'intervention="disrupt:layers=3,5"'``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rotoscope.errors import BadInput, RotoscopeError
from rotoscope.model.lm import evaluating
from rotoscope.model.quiet import in_short
from rotoscope.tasks.base import Example, Knowledge, Scoring, Task

if TYPE_CHECKING:
    import pandas as pd

    from rotoscope.model.lm import LM


def register() -> None:
    """Make the model ``rotoscope`` known to lm-eval."""
    from lm_eval.api.registry import model_registry

    if "rotoscope" not in model_registry:
        model_registry.register("rotoscope", target="rotoscope.tasks.lm_eval_model:Rotoscope")


def main() -> None:
    """lm-eval's command, with ``--model rotoscope``: one line and exit 2 for what a user can mend."""
    try:
        _need()
        from lm_eval.__main__ import cli_evaluate

        register()
        cli_evaluate()
    except RotoscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def task(name: str) -> LMEval:
    """``lm_eval:NAME``, where NAME is a task or group of lm-eval, or the path of a task's YAML file.

    Raises
    ------
    BadInput
        If lm-eval is not installed or has no such task.
    """
    _need()
    if not name:
        raise BadInput("lm_eval needs a task: lm_eval:NAME; `lm_eval ls tasks` lists them")
    if _is_file(name):
        if not Path(name).is_file():
            raise BadInput(f"there is no file {name}; give a task's YAML file or a name of `lm_eval ls tasks`")
    elif name not in _manager().all_tasks:
        raise BadInput(f"lm-eval has no task {name!r}; `lm_eval ls tasks` lists them")
    return LMEval(name)


@dataclass(frozen=True)
class LMEval(Task):
    """A task or group of lm-eval.

    Attributes
    ----------
    of
        Its name there, or the path of its YAML file.
    """

    of: str = ""

    name: ClassVar[str] = "lm_eval"
    summary: ClassVar[str] = "any task or group of lm-eval: lm_eval:NAME"
    knowledge: ClassVar[Knowledge] = "reasoning"
    scoring: ClassVar[Scoring] = "generate"
    metric: ClassVar[str] = "lm-eval's own"

    @property
    def variant(self) -> str:
        """The name that the task has there."""
        return self.of

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        """What lm-eval asks, with its few-shot examples in front."""
        from rotoscope.tasks.lm_eval_items import example

        with _apart():
            return [
                example(drawn.task, index, drawn.task.eval_docs[index])
                for drawn in _draw(self.of, n, seed)
                for index in drawn.indices
            ]

    def evaluate(
        self,
        lm: LM,
        n: int = 60,
        seed: int = 0,
        under: Any = None,
        template: bool = False,
        examples: Sequence[Example] | None = None,
    ) -> pd.DataFrame:
        """One row per item, as `rotoscope.evaluate`; ``correct`` is the task's own metric.

        Parameters
        ----------
        examples
            These of the task's own examples, known by their ids, instead of those for `n` and `seed`.

        Raises
        ------
        BadInput
            If the data cannot be had, or a task has no score for single items.
        """
        import pandas as pd
        from lm_eval import evaluate as run

        from rotoscope.tasks.lm_eval_items import row
        from rotoscope.tasks.lm_eval_model import Rotoscope

        with evaluating(lm.model), _apart():
            drawn = _draw(self.of, n, seed) if examples is None else _named(self.of, examples)
            model = Rotoscope(lm, under, batch_size=8)
            for d in drawn:
                d.task.set_fewshot_seed(seed=seed)
            found = run(
                model,
                {"tasks": {d.name: d.task for d in drawn}},
                samples={d.name: d.indices for d in drawn},
                apply_chat_template=template,
                fewshot_as_multiturn=template,
                bootstrap_iters=0,
            )
            rows = [row(d.task, model, sample) for d in drawn for sample in _first_filter(found["samples"][d.name])]
        return pd.DataFrame(rows).assign(task=self.name, variant=self.variant, template=template)


@contextmanager
def _apart() -> Iterator[None]:
    """lm-eval draws from Python's own generator, and shows bars that cannot be switched off."""
    state = random.getstate()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        random.setstate(state)


class _Drawn(NamedTuple):
    """The items that were drawn of one task of a group."""

    task: Any
    indices: list[int]

    @property
    def name(self) -> str:
        return str(self.task.task_name)


def _draw(name: str, n: int, seed: int) -> list[_Drawn]:
    """``n`` items over all tasks of a group, without replacement, in the order of the data."""
    tasks = _tasks(name)
    places = [(found.task_name, index) for found in tasks for index in range(len(found.eval_docs))]
    return _of(tasks, random.Random(f"lm_eval/{seed}").sample(places, min(n, len(places))))


def _named(name: str, examples: Sequence[Example]) -> list[_Drawn]:
    ids = (example.id.rpartition("-") for example in examples)
    return _of(_tasks(name), [(of, int(index)) for of, _, index in ids])


def _of(tasks: Sequence[Any], places: Sequence[tuple[str, int]]) -> list[_Drawn]:
    by_task = ((found, sorted(index for name, index in places if name == found.task_name)) for found in tasks)
    return [_Drawn(found, indices) for found, indices in by_task if indices]


def _tasks(name: str) -> list[Any]:
    """New objects each time: lm-eval keeps requests and answers in them."""
    try:
        return list(_manager(_is_file(name)).load([name])["tasks"].values())
    except Exception as error:  # a task's file may run any code
        raise BadInput(f"lm_eval:{name} cannot be loaded: {in_short(error)}") from None


def _first_filter(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some tasks read a generated answer in several ways; each item counts once, read in the first way."""
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]


@lru_cache
def _manager(file: bool = False) -> Any:
    """The index of all tasks takes seconds; a file of the user's own needs none of it."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=not file)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _need() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise BadInput("lm_eval tasks need the package lm-eval: pip install 'rotoscope[eval]'") from None
