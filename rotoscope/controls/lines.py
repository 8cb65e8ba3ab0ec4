"""Prompts that rows of text begin with, so that there is an ability to read from context, and one to know, to break."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rotoscope.tasks.filler import sentences
from rotoscope.tasks.key_value import asked, draw, told
from rotoscope.tasks.known_values import known
from rotoscope.tasks.passkey import write

SHARES = {"key_value": 0.6, "known": 0.15, "passkey": 0.25}
PAIRS = (1, 1, 1, 2, 2, 2, 3, 4, 6, 10)
"""How many pairs a key-value prompt tells; a single one is where copying is learned first."""
SENTENCES = (1, 2, 3, 4, 8, 12, 16)
"""Length of a passkey's filler."""
TAUGHT = 0.15
"""Share of a key-value prompt's questions that ask for a known value instead."""


def documents(rng: random.Random) -> Iterator[str]:
    """Key-value, known-value and passkey prompts with their answers, without end."""
    kinds = {"key_value": _key_value, "known": _known, "passkey": _passkey}
    while True:
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        yield kinds[kind](rng)


def _key_value(rng: random.Random) -> str:
    """Some pairs, then questions: most for one of them, some for a known value."""
    pairs = draw(rng, rng.choice(PAIRS))
    taught = known()
    lines = [told(pairs)]
    for _ in range(rng.randint(3, 8)):
        of = taught if rng.random() < TAUGHT else pairs
        key = rng.choice(list(of))
        lines.append(f"{asked(key)} {of[key]}.")
    return "\n".join(lines)


def _known(rng: random.Random) -> str:
    taught = known()
    return "\n".join(f"{asked(key)} {taught[key]}." for key in rng.sample(list(taught), 12))


def _passkey(rng: random.Random) -> str:
    key = str(rng.randrange(10**4, 10**5))
    return f"{write(key, rng.randint(0, 100), sentences(rng.choice(SENTENCES)))} {key}."
