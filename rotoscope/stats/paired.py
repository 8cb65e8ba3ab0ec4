"""What a change did to the same items: accuracy, chance-corrected retention, and a paired test.

Scores are 0 or 1 per item, or parts of 1 (F1, ROUGE), for which proportions' formulas give way to those of means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from statsmodels.stats.multitest import multipletests

from rotoscope.stats import intervals
from rotoscope.stats.intervals import UNDEFINED, Interval


def accuracy(scores: ArrayLike) -> tuple[float, Interval]:
    """Mean score with its interval: Wilson's for right and wrong, Student's t for scores in between."""
    x = np.asarray(scores, dtype=float)
    if np.isin(x, (0, 1)).all():
        return float(x.mean()), intervals.wilson(int(x.sum()), len(x))
    return float(x.mean()), intervals.mean_t(x)


def above_chance(scores: ArrayLike, chance: float) -> bool:
    """Whether the lower bound of the accuracy is above chance."""
    return accuracy(scores)[1].low > chance


def retention(clean: ArrayLike, changed: ArrayLike, chance: float, seed: int) -> tuple[float, Interval]:
    """``(changed − chance) / (clean − chance)`` with a paired bootstrap interval over items.

    NaN where the clean score is not above chance: nothing can be lost there.
    """
    if not above_chance(clean, chance):
        return float("nan"), UNDEFINED
    a, b = np.asarray(clean, dtype=float).mean(), np.asarray(changed, dtype=float).mean()
    interval = intervals.means_bootstrap(
        (clean, changed), statistic=lambda c, h: (h - chance) / (c - chance), seed=seed
    )
    return float((b - chance) / (a - chance)), interval


def mean_change(clean: ArrayLike, changed: ArrayLike, seed: int) -> tuple[float, Interval]:
    """Mean of ``changed − clean`` over items, with a paired bootstrap interval; NaN if one of them is."""
    difference = np.asarray(changed, dtype=float) - np.asarray(clean, dtype=float)
    if np.isnan(difference).any():
        return float("nan"), UNDEFINED
    return float(difference.mean()), intervals.means_bootstrap((difference,), statistic=lambda d: d, seed=seed)


def mcnemar(clean: ArrayLike, changed: ArrayLike) -> float:
    """Exact two-sided McNemar test of two scores on the same items; for scores in between, the sign test."""
    difference = np.asarray(changed, dtype=float) - np.asarray(clean, dtype=float)
    worse, better = int((difference < 0).sum()), int((difference > 0).sum())
    return 1.0 if worse + better == 0 else float(stats.binomtest(worse, worse + better).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected over several tests by Holm's method; NaN stays, and does not count."""
    p = np.array(p_values, dtype=float)
    there = ~np.isnan(p)
    if there.any():
        p[there] = multipletests(p[there], method="holm")[1]
    return [float(x) for x in p]
