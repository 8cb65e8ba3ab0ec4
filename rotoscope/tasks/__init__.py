"""Tasks: questions with one right answer, and how a model is scored on them. A new task is one file and one line here.

Packages of others add theirs through entry points of the group ``rotoscope.tasks``.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from rotoscope.errors import BadInput
from rotoscope.model.quiet import in_short
from rotoscope.tasks.aqua import Aqua
from rotoscope.tasks.arithmetic import Arithmetic
from rotoscope.tasks.base import Example, Task, parameters
from rotoscope.tasks.capitals import Capitals, CapitalsInContext
from rotoscope.tasks.cities import Cities, CitiesInContext
from rotoscope.tasks.cnn_dailymail import CNNDailyMail
from rotoscope.tasks.counterfactual import CounterfactualCapitals
from rotoscope.tasks.evaluate import evaluate
from rotoscope.tasks.gsm8k import GSM8K
from rotoscope.tasks.imdb import IMDB
from rotoscope.tasks.key_value import KeyValue
from rotoscope.tasks.known_values import KnownValues
from rotoscope.tasks.passkey import Passkey
from rotoscope.tasks.rows import is_file
from rotoscope.tasks.squad import Squad, SquadExact

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Capitals,
        CapitalsInContext,
        CounterfactualCapitals,
        Cities,
        CitiesInContext,
        Passkey,
        KeyValue,
        KnownValues,
        Arithmetic,
        GSM8K,
        Aqua,
        IMDB,
        Squad,
        SquadExact,
        CNNDailyMail,
    )
}
"""Every task of rotoscope's own by name, in the order of lists."""

__all__ = ["TASKS", "Example", "Task", "evaluate", "find", "names"]


def find(spec: str) -> Task:
    """A task from what users type.

    Parameters
    ----------
    spec : str
        ``NAME`` or ``NAME:parameter=value:…`` of a task here or of an installed package; ``NAME:FILE`` for a task
        from data, read from a local file; ``jsonl:FILE`` for items of the user's own; ``lm_eval:NAME``.

    Raises
    ------
    BadInput
        If there is no such task, or it has no such parameter.
    """
    name, _, rest = spec.partition(":")
    if name == "lm_eval":
        from rotoscope.tasks import lm_eval

        return lm_eval.task(rest)
    if name == "jsonl":
        from rotoscope.tasks import data

        return data.from_file(None, rest)
    kind = TASKS.get(name) or _installed(name)
    if kind.reads_files and rest and ("=" not in rest or is_file(rest)):
        from rotoscope.tasks import data

        return data.from_file(kind, rest)
    return kind(**parameters(kind, rest))


def names() -> list[str]:
    """What `find` knows by name, those of installed packages last."""
    return [*TASKS, *sorted(set(_entry_points()) - set(TASKS))]


def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="rotoscope.tasks")}


def _installed(name: str) -> type[Task]:
    """The task of that name that another package brings; loaded only when it is asked for."""
    entry = _entry_points().get(name)
    if entry is None:
        raise BadInput(f"there is no task {name!r}; there are {', '.join(names())}, jsonl:FILE and lm_eval:NAME")
    try:
        kind = entry.load()
    except Exception as error:  # whatever the other package does wrong
        why = in_short(error)
        raise BadInput(f"the task {name!r}, installed as {entry.value}, cannot be loaded: {why}") from None
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise BadInput(f"{entry.value}, installed as the task {name!r}, is not a rotoscope.tasks.Task")
    return kind
