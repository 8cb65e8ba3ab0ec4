"""Text out of order: tokens or words that change places with others, and how far they move.

Everything here is about positions alone. The same seed disturbs the same tokens, whether they change places with a
neighbour or with any other of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM

KINDS = ("adjacent", "arbitrary", "window-8")

Seed = int | Sequence[int]


@dataclass(frozen=True)
class Transposition:
    """A new order of a text's tokens.

    Attributes
    ----------
    order
        Which token of the text stands at each position now, ``[tokens]``.
    """

    order: NDArray[np.int64]

    @property
    def displacement(self) -> NDArray[np.int64]:
        """How many positions each of the text's tokens moved, to the right if positive, ``[tokens]``."""
        return np.argsort(self.order) - np.arange(len(self.order))

    @property
    def moved(self) -> NDArray[np.bool_]:
        """Which positions hold another token than before; the same are those whose token stands elsewhere."""
        moved: NDArray[np.bool_] = self.order != np.arange(len(self.order))
        return moved

    @property
    def share(self) -> float:
        """Share of the tokens that moved."""
        return float(self.moved.mean())

    @property
    def mean_shift(self) -> float:
        """Mean distance over which tokens moved, of those that did; 0 if none."""
        return float(np.abs(self.displacement).sum() / max(1, self.moved.sum()))

    def apply(self, ids: Sequence[int]) -> list[int]:
        """The ids in their new order."""
        return [ids[i] for i in self.order]


def transpose(
    tokens: int, share: float, kind: str = "adjacent", *, seed: Seed, starts: Sequence[int] | None = None
) -> Transposition:
    """Let a share of a text's tokens, or words, change places. Position 0, or the word that it is in, stays.

    Parameters
    ----------
    tokens : int
        Length of the text.
    share : float
        Share of its tokens (words) to move, 0 to 1. So many pairs of neighbours are drawn, evenly over all ways to
        draw them; what came of it is ``Transposition.share``.
    kind : str
        ``adjacent``: the two of each pair change places. ``arbitrary``: the same tokens, paired at random.
        ``window-W``: runs of W tokens (words), each of which is permuted so that none stays in its place.
    seed : int or sequence of int
        What is drawn.
    starts : sequence of int, optional
        First token of each word, 0 in front; see :func:`word_starts`. By default tokens are moved. Arbitrary pairs are
        of words of the same number of tokens, so that nothing between them moves; a word left without one stays.

    Returns
    -------
    Transposition

    Raises
    ------
    BadInput
        If there is no such kind, or there are too few tokens for such a share.
    """
    if not 0 <= share <= 1:
        raise BadInput(f"a share of tokens to move is from 0 to 1, not {share}")
    bounds = np.append(np.arange(tokens) if starts is None else np.asarray(starts), tokens)
    if bounds[0] != 0 or np.any(np.diff(bounds) < 1):
        raise BadInput("words must start at rising positions, the first at 0")
    units, rng = len(bounds) - 1, np.random.default_rng(seed)
    place = np.arange(units)
    width = _width(kind)
    if width:
        for run in _runs(units, width, share, rng):
            place[run] = _without_fixed_points(run, rng)
    else:
        pairs = _neighbours(units, share, rng)
        if kind == "arbitrary":
            pairs = _at_random(pairs.ravel(), np.diff(bounds), rng)
        place[pairs[:, 0]], place[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    return Transposition(np.concatenate([np.arange(bounds[u], bounds[u + 1]) for u in place]))


def word_starts(lm: LM, ids: Sequence[int]) -> list[int]:
    """First token of every word: one that a blank stands before or at the beginning of.

    Raises
    ------
    BadInput
        If the model came without a tokenizer.
    """
    if lm.tokenizer is None:
        raise BadInput(f"words need a tokenizer, and {lm.source} has none: move tokens")
    texts = [lm.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False) for n in range(len(ids) + 1)]
    own = [after[len(before) :] for before, after in pairwise(texts)]
    blank = [before[-1:].isspace() or text[:1].isspace() for before, text in zip(texts, own, strict=False)]
    return [0, *(i for i in range(1, len(ids)) if blank[i])]


def _width(kind: str) -> int:
    """Of the windows, 0 where pairs are swapped."""
    name, _, number = kind.partition("-")
    if name == "window" and number.isdecimal() and int(number) > 1:
        return int(number)
    if kind not in ("adjacent", "arbitrary"):
        raise BadInput(f"text is transposed by adjacent, arbitrary or window-8 (any width from 2), not {kind!r}")
    return 0


def _neighbours(units: int, share: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Disjoint pairs of neighbours ``[pairs, 2]``, unit 0 in none of them, all such sets being equally likely."""
    count = round(share * units / 2)
    places = units - 1 - count  # a pair takes one place, and so does every unit that stays
    if count > places:
        raise BadInput(f"of {units} tokens or words, the first fixed, {share:.0%} cannot change places in pairs")
    first = 1 + np.sort(rng.choice(places, count, replace=False)) + np.arange(count)
    return np.stack([first, first + 1], 1)


def _at_random(members: NDArray[np.int64], lengths: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Pairs among ``members`` whose lengths are the same."""
    pairs = [np.empty((0, 2), int)]
    for length in np.unique(lengths[members]):
        alike = rng.permutation(members[lengths[members] == length])
        pairs.append(alike[: len(alike) // 2 * 2].reshape(-1, 2))
    return np.concatenate(pairs)


def _runs(units: int, width: int, share: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Disjoint runs of neighbours ``[runs, width]``, unit 0 in none of them."""
    count, most = round(share * units / width), (units - 1) // width
    if count > most:
        raise BadInput(f"of {units} tokens or words, the first fixed, {share:.0%} do not fit into runs of {width}")
    first = 1 + width * np.sort(rng.choice(most, count, replace=False)) if most else np.empty(0, int)
    return first[:, None] + np.arange(width)


def _without_fixed_points(run: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A random cyclic order (Sattolo): none stays where it was."""
    out = run.copy()
    for i in range(len(out) - 1, 0, -1):
        j = rng.integers(i)
        out[i], out[j] = out[j], out[i]
    return out
