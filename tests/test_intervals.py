"""Intervals against published examples, exhaustive enumeration and coverage in simulation."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from scipy import stats

from rotoscope.stats import intervals
from rotoscope.stats.intervals import agresti_min, detectable, layer_bootstrap, mean_t, met, paired_bootstrap, wilson


@pytest.mark.parametrize(
    ("interval", "op", "threshold", "expected"),
    [
        ((0.96, 0.98), ">=", 0.95, True),
        ((0.95, 0.98), ">=", 0.95, True),
        ((0.95, 0.98), ">", 0.95, None),
        ((0.90, 0.98), ">=", 0.95, None),
        ((0.90, 0.95), ">=", 0.95, None),
        ((0.90, 0.95), ">", 0.95, False),
        ((0.90, 0.94), ">=", 0.95, False),
        ((0.01, 0.05), "<=", 0.05, True),
        ((0.01, 0.05), "<", 0.05, None),
        ((0.01, 0.06), "<=", 0.05, None),
        ((0.05, 0.06), "<=", 0.05, None),
        ((0.05, 0.06), "<", 0.05, False),
        ((0.06, 0.07), "<=", 0.05, False),
        ((float("nan"), float("nan")), ">", 0.0, None),
    ],
)
def test_met(interval: tuple[float, float], op: str, threshold: float, expected: bool | None) -> None:
    assert met(interval, op, threshold) is expected


def test_met_refuses_other_operators() -> None:
    with pytest.raises(KeyError):
        met((0, 1), "==", 0)


def test_mean_t_on_student_s_sleep_data() -> None:
    # Student 1908, hours of sleep gained; R's help page of t.test prints this paired interval.
    first = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
    second = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    assert mean_t(first - second) == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)
    ninety = stats.ttest_1samp(first - second, 0).confidence_interval(0.9)
    assert mean_t(first - second, level=0.9) == pytest.approx((ninety.low, ninety.high))


def test_mean_t_of_few_or_equal_values() -> None:
    assert np.isnan(mean_t([0.5])).all()
    assert mean_t([0.25, 0.25, np.nan, 0.25]) == (0.25, 0.25)
    assert mean_t([0.1, np.nan, 0.3]) == mean_t([0.1, 0.3])
    assert intervals.count([0.1, np.nan, 0.3], [np.nan, 1, 1]) == 1


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_on_newcombe_s_table(successes: int, n: int, low: float, high: float) -> None:
    # Newcombe, Statistics in Medicine 17, 1998, 857-872, Table I, method 3.
    assert wilson(successes, n) == pytest.approx((low, high), abs=6e-5)


def test_agresti_min_on_a_published_example() -> None:
    # PropCIs (R), help page of diffpropci.mp: of 160 pairs, 40 and 20 are discordant; its sign is second minus first.
    first = np.repeat([1, 0, 1, 0], [40, 20, 60, 40])
    second = np.repeat([0, 1, 1, 0], [40, 20, 60, 40])
    shuffled = np.random.default_rng(0).permutation(160)
    assert agresti_min(first[shuffled], second[shuffled]) == pytest.approx((0.03089632, 0.21601726), abs=1e-8)
    assert agresti_min(second > 0, first > 0) == pytest.approx((-0.21601726, -0.03089632), abs=1e-8)
    low, high = agresti_min([1] * 4, [0] * 4)
    assert 0 < low < high == 1.0


def test_agresti_min_covers_at_every_small_table() -> None:
    # Exact coverage at n = 20: sum multinomial probabilities of the tables whose interval holds the true difference.
    n, p = 20, (0.3, 0.1, 0.6)
    truth = p[0] - p[1]
    covered = 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            low, high = agresti_min([1] * b + [0] * (n - b), [0] * b + [1] * c + [0] * (n - b - c))
            if low <= truth <= high:
                covered += stats.multinomial.pmf([b, c, n - b - c], n, p)
    assert 0.94 < covered < 0.975


def test_layer_bootstrap_equals_the_enumeration_of_all_resamples() -> None:
    # Four layers of unequal size: all 4^4 ways to draw four layers with replacement.
    layers = np.array([0, 2, 2, 5, 5, 5, 9, 9, 9, 9])
    values = np.array([3.0, 1.0, 2.5, 0.2, 0.7, 0.1, 4.0, 4.5, 6.0, 5.0])
    groups = [values[layers == layer] for layer in (0, 2, 5, 9)]
    for statistic in (np.mean, np.max):
        all_of_them = [statistic(np.concatenate(drawn)) for drawn in itertools.product(groups, repeat=4)]
        expected = np.quantile(all_of_them, [0.025, 0.975])
        assert layer_bootstrap(values, layers, statistic, n=20_000, seed=0) == pytest.approx(expected, abs=0.15)


def test_layer_bootstrap_covers_where_heads_of_a_layer_agree() -> None:
    rng = np.random.default_rng(0)
    layers = np.repeat(np.arange(20), 6)
    covered = covered_by_heads = 0
    for trial in range(150):
        values = np.repeat(rng.normal(size=20), 6) + 0.3 * rng.normal(size=120)
        low, high = layer_bootstrap(values, layers, n=200, seed=trial)
        covered += low <= 0 <= high
        low, high = paired_bootstrap(values, n=200, seed=trial)
        covered_by_heads += low <= 0 <= high
    assert 0.85 < covered / 150 < 0.99
    assert covered_by_heads / 150 < 0.75


def test_bootstrap_keeps_rows_together() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=60)
    layers = np.repeat(np.arange(10), 6)
    assert layer_bootstrap((x, np.exp(x)), layers, intervals.spearman, n=50, seed=0) == pytest.approx((1, 1))
    assert paired_bootstrap((x, x - 0.5), lambda a, b: np.mean(a - b), n=50, seed=0) == pytest.approx((0.5, 0.5))
    ranks = stats.rankdata(x), stats.rankdata(x**2)
    assert intervals.spearman(x, x**2) == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_paired_bootstrap_of_a_mean_is_near_the_t_interval() -> None:
    values = np.random.default_rng(1).normal(size=200)
    assert paired_bootstrap(values, n=4000, seed=0) == pytest.approx(mean_t(values), abs=0.02)


def test_bootstrap_is_decided_by_its_seed_alone() -> None:
    values = np.random.default_rng(0).normal(size=30)
    np.random.seed(5)
    before = str(np.random.get_state())
    one = paired_bootstrap(values, n=100, seed=1)
    assert str(np.random.get_state()) == before
    np.random.seed(6)
    assert paired_bootstrap(values, n=100, seed=1) == one
    assert paired_bootstrap(values, n=100, seed=2) != one


def test_bootstrap_drops_undefined_rows() -> None:
    values, layers = np.array([1.0, np.nan, 2.0, 4.0]), np.array([0, 1, 1, 2])
    whole = ~np.isnan(values)
    expected = layer_bootstrap(values[whole], layers[whole], n=100, seed=0)
    assert layer_bootstrap(values, layers, n=100, seed=0) == expected
    assert np.isnan(layer_bootstrap([1.0, 2.0], [3, 3], n=100, seed=0)).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: mean_t([]),
        lambda: mean_t([np.nan]),
        lambda: layer_bootstrap([np.nan, 1], [0, np.nan], seed=0),
        lambda: paired_bootstrap(([1, 2], [1]), np.mean, seed=0),
        lambda: agresti_min([], []),
        lambda: agresti_min([0.5], [1]),
        lambda: wilson(0, 0),
        lambda: wilson(3, 2),
    ],
)
def test_nothing_to_average_is_an_error(call: object) -> None:
    with pytest.raises(ValueError, match=r"nothing to average|one length|no proportion|0 and 1"):
        call()  # type: ignore[operator]


def test_detectable_effect_has_the_power_it_promises() -> None:
    error = 0.3
    effect = detectable((1 - stats.norm.ppf(0.975) * error, 1 + stats.norm.ppf(0.975) * error))
    power = stats.norm.sf(stats.norm.ppf(0.975), loc=effect / error)
    assert power == pytest.approx(0.8)


def test_a_spearman_over_270_heads_is_quick() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=270)
    started = time.perf_counter()
    layer_bootstrap((x, x + rng.normal(size=270)), np.repeat(np.arange(30), 9), intervals.spearman, seed=0)
    assert time.perf_counter() - started < 3
