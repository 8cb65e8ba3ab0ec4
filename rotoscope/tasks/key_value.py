"""Key-value retrieval: one value of many, asked for by its key."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.invented import names

DIGITS = 4


def check_pairs(task: str, pairs: int, least: int) -> None:
    """Refuse more pairs than there are keys, or fewer than ``least``."""
    most = len(names(random.Random(0)))
    if not least <= pairs <= most:
        raise BadInput(f"{task}: pairs={pairs} must be {least} to {most}")


def told(pairs: Mapping[str, str]) -> str:
    """One line for each pair."""
    return "\n".join(f"The value of {key} is {value}." for key, value in pairs.items())


def lead(key: str) -> str:
    """The words before a value."""
    return f"The value of {key} is"


def asked(key: str) -> str:
    """The question for a value, up to the value."""
    return f"Question: What is the value of {key}?\nAnswer: {lead(key)}"


def draw(rng: random.Random, pairs: int) -> dict[str, str]:
    """Invented keys and random values, no two alike."""
    keys = names(rng)[:pairs]
    values = rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), pairs)
    return dict(zip(keys, map(str, values), strict=True))


@dataclass(frozen=True)
class KeyValue(Task):
    """What is the value of X? Invented words and random numbers, no two alike within a prompt.

    Parameters
    ----------
    pairs
        Lines in the prompt, one of which is asked for.
    """

    pairs: int = 10

    name = "key_value"
    summary = "one of several key-value pairs in the prompt"
    knowledge = "contextual"
    scoring = "exact"

    def __post_init__(self) -> None:
        check_pairs(self.name, self.pairs, least=1)

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        rng = random.Random(seed)
        return [self._example(rng) for _ in range(n)]

    def _example(self, rng: random.Random) -> Example:
        pairs = draw(rng, self.pairs)
        at = rng.randrange(self.pairs)
        key, value = list(pairs.items())[at]
        prompt = f"{told(pairs)}\n{asked(key)}"
        return Example(f"{key}-{value}-{at}", prompt, (value,), lead=lead(key), facts={"line": at})
