"""Filler: sentences that say nothing, counted in tokens of the model's own tokenizer."""

from __future__ import annotations

from bisect import bisect_left
from itertools import cycle, islice

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.tasks.encode import plain_ids

SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)


def sentences(count: int) -> list[str]:
    """So many sentences, over and over."""
    return list(islice(cycle(SENTENCES), count))


def filler(lm: LM, tokens: int) -> list[str]:
    """The sentences that come nearest to a number of tokens; 24 tokens a round on the demo model's tokenizer."""
    if tokens < 0:
        raise BadInput(f"filler={tokens} must be 0 or more tokens")

    def length(count: int) -> int:
        return len(plain_ids(lm, " ".join(sentences(count))))

    enough = bisect_left(range(tokens), tokens, key=length)  # a sentence has at least one token
    if enough and tokens - length(enough - 1) <= length(enough) - tokens:
        enough -= 1
    return sentences(enough)


def around(inner: list[str], outer: list[str]) -> str:
    """Sentences with half of the filler before them and the rest after them."""
    half = len(outer) // 2
    return " ".join([*outer[:half], *inner, *outer[half:]])
