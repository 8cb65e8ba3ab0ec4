"""Passkey: a number hidden in filler, in prompts of an exact number of tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.tasks.base import Example, Task
from rotoscope.tasks.filler import sentences

LEAD = "The pass key is"
# What fills the tokens that no whole sentence fits in; a space and one word are one token almost everywhere.
_WORDS = (" again", " and", " on", " so", " a", ".", "!")


@dataclass(frozen=True)
class Passkey(Task):
    """What is the pass key? It was told somewhere in the prompt, and the question is asked at its end.

    Parameters
    ----------
    tokens
        Length of every prompt in tokens of the model's own tokenizer, special ones included, to the token (without a
        chat template, which adds its own).
    depth
        Share of the filler before the key, in percent; -1 spreads it evenly from 0 to 100 over the items.
    digits
        Of the key, 1 to 18; all of them must be right.
    """

    tokens: int = 128
    depth: int = -1
    digits: int = 5

    name = "passkey"
    summary = "a number hidden in filler, prompts of exactly so many tokens"
    knowledge = "contextual"
    scoring = "exact"

    def __post_init__(self) -> None:
        if not -1 <= self.depth <= 100:
            raise BadInput(f"passkey: depth={self.depth} must be 0 to 100 percent, or -1 for all depths")
        if not 1 <= self.digits <= 18:
            raise BadInput(f"passkey: digits={self.digits} must be 1 to 18")

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        low, high = 10 ** (self.digits - 1), 10**self.digits
        n = min(n, high - low)
        layout = _Layout(lm, self.tokens)
        found = []
        for i, key in enumerate(random.Random(seed).sample(range(low, high), n)):
            depth = self.depth if self.depth >= 0 else round(100 * i / max(1, n - 1))
            prompt = layout.prompt(str(key), depth)
            facts = {"depth": depth, "tokens": self.tokens, "digits": self.digits}
            found.append(Example(f"{key}-{depth}", prompt, (str(key),), lead=LEAD, facts=facts))
        return found


def write(key: str, depth: int, around: list[str]) -> str:
    """A prompt with so many percent of the filler before the key."""
    at = round(len(around) * depth / 100)
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    return " ".join([*around[:at], needle, *around[at:], f"What is the pass key? {LEAD}"])


class _Layout:
    """How much filler makes a prompt of the right length; what fitted one key is tried first for the next."""

    def __init__(self, lm: LM, tokens: int):
        self.lm, self.tokens = lm, tokens
        self.last: list[str] = []

    def prompt(self, key: str, depth: int) -> str:
        text = write(key, depth, self.last)
        if self._length(text) == self.tokens:
            return text
        most = self._sentences(key, depth)
        for count in range(most, max(-1, most - 4), -1):
            around = self._filled(key, depth, sentences(count))
            if around is not None:
                self.last = around
                return write(key, depth, around)
        raise BadInput(f"passkey: no filler gives a prompt of exactly {self.tokens} tokens here: choose another number")

    def _sentences(self, key: str, depth: int) -> int:
        """The most sentences that fit."""
        least = self._length(write(key, depth, []))
        if least > self.tokens:
            raise BadInput(f"passkey: tokens={self.tokens} is too short: key and question alone take {least}")
        low, high = 0, self.tokens  # a sentence takes at least one token
        while low < high:
            middle = (low + high + 1) // 2
            if self._length(write(key, depth, sentences(middle))) <= self.tokens:
                low = middle
            else:
                high = middle - 1
        return low

    def _filled(self, key: str, depth: int, whole: list[str]) -> list[str] | None:
        """The same filler and a few more words, the longest that fit; None where they do not come out."""
        more, around = "", whole
        while (short := self.tokens - self._length(write(key, depth, around))) > 0:
            for word in _WORDS:
                longer = [*whole, (more + word).lstrip()]
                gain = short - (self.tokens - self._length(write(key, depth, longer)))
                if 0 < gain <= short:
                    more, around = more + word, longer
                    break
            else:
                return None
        return around

    def _length(self, text: str) -> int:
        return len(self.lm.encode(text))
