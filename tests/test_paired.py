"""Paired statistics against enumeration of all resamples, other libraries and sums by hand."""

from __future__ import annotations

import itertools
from math import comb
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats import contingency_tables

from rotoscope.stats import paired
from rotoscope.stats.intervals import means_bootstrap, wilson

CLEAN = np.repeat([1.0, 0.0], [12, 8])
"""12 of 20 right; Wilson's lower bound is .387."""


def changed(lost: int, won: int) -> np.ndarray:
    """`CLEAN` with so many right answers lost, and so many wrong ones put right."""
    out = CLEAN.copy()
    out[:lost] = 0
    out[len(out) - won :] = 1
    return out


def test_means_bootstrap_equals_the_enumeration_of_all_resamples() -> None:
    """Two groups of 3 and 4 items: all 3^3 · 4^4 ways to draw them, each group by itself, columns of one together."""
    a, b = np.array([1.0, 0.0, 0.4]), np.array([0.9, 0.2, 0.1])
    c = np.array([0.0, 1.0, 2.0, 5.0])

    def statistic(a: Any, b: Any, c: Any) -> Any:
        return a / (a + b + 1) - 0.1 * c

    every = [
        statistic(a[list(one)].mean(), b[list(one)].mean(), c[list(other)].mean())
        for one in itertools.product(range(3), repeat=3)
        for other in itertools.product(range(4), repeat=4)
    ]
    for level in (0.95, 0.5):
        found = means_bootstrap((a, b), (c,), statistic=statistic, n=100_000, seed=0, level=level)
        assert found == pytest.approx(np.quantile(every, [0.5 - level / 2, 0.5 + level / 2]), abs=0.01)


def test_means_bootstrap_draws_columns_of_a_group_together_and_groups_apart() -> None:
    x = np.random.default_rng(0).normal(size=50)

    def difference(a: Any, b: Any) -> Any:
        return a - b

    assert means_bootstrap((x, x - 0.5), statistic=difference, n=200, seed=0) == pytest.approx((0.5, 0.5))
    low, high = means_bootstrap((x,), (x,), statistic=difference, n=4000, seed=0)
    assert (high - low) / 2 == pytest.approx(1.96 * x.std() * np.sqrt(2 / 50), rel=0.05)
    assert low == pytest.approx(-high, abs=0.04)


def test_means_bootstrap_of_undefined_rows_and_single_items() -> None:
    a, b = np.array([1.0, np.nan, 0.0, 3.0, 4.0]), np.array([0.5, 1.0, 0.0, 1.0, np.nan])
    whole = ~np.isnan(a + b)

    def of(*group: Any, seed: int = 0) -> Any:
        return means_bootstrap(group, statistic=lambda a, b: a - b, n=50, seed=seed)

    assert of(a, b) == of(a[whole], b[whole])
    assert of(a[whole], b[whole]) != of(a[whole], b[whole], seed=1)
    assert np.isnan(of([1.0], [0.5])).all()
    with pytest.raises(ValueError, match="nothing to average"):
        of([np.nan], [1.0])
    with pytest.raises(ValueError, match="one length"):
        of([1.0, 2.0], [1.0])


def test_accuracy_is_a_proportion_or_a_mean() -> None:
    assert paired.accuracy(CLEAN) == (0.6, wilson(12, 20))
    f1 = [0.5, 1.0, 0.25, 0.0, 0.75]
    value, interval = paired.accuracy(f1)
    assert value == 0.5
    expected = stats.ttest_1samp(f1, 0).confidence_interval(0.95)
    assert interval == pytest.approx((expected.low, expected.high))


def test_above_chance_by_the_lower_bound() -> None:
    # Wilson's bound of 12 of 20 is .3866: the accuracy of .6 is above .5, its bound is not.
    assert paired.above_chance(CLEAN, 0.38)
    assert not paired.above_chance(CLEAN, 0.39)
    assert not paired.above_chance(CLEAN, wilson(12, 20).low)


def test_nothing_right_is_not_above_chance_however_many_items() -> None:
    assert [n for n in range(1, 301) if paired.above_chance(np.zeros(n), 0.0)] == []
    assert {wilson(n, n).high for n in range(1, 301)} == {1.0}


