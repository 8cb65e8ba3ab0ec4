"""The tasks of a study on one model: which of them it can be asked, and what that costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.tasks import find

# What generating an answer, or a task that is not ours to look into, is taken to cost.
_UNKNOWN_TOKENS = 512


@dataclass(frozen=True)
class Asked:
    """A task that a model can be asked: ``n`` items there are, ``tokens`` of all their prompts together."""

    spec: str
    n: int
    tokens: int


def asked(lm: LM, wanted: Mapping[str, int], seed: int) -> tuple[list[Asked], dict[str, str]]:
    """The tasks that fit the model, and why the others do not.

    Parameters
    ----------
    wanted : mapping
        Items of each task, by spec.

    Raises
    ------
    BadInput
        If there is no such task.
    """
    out, refused = [], {}
    for spec, n in wanted.items():
        task = find(spec)
        if hasattr(task, "evaluate"):  # another library makes its prompts
            out.append(Asked(spec, n, n * _UNKNOWN_TOKENS))
            continue
        try:
            examples = task.examples(lm, n, seed)
            lengths = [len(lm.encode(example.prompt)) for example in examples]
        except BadInput as error:
            refused[spec] = str(error)
            continue
        longest = max(lengths, default=0) + task.new_tokens
        if lm.trained_length is not None and longest > lm.trained_length:
            refused[spec] = f"{spec} takes {longest} tokens, the model was trained on {lm.trained_length}"
        elif lengths:
            out.append(Asked(spec, len(examples), sum(lengths)))
        else:
            refused[spec] = f"{spec} has no items on this model"
    return out, refused


def slug(*parts: str) -> str:
    """Part of a cell's name from a task's spec or an arm's label."""
    return "-".join(re.sub(r"[^\w.+=-]+", "-", part).strip("-") for part in parts)


def without_repeats(refused: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Reasons by task, each once."""
    return {spec: reason for some in refused for spec, reason in some.items()}
