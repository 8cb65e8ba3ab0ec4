"""Fieller's interval for a ratio of two means measured on the same items."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from rotoscope.stats.intervals import UNDEFINED, Interval


def ratio_t(numerator: ArrayLike, denominator: ArrayLike, *, level: float = 0.95) -> Interval:
    """Interval of ``mean(numerator) / mean(denominator)`` by Student's t (Fieller, J. R. Stat. Soc. B 16, 1954).

    It holds every ``r`` for which the mean of ``numerator - r · denominator`` is not told from 0 by a paired t test;
    exact for few items, where a bootstrap is too narrow. (NaN, NaN) for fewer than two items, and where the
    denominator's own mean is not above 0 by that test: no ratio is excluded then.

    Parameters
    ----------
    numerator, denominator
        One value per item (text), in the same order; rows with NaN are dropped.
    """
    a, b = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    whole = ~(np.isnan(a) | np.isnan(b))
    a, b = a[whole], b[whole]
    n = len(a)
    if n < 2:
        return UNDEFINED
    (va, cov), (_, vb) = np.cov(a, b) * stats.t.ppf(0.5 + level / 2, n - 1) ** 2 / n
    # (mean a - r mean b)² ≤ var(a - r b) · t² / n, a quadratic in r.
    square, linear, constant = b.mean() ** 2 - vb, a.mean() * b.mean() - cov, a.mean() ** 2 - va
    if square <= 0 or b.mean() <= 0:
        return UNDEFINED
    half = np.sqrt(max(linear**2 - square * constant, 0.0))
    return Interval(float((linear - half) / square), float((linear + half) / square))
