"""Pairs of prompts that differ in one word, each with its own answer: what a swap of that word's states is tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rotoscope.model.lm import LM
from rotoscope.tasks import find

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One prompt of a pair: its word stands once in it, and ``answer`` follows it."""

    word: str
    prompt: str
    answer: str


def _capitals(lm: LM) -> Iterator[Side]:
    for example in find("capitals").examples(lm, 100, 0):
        country = str(example.facts["country"])
        yield Side(country, f"The capital city of {country} is", example.gold[0])


def _months(lm: LM) -> Iterator[Side]:
    for month, following in pairwise((*_MONTHS, _MONTHS[0])):
        yield Side(month, f"April, May. September, October. {month},", following)


def _numbers(lm: LM) -> Iterator[Side]:
    for number, following in pairwise(_NUMBERS):
        yield Side(number, f"Count: two, three. Count: eleven, twelve. Count: {number},", following)


SETS: dict[str, Callable[[LM], Iterator[Side]]] = {"capitals": _capitals, "months": _months, "numbers": _numbers}
"""Sets of prompts by name."""


def chosen(sides: Sequence[tuple[int, int]], n: int, seed: int) -> list[tuple[int, int]]:
    """Ordered pairs of prompts that can trade places.

    Parameters
    ----------
    sides : sequence of (int, int)
        Per prompt, the number of its word's tokens and the first token of its answer: both must suit.
    n : int
        At most so many pairs, drawn by ``seed``.
    """
    pairs = [
        (i, j)
        for i, (width, answer) in enumerate(sides)
        for j, (other_width, other_answer) in enumerate(sides)
        if i != j and width == other_width and answer != other_answer
    ]
    order = np.random.default_rng(seed).permutation(len(pairs))[:n]
    return [pairs[i] for i in sorted(order)]
