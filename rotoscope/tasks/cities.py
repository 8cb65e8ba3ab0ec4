"""Which country a city is in, answered by yes or no, in equal numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rotoscope.model.lm import LM
from rotoscope.tasks import geography
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.filler import around, filler
from rotoscope.tasks.invented import names

CHOICES = ("Yes", "No")


@dataclass(frozen=True)
class Cities(Task):
    """Is Lyon in France? Wrong countries are other items' right ones, so that no country's name tells the answer.

    Parameters
    ----------
    filler
        Tokens of filler in front, to the nearest sentence.
    """

    filler: int = 0

    name = "cities"
    summary = "is this city in that country? yes or no in equal numbers"
    knowledge = "parametric"
    scoring = "choice"

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        rng = random.Random(seed)
        known = list(geography.cities())
        rng.shuffle(known)
        context = "".join(sentence + " " for sentence in filler(lm, self.filler))
        found = []
        for i, (city, country) in enumerate(known[:n]):
            gold = CHOICES[i % 2]
            other = rng.choice([place for _, place in known if place != country])
            asked = country.name if gold == "Yes" else other.name
            found.append(_example(f"{city}-{asked}", context, city, asked, gold))
        rng.shuffle(found)
        return found


@dataclass(frozen=True)
class CitiesInContext(Task):
    """The same question of invented places; which is where stands in the prompt, another city and country beside it.

    Parameters
    ----------
    filler
        Tokens of filler around the facts, to the nearest sentence.
    """

    filler: int = 0

    name = "cities_in_context"
    summary = "the same of invented places, told in the prompt with a distractor"
    knowledge = "contextual"
    scoring = "choice"

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        rng = random.Random(seed)
        outer, places = filler(lm, self.filler), names(rng)
        found = []
        for i in range(min(n, len(places) // 4)):
            city, country, other, elsewhere = places[4 * i : 4 * i + 4]
            inner = [f"{city} is a city in {country}.", f"{other} is a city in {elsewhere}."]
            rng.shuffle(inner)
            gold = CHOICES[i % 2]
            asked = country if gold == "Yes" else elsewhere
            name = f"{city}-{country}-{other}-{elsewhere}-{gold}"
            found.append(_example(name, around(inner, outer) + "\n", city, asked, gold))
        rng.shuffle(found)
        return found


def _example(name: str, context: str, city: str, country: str, gold: str) -> Example:
    prompt = f"{context}Question: Is {city} in {country}?\nAnswer:"
    return Example(name, prompt, (gold,), CHOICES, lead="Answer:", facts={"city": city, "country": country})
