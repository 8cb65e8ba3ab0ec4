"""Counterfactual capitals: the prompt supposes otherwise than the weights know."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rotoscope.model.lm import LM
from rotoscope.tasks import geography
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.capitals import cities, question


@dataclass(frozen=True)
class CounterfactualCapitals(Task):
    """Suppose the capital of France is Quito: what is it? Right is what was supposed."""

    name = "counterfactual_capitals"
    summary = "a real country's capital, supposed in the prompt to be another city"
    knowledge = "contextual"
    scoring = "first"

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        rng = random.Random(seed)
        found = []
        for country in geography.countries()[:n]:
            (city,) = cities(lm, rng, 1, unlike=country.capitals)
            text, lead = question(country.name)
            prompt = f"Suppose the capital of {country.name} is {city}.\n{text}"
            facts = {"country": country.name, "true": country.capitals[0]}
            found.append(Example(f"{country.code}-{city}", prompt, (city,), lead=lead, facts=facts))
        return found
