"""Known values: the parametric twin of key-value retrieval, on models that were taught these values in training."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from rotoscope.model.lm import LM
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.key_value import DIGITS, asked, check_pairs, draw, lead, told

_STARTS = "Arb Cre Dul Fos Gim Jat Krol Lin Mip Nol"
_ENDS = "ane eke ilt oph uzz ard"


def known() -> dict[str, str]:
    """The 60 keys that the controls were taught, with their values; none of them is a key of key-value retrieval."""
    keys = [a + b for a, b in product(_STARTS.split(), _ENDS.split())]
    values = random.Random(0).sample(range(10 ** (DIGITS - 1), 10**DIGITS), len(keys))
    return dict(zip(keys, map(str, values), strict=True))


@dataclass(frozen=True)
class KnownValues(Task):
    """What is the value of X? It is in the weights of the controls; the pairs in the prompt are other keys'.

    Parameters
    ----------
    pairs
        Lines in the prompt, none of which is asked for.
    """

    pairs: int = 10

    name = "known_values"
    summary = "a value that the controls were taught, behind key-value pairs of no use"
    knowledge = "parametric"
    scoring = "exact"

    def __post_init__(self) -> None:
        check_pairs(self.name, self.pairs, least=0)

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        rng = random.Random(seed)
        taught = list(known().items())
        return [self._example(rng, *pair) for pair in rng.sample(taught, min(n, len(taught)))]

    def _example(self, rng: random.Random, key: str, value: str) -> Example:
        prompt = "\n".join(filter(None, (told(draw(rng, self.pairs)), asked(key))))
        return Example(f"{key}-{value}", prompt, (value,), lead=lead(key))
