"""Key-value retrieval: one value of many, asked for by its key."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.invented import names

DIGITS = 4


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
        most = len(names(random.Random(0)))
        if not 1 <= self.pairs <= most:
            raise BadInput(f"key_value: pairs={self.pairs} must be 1 to {most}")

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        rng = random.Random(seed)
        return [self._example(rng) for _ in range(n)]

    def _example(self, rng: random.Random) -> Example:
        keys = names(rng)[: self.pairs]
        values = [str(v) for v in rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), self.pairs)]
        at = rng.randrange(self.pairs)
        lines = "\n".join(f"The value of {key} is {value}." for key, value in zip(keys, values, strict=True))
        lead = f"The value of {keys[at]} is"
        prompt = f"{lines}\nQuestion: What is the value of {keys[at]}?\nAnswer: {lead}"
        return Example(f"{keys[at]}-{values[at]}-{at}", prompt, (values[at],), lead=lead, facts={"line": at})
