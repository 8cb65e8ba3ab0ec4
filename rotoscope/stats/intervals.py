"""Intervals on scipy and statsmodels, and what it means that a condition is met.

NaN marks something undefined (a head without a rotary pair, say): rows with one are dropped, and `count` says how many
rows remain. One text or one layer carries no information about spread: the interval is then (NaN, NaN).
All randomness comes from the `seed` argument; numpy's global state is neither read nor changed.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import DescrStatsW

Statistic = Callable[..., Any]
"""Columns of equal length in, one number out."""

_OPERATORS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


class Interval(NamedTuple):
    """Both ends of a confidence interval; (NaN, NaN) where there is none."""

    low: float
    high: float


UNDEFINED = Interval(float("nan"), float("nan"))


def met(interval: tuple[float, float], op: str, threshold: float) -> bool | None:
    """Whether the condition "value `op` threshold" is met.

    Parameters
    ----------
    interval
        Low and high end of the value's interval.
    op
        One of ">=", ">", "<=", "<".

    Returns
    -------
    bool or None
        True (met) when the worse end satisfies the condition, False (missed) when even the better end does not,
        None when the interval straddles the threshold or is undefined.
    """
    low, high = interval
    if np.isnan(low) or np.isnan(high):
        return None
    holds = _OPERATORS[op]
    worse, better = (low, high) if op.startswith(">") else (high, low)
    if holds(worse, threshold):
        return True
    return None if holds(better, threshold) else False


def detectable(interval: tuple[float, float], *, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest effect that an interval of this width detects with `power`, in the interval's units.

    With half width `h = z h / z` the effect is `(z + z_power) h / z`, 1.43 half widths at 95 % and 80 % power.
    """
    low, high = interval
    z = stats.norm.ppf(0.5 + level / 2)
    return float((z + stats.norm.ppf(power)) / z * (high - low) / 2)


def count(*columns: ArrayLike) -> int:
    """How many rows the interval functions use: those without NaN in any column."""
    return len(_complete(columns)[0])


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rank correlation, as a statistic for `layer_bootstrap`.

    0 where one column is constant: it ranks nothing.
    """
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(stats.spearmanr(x, y).statistic)


def mean_t(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Interval of a mean by Student's t, for per-text (or per-seed) means.

    Raises
    ------
    ValueError
        If there is no value.
    """
    (column,) = _complete((values,))
    if len(column) == 1:
        return UNDEFINED
    low, high = DescrStatsW(column).tconfint_mean(alpha=1 - level)
    return Interval(float(low), float(high))


def layer_bootstrap(
    values: ArrayLike | tuple[ArrayLike, ...],
    layers: ArrayLike,
    statistic: Statistic = np.mean,
    *,
    n: int = 2000,
    seed: int,
    level: float = 0.95,
) -> Interval:
    """Percentile interval over heads by resampling whole layers, since heads of one layer are not independent.

    Parameters
    ----------
    values
        One column of length `heads`, or a tuple of such columns whose rows stay together.
    layers
        The layer of each row; layers may have different numbers of rows.
    statistic
        Called as `statistic(*columns)` on the columns of a resample, for example `np.mean`, `spearman`, or
        `lambda trained, random: np.mean(trained - random)`.
    n
        Number of resamples.

    Raises
    ------
    ValueError
        If no row is free of NaN.
    """
    columns = values if isinstance(values, tuple) else (values,)
    *complete, layer = _complete((*columns, layers))
    groups = [np.flatnonzero(layer == value) for value in np.unique(layer)]
    return _bootstrap(tuple(complete), groups, statistic, n, seed, level)


def paired_bootstrap(
    values: ArrayLike | tuple[ArrayLike, ...],
    statistic: Statistic = np.mean,
    *,
    n: int = 2000,
    seed: int,
    level: float = 0.95,
) -> Interval:
    """Percentile interval by resampling items, each with all that was measured on it.

    Parameters
    ----------
    values
        One column of length `items`, or a tuple of such columns whose rows stay together, for example clean and
        changed correctness.
    statistic
        Called as `statistic(*columns)`, for example a retention
        `lambda clean, changed: (np.mean(changed) - chance) / (np.mean(clean) - chance)`.

    Raises
    ------
    ValueError
        If no row is free of NaN.
    """
    complete = _complete(values if isinstance(values, tuple) else (values,))
    groups = [np.array([row]) for row in range(len(complete[0]))]
    return _bootstrap(complete, groups, statistic, n, seed, level)


