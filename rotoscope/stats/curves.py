"""What a change at every depth does to the same items: losses, safe depth and retention, with bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from rotoscope.stats import intervals, paired
from rotoscope.stats.intervals import Interval

Array = NDArray[np.float64]
_Z = float(stats.norm.ppf(0.975))


@dataclass(frozen=True)
class Curve:
    """One task under one manipulation, at several depths.

    Attributes
    ----------
    layers
        Layers of the model, ``L``; a change at ``L`` is none.
    ks
        Depths tested, ascending, all below ``L``, ``[K]``.
    clean, logprob
        Right (1) or wrong (0) and log-likelihood of the gold answer in nats, per item, ``[n]``.
    changed, changed_logprob
        The same under the change at each depth, ``[n, K]``.
    chance
        Accuracy of guessing.
    """

    layers: int
    ks: Array
    clean: Array
    changed: Array
    logprob: Array
    changed_logprob: Array
    chance: float = 0.0

    @property
    def n(self) -> int:
        return len(self.clean)

    @cached_property
    def loss_high(self) -> Array:
        """Upper 95 % bound of the share of items lost at each depth (Agresti & Min 2005), ``[K]``."""
        return np.array([intervals.agresti_min(self.clean, column).high for column in self.changed.T])

    @cached_property
    def nats_high(self) -> Array:
        """Upper 95 % bound of the log-likelihood lost at each depth, nats, ``[K]``."""
        lost = self.logprob[:, None] - self.changed_logprob
        # A depth at which the model gives no number for an item is not safe.
        return np.array([np.inf if np.isnan(column).any() else intervals.mean_t(column).high for column in lost.T])

    def above_chance(self) -> bool:
        return paired.above_chance(self.clean, self.chance)

    def safe(self, epsilon: float, nats: float | None = None) -> float:
        """Smallest depth from which on, at it and all deeper ones tested, the loss is below ``epsilon``.

        Parameters
        ----------
        epsilon
            Share of items whose loss the upper bound must stay below.
        nats
            What the log-likelihood loss's upper bound must stay below besides, if anything.

        Returns
        -------
        float
            ``L`` where no depth tested is safe.
        """
        good = self.loss_high < epsilon
        if nats is not None:
            good &= self.nats_high < nats
        return float(_first_safe(good[None], self.ks, self.layers)[0])

    def draws(self, n: int, seed: int) -> tuple[Array, Array]:
        """Items drawn again ``n`` times: mean clean score ``[n]`` and mean changed scores ``[n, K]``."""
        rows = self._rows(n, seed)
        return self.clean[rows].mean(1), self.changed[rows].mean(1)

    def safe_draws(self, epsilon: float, n: int, seed: int, nats: float | None = None) -> Array:
        """Safe depth on items drawn again, ``[n]``; arguments as for `safe`."""
        rows = self._rows(n, seed)
        lost = (self.clean[:, None] > self.changed).astype(float)
        won = (self.clean[:, None] < self.changed).astype(float)
        good = _upper(lost[rows].sum(1), won[rows].sum(1), self.n) < epsilon
        if nats is not None:
            drawn = (self.logprob[:, None] - self.changed_logprob)[rows]
            error = drawn.std(1, ddof=1) / np.sqrt(self.n)
            good &= drawn.mean(1) + stats.t.ppf(0.975, self.n - 1) * error < nats
        return _first_safe(good, self.ks, self.layers)

    def highest_retention(self, deepest: float) -> float:
        """The largest chance-corrected retention over the depths up to ``deepest``."""
        return float(self._retained(self.clean.mean(), self.changed.mean(0))[self.ks <= deepest].max())

    def highest_retention_draws(self, deepest: float, n: int, seed: int) -> Array:
        """The same on items drawn again, ``[n]``."""
        clean, changed = self.draws(n, seed)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept: Array = self._retained(clean[:, None], changed)[:, self.ks <= deepest].max(1)
        return kept

    def _retained(self, clean: Array, changed: Array) -> Array:
        kept: Array = (changed - self.chance) / (clean - self.chance)
        return kept

    def _rows(self, n: int, seed: int) -> NDArray[np.int64]:
        return np.random.default_rng(seed).integers(0, self.n, (n, self.n))


def percentiles(draws: Array) -> Interval:
    """95 % percentile interval of what was drawn again and again."""
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Interval(float(low), float(high))


def _upper(lost: Array, won: Array, n: int) -> Array:
    """Upper end of `intervals.agresti_min` from counts of items lost and won."""
    lost, won, n = lost + 0.5, won + 0.5, n + 2
    difference = (lost - won) / n
    high: Array = np.minimum(difference + _Z * np.sqrt((lost + won) / n - difference**2) / np.sqrt(n), 1.0)
    return high


def _first_safe(good: NDArray[np.bool_], ks: Array, layers: int) -> Array:
    """Per row, the smallest depth from which on all are good; ``layers`` where the deepest is not."""
    onward = np.flip(np.logical_and.accumulate(np.flip(good, -1), -1), -1)
    return np.where(onward.any(-1), ks[onward.argmax(-1)], layers).astype(float)
