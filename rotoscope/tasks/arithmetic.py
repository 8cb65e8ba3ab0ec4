"""Two-step arithmetic with small numbers, after a few worked examples."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.tasks.base import Example, Task

Terms = tuple[int, ...]
LARGEST = 50


@dataclass(frozen=True)
class Arithmetic(Task):
    """What is 3 + 1 + 4? No worked example has the same sum, so that copying one never scores.

    Chance is what always naming the commonest sum would score.

    Parameters
    ----------
    largest
        Of the numbers to add, which start at 1; 2 to 50.
    shots
        Worked examples in front.
    given
        Of the two steps, how many are written out in the question as they are in the examples: with 1, the prompt ends
        in "3 + 1 + 4 = 4 + 4 =", which small models can go on from; with 0 in "3 + 1 + 4 =".
    """

    largest: int = 9
    shots: int = 4
    given: int = 1

    name = "arithmetic"
    summary = "sums of three small numbers in two steps, after worked examples"
    knowledge = "reasoning"
    scoring = "exact"

    def __post_init__(self) -> None:
        if not 2 <= self.largest <= LARGEST or self.shots < 0 or self.given not in (0, 1):
            raise BadInput(f"arithmetic: largest must be 2 to {LARGEST}, shots 0 or more, given 0 or 1")

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        every = _every(self.largest)
        found = []
        for terms in random.Random(seed).sample(every, min(n, len(every))):
            others = [other for other in every if sum(other) != sum(terms)]
            worked = random.Random(str(terms)).sample(others, min(self.shots, len(others)))  # the item's own
            text, lead = self._question(terms)
            prompt = "".join(f"{self._question(w)[0]} {sum(w)}\n" for w in worked) + text
            name = "+".join(map(str, terms))
            found.append(Example(name, prompt, (str(sum(terms)),), lead=lead, facts={"worked": len(worked)}))
        return found

    def chance(self, example: Example) -> float:
        return _commonest(self.largest)

    def _question(self, terms: Terms) -> tuple[str, str]:
        total = " + ".join(map(str, terms))
        step = f" {terms[0] + terms[1]} + {terms[2]} =" if self.given else ""
        lead = f"{total} ={step}"
        return f"Question: What is {total}?\nAnswer: {lead}", lead


def _every(largest: int) -> list[Terms]:
    return list(product(range(1, largest + 1), repeat=3))


@lru_cache
def _commonest(largest: int) -> float:
    """The share of the commonest sum."""
    sums = Counter(map(sum, _every(largest)))
    return max(sums.values()) / sums.total()
