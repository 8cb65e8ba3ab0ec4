"""The texts that studies read: English prose that is on every machine, or the user's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pandas as pd

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.studies.options import Options

SHORTEST = 16
# The longest stretch of text that a token is expected to stand for; texts are cut before they are encoded.
_CHARACTERS_PER_TOKEN = 24


@dataclass(frozen=True)
class Text:
    """A stretch of text as the model reads it."""

    ids: tuple[int, ...]
    start: str


def texts(lm: LM, options: Options) -> list[Text]:
    """Evenly spaced stretches of the text, each cut to the number of tokens asked for.

    Parameters
    ----------
    lm : LM
        Its tokenizer cuts the text.
    options : Options
        ``text`` (default: the prose of ``pydoc_data.topics``), number of texts, tokens of each.

    Returns
    -------
    list of Text
        Fewer than asked for where the text is too short for them to be distinct.

    Raises
    ------
    BadInput
        If the text has fewer than 16 tokens, or the model no tokenizer or another one's.
    """
    tokens = options.n_tokens if lm.trained_length is None else min(options.n_tokens, lm.trained_length)
    if tokens < SHORTEST:
        raise BadInput(f"texts of {tokens} tokens are too short to measure anything: use --tokens {SHORTEST} or more")
    whole = _default() if options.text is None else options.text
    room = whole[: options.n_texts * tokens * _CHARACTERS_PER_TOKEN]
    held = len(lm.encode(room)) if room.strip() else 0
    if held < SHORTEST:
        raise BadInput(f"the text has {held} tokens; at least {SHORTEST} are needed")
    count = min(options.n_texts, max(1, held // tokens))
    some = _stretches(lm, whole, count, tokens)
    while min(len(t.ids) for t in some) < SHORTEST and count > 1:  # blanks may fill a stretch
        count -= 1
        some = _stretches(lm, whole, count, tokens)
    largest, vocabulary = max(max(t.ids) for t in some), lm.anatomy.vocabulary
    if largest >= vocabulary:
        raise BadInput(
            f"the tokenizer of {lm.source} gives ids up to {largest} where the model has {vocabulary} embeddings: it "
            "belongs to another model"
        )
    return some


def _stretches(lm: LM, whole: str, count: int, tokens: int) -> list[Text]:
    stride = len(whole) // count
    parts = (whole[i * stride : (i + 1) * stride] for i in range(count))
    return [
        Text(tuple(lm.encode(part[: tokens * _CHARACTERS_PER_TOKEN])[:tokens].tolist()), part[:80]) for part in parts
    ]


def table(some: list[Text]) -> pd.DataFrame:
    """One row per text: its number, tokens, hash of the token ids, and how it starts."""
    rows = [
        (i, len(t.ids), hashlib.sha256(",".join(map(str, t.ids)).encode()).hexdigest(), t.start)
        for i, t in enumerate(some)
    ]
    return pd.DataFrame(rows, columns=["text", "tokens", "sha256", "start"])


def _default() -> str:
    from pydoc_data.topics import topics

    # The first thousand characters are a table of keywords, not prose.
    return "\n".join(topics.values())[1000:]