def test_retention_is_of_what_is_above_chance() -> None:
    after = changed(4, 1)  # .6 → .45
    assert paired.retention(CLEAN, after, 0.0, 0)[0] == pytest.approx(0.75)
    value, (low, high) = paired.retention(CLEAN, after, 0.1, 0)
    assert value == pytest.approx(0.35 / 0.50)
    rng = np.random.default_rng(7)
    drawn = []
    for _ in range(4000):
        rows = rng.choice(20, 20)
        drawn.append((after[rows].mean() - 0.1) / (CLEAN[rows].mean() - 0.1))
    assert (low, high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.06)
    assert low < value < high


def test_retention_knows_which_items_belong_together() -> None:
    """What is kept item by item has a narrower interval than as many right answers on other items."""
    clean = np.tile([1.0, 0.0], 100)
    same, others = clean.copy(), 1 - clean
    same[:40:2] = 0
    others[1:40:2] = 0
    of_same, of_others = (paired.retention(clean, after, 0.0, 0) for after in (same, others))
    assert of_same[0] == of_others[0] == pytest.approx(0.8)
    width, wider = (interval.high - interval.low for _, interval in (of_same, of_others))
    # Delta method: relative variance of kept/clean is (1 − r)/(r·right) if paired; items that exchange places add up.
    assert width == pytest.approx(2 * 1.96 * np.sqrt(0.8 * 0.2 / 100), rel=0.1)
    assert wider > 2 * width


def test_nothing_can_be_lost_at_chance() -> None:
    value, interval = paired.retention(CLEAN, changed(4, 0), 0.5, 0)
    assert np.isnan(value)
    assert np.isnan(interval).all()


def test_mean_change_is_changed_minus_clean_and_paired() -> None:
    rng = np.random.default_rng(0)
    clean = rng.normal(-5, 3, 80)
    after = clean - 0.4 + rng.normal(0, 0.1, 80)
    value, (low, high) = paired.mean_change(clean, after, 0)
    assert value == pytest.approx((after - clean).mean())
    error = stats.sem(after - clean)
    assert (low, high) == pytest.approx((value - 1.96 * error, value + 1.96 * error), abs=0.005)
    assert paired.mean_change(clean, clean, 0) == (0.0, (0.0, 0.0))


@pytest.mark.parametrize(("lost", "won"), [(8, 0), (6, 1), (1, 6), (3, 3), (4, 2), (0, 0)])
def test_mcnemar(lost: int, won: int) -> None:
    after, n = changed(lost, won), lost + won
    tail = sum(comb(n, i) for i in range(min(lost, won) + 1)) / 2**n
    assert paired.mcnemar(CLEAN, after) == pytest.approx(min(1.0, 2 * tail))
    right, kept = int(CLEAN.sum()) - lost, len(CLEAN) - int(CLEAN.sum()) - won
    table = contingency_tables.mcnemar([[right, lost], [won, kept]], exact=True)
    assert paired.mcnemar(CLEAN, after) == pytest.approx(table.pvalue)


def test_mcnemar_of_scores_in_between_is_the_sign_test() -> None:
    f1 = np.array([0.5, 0.7, 1.0, 0.2, 0.9, 0.4])
    after = np.array([0.4, 0.1, 0.9, 0.2, 0.0, 0.5])  # 4 worse, 1 better, 1 equal
    assert paired.mcnemar(f1, after) == pytest.approx(2 * (1 + 5) / 32)


def test_holm_by_hand() -> None:
    # Ordered .005, .01, .03, .04 times 4, 3, 2, 1 = .02, .03, .06, .04; no later one may be smaller than an earlier.
    assert paired.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert paired.holm([0.6, 0.7]) == pytest.approx([1.0, 1.0])


def test_holm_counts_only_tests_that_were_made() -> None:
    nan = float("nan")
    found = paired.holm([nan, 0.01, nan, 0.04])
    assert np.isnan([found[0], found[2]]).all()
    assert found[1::2] == pytest.approx([0.02, 0.04])
    assert np.isnan(paired.holm([nan, nan])).all()
    assert paired.holm([]) == []


def test_holm_leaves_what_it_was_given_alone() -> None:
    given = np.array([0.01, 0.04])
    paired.holm(given)
    assert given.tolist() == [0.01, 0.04]