def means_bootstrap(
    *groups: tuple[ArrayLike, ...], statistic: Statistic, n: int = 2000, seed: int, level: float = 0.95
) -> Interval:
    """Percentile interval of a function of means, by resampling items; each group's items by themselves.

    Parameters
    ----------
    groups
        Columns of equal length that were measured on the same items: clean and changed correctness, say.
    statistic
        Called as `statistic(*means)` with the means of all columns in order, each an array over resamples.

    Raises
    ------
    ValueError
        If a group has no row free of NaN.
    """
    rng = np.random.default_rng(seed)
    means: list[NDArray[np.float64]] = []
    for group in groups:
        columns = _complete(group)
        if len(columns[0]) == 1:
            return UNDEFINED
        rows = rng.integers(0, len(columns[0]), (n, len(columns[0])))
        means += [column[rows].mean(1) for column in columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanquantile(statistic(*means), [0.5 - level / 2, 0.5 + level / 2])
    return Interval(float(low), float(high))


def wilson(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """Wilson's interval of one proportion.

    Raises
    ------
    ValueError
        If `n` is 0 or `successes` is not in 0 … n.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} of {n} is no proportion")
    low, high = proportion_confint(successes, n, alpha=1 - level, method="wilson")
    # Rounding leaves 3e-18 where the end is 0, and then none right would be above a chance of 0.
    return Interval(float(low) if successes else 0.0, float(high) if successes < n else 1.0)


def agresti_min(first: ArrayLike, second: ArrayLike, *, level: float = 0.95) -> Interval:
    """Interval of the difference of two proportions measured on the same items, `mean(first) - mean(second)`.

    The Wald interval after adding one half to each of the four cells of the paired table, cut at -1 and 1
    (Agresti & Min, Statistics in Medicine 24, 2005, "Wald+2").

    Parameters
    ----------
    first, second
        Right (1) or wrong (0) per item, in the same order.

    Raises
    ------
    ValueError
        If there is no item, or a value other than 0 and 1.
    """
    a, b = _complete((first, second))
    if not np.isin((a, b), (0, 1)).all():
        raise ValueError("paired proportions need values 0 and 1 only")
    items = len(a) + 2
    only_first = float(np.sum(a > b)) + 0.5
    only_second = float(np.sum(b > a)) + 0.5
    difference = (only_first - only_second) / items
    error = np.sqrt((only_first + only_second) / items - difference**2) / np.sqrt(items)
    half = float(stats.norm.ppf(0.5 + level / 2) * error)
    return Interval(max(difference - half, -1.0), min(difference + half, 1.0))


def _complete(columns: tuple[ArrayLike, ...]) -> tuple[NDArray[np.float64], ...]:
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    if any(array.ndim != 1 or len(array) != len(arrays[0]) for array in arrays):
        raise ValueError(f"need columns of one length, got shapes {[array.shape for array in arrays]}")
    whole = ~np.any(np.isnan(arrays), axis=0)
    if not whole.any():
        raise ValueError("nothing to average: no row without NaN")
    return tuple(array[whole] for array in arrays)


def _bootstrap(
    columns: tuple[NDArray[np.float64], ...],
    groups: list[NDArray[np.int64]],
    statistic: Statistic,
    n: int,
    seed: int,
    level: float,
) -> Interval:
    if len(groups) == 1:
        return UNDEFINED

    def resampled(chosen: NDArray[np.int64]) -> float:
        rows = np.concatenate([groups[group] for group in chosen])
        return float(statistic(*(column[rows] for column in columns)))

    with warnings.catch_warnings():
        # A constant statistic has an interval of width 0, whatever scipy says of its standard error.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        interval = stats.bootstrap(
            (np.arange(len(groups)),),
            resampled,
            n_resamples=n,
            vectorized=False,
            confidence_level=level,
            # Not BCa: it breaks down where a jackknife value or the whole distribution is constant.
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return Interval(float(interval.low), float(interval.high))
