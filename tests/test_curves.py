"""Curves over depth against loops written from the rule, with Agresti and Min's interval for every resample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rotoscope.stats.curves import Curve, _upper, percentiles
from rotoscope.stats.intervals import agresti_min

LAYERS = 20


def curve(
    lost: Sequence[int],
    *,
    n: int = 100,
    right: int = 80,
    won: int = 0,
    nats: Any = 0.0,
    ks: Sequence[float] | None = None,
    layers: int = LAYERS,
    chance: float = 0.0,
) -> Curve:
    """At each depth the first ``lost`` right answers are lost, the last ``won`` wrong ones found, ``nats`` lost."""
    clean = (np.arange(n) < right).astype(float)
    changed = np.repeat(clean[:, None], len(lost), 1)
    for column, count in enumerate(lost):
        changed[:count, column] = 0
    changed[n - won :] = 1
    logprob = np.linspace(-3, -1, n)
    spread = np.tile([-0.01, 0.01], n // 2)
    after = logprob[:, None] + spread[:, None] - np.broadcast_to(np.asarray(nats, float), len(lost))
    depths = np.arange(len(lost), dtype=float) if ks is None else np.asarray(ks, float)
    return Curve(layers, depths, clean, changed, logprob, after, chance)


def slow_safe(c: Curve, epsilon: float, nats: float | None = None) -> float:
    """The rule's words: the smallest k such that there and at all deeper tested k the upper bound is below."""

    def harmless(column: int) -> bool:
        if not agresti_min(c.clean, c.changed[:, column]).high < epsilon:
            return False
        lost = c.logprob - c.changed_logprob[:, column]
        return nats is None or stats.ttest_1samp(lost, 0).confidence_interval(0.95).high < nats

    for i, k in enumerate(c.ks):
        if all(harmless(j) for j in range(i, len(c.ks))):
            return float(k)
    return float(c.layers)


def random_curve(rng: np.random.Generator, n: int = 100) -> Curve:
    """Losses that shrink with depth, unevenly, about the number that is just allowed."""
    ks = np.sort(rng.choice(LAYERS, 8, replace=False)).astype(float)
    clean = (rng.random(n) < 0.8).astype(float)
    flip = rng.random((n, 8)) < np.linspace(0.06, 0.012, 8) * rng.uniform(0.2, 1.5)
    logprob = rng.normal(-2, 1, n)
    after = logprob[:, None] - np.linspace(0.2, 0.0, 8) * rng.uniform(0.2, 1.5) + rng.normal(0, 0.2, (n, 8))
    return Curve(LAYERS, ks, clean, np.where(flip, 1 - clean[:, None], clean[:, None]), logprob, after)


def test_safe_depth_is_what_the_rule_says() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(60):
        c = random_curve(rng)
        assert c.safe(0.05) == slow_safe(c, 0.05)
        assert c.safe(0.05, 0.1) == slow_safe(c, 0.05, 0.1)
        found.append((c.safe(0.05), c.safe(0.05, 0.1), c.ks[0]))
    assert len({k for k, _, _ in found}) > 5  # not all of one kind
    assert sum(with_nats > k for k, with_nats, _ in found) > 5
    assert sum(k == LAYERS for k, _, _ in found) > 2


def test_one_of_a_hundred_may_be_lost_and_two_may_not() -> None:
    # (1.5 − .5)/102 + 1.96 √(2/102 − .0098²)/√102 = .0369; with two lost (2.5 − .5)/102 + … = .0527.
    c = curve([10, 2, 1])
    assert c.loss_high == pytest.approx([0.1589, 0.0527, 0.0369], abs=1e-4)
    assert c.safe(0.05) == 2
    assert curve([2, 2, 2]).safe(0.05) == LAYERS
    assert curve([0, 0, 0]).safe(0.05) == 0


def test_answers_won_are_no_loss() -> None:
    c = curve([10, 10], won=10)
    assert c.loss_high[0] == pytest.approx(agresti_min(c.clean, c.changed[:, 0]).high)
    assert curve([3], won=8).safe(0.05) == 0
    assert curve([3], won=3).safe(0.05) == LAYERS


def test_a_dip_above_a_harmless_depth_counts() -> None:
    c = curve([10, 10, 0, 0, 6, 0, 0], ks=[0, 3, 6, 9, 12, 15, 18])
    assert c.safe(0.05) == 15
    assert curve([10, 0, 0, 6], ks=[0, 6, 12, 18]).safe(0.05) == LAYERS


def test_a_bound_equal_to_what_is_allowed_is_too_much() -> None:
    c = curve([1], nats=0.05)
    assert c.safe(c.loss_high[0]) == LAYERS
    assert c.safe(np.nextafter(c.loss_high[0], 1)) == 0
    assert c.safe(0.05, c.nats_high[0]) == LAYERS
    assert c.safe(0.05, np.nextafter(c.nats_high[0], 1)) == 0


def test_log_likelihood_may_not_fall_either_where_it_is_asked() -> None:
    c = curve([0] * 4, n=64, nats=[0.5, 0.12, 0.05, -0.4], ks=[0, 5, 10, 15])
    error = stats.sem(np.tile([-0.01, 0.01], 32)) * stats.t.ppf(0.975, 63)
    assert c.nats_high == pytest.approx(np.array([0.5, 0.12, 0.05, -0.4]) + error)
    assert c.safe(0.05) == 0
    assert c.safe(0.05, 0.1) == 10


def test_upper_bounds_from_counts_are_agresti_min_s() -> None:
    n = 12
    for lost in range(n + 1):
        for won in range(n + 1 - lost):
            first = np.repeat([1, 0, 1], [lost, won, n - lost - won])
            second = np.repeat([0, 1, 1], [lost, won, n - lost - won])
            high = _upper(np.array([lost]), np.array([won]), n)
            assert high == pytest.approx(agresti_min(first, second).high, abs=1e-12)


def drawn(c: Curve, rows: np.ndarray) -> Curve:
    """The curve on some of its items, repeats included."""
    return Curve(
        c.layers, c.ks, c.clean[rows], c.changed[rows], c.logprob[rows], c.changed_logprob[rows], c.chance
    )  # fmt: skip


def test_safe_depth_of_items_drawn_again() -> None:
    c = random_curve(np.random.default_rng(3))
    rows = c._rows(80, seed=5)
    expected = [slow_safe(drawn(c, r), 0.05) for r in rows]
    assert len(set(expected)) > 2
    assert c.safe_draws(0.05, 80, seed=5).tolist() == expected
    with_nats = [slow_safe(drawn(c, r), 0.05, 0.1) for r in rows]
    assert with_nats != expected
    assert c.safe_draws(0.05, 80, seed=5, nats=0.1).tolist() == with_nats
    rng = np.random.default_rng(9)
    other = [slow_safe(drawn(c, rng.choice(c.n, c.n)), 0.05) for _ in range(300)]
    many = c.safe_draws(0.05, 3000, seed=1)
    for k in np.unique(other):
        assert (many <= k).mean() == pytest.approx(np.mean(np.array(other) <= k), abs=0.1)


def test_highest_retention_up_to_and_with_a_depth() -> None:
    # 80 of 100 right; 60, 40, 64 and 72 are left at k = 0, 2, 4, 5.
    c = curve([20, 40, 16, 8], ks=[0, 2, 4, 5])
    assert c.highest_retention(5) == pytest.approx(72 / 80)
    assert c.highest_retention(4.9) == pytest.approx(64 / 80)
    assert c.highest_retention(3) == pytest.approx(60 / 80)
    half = curve([20, 40, 16, 8], ks=[0, 2, 4, 5], chance=0.5)
    assert half.highest_retention(3) == pytest.approx(10 / 30)
    assert half.highest_retention(2) != c.highest_retention(2)


def test_highest_retention_of_items_drawn_again() -> None:
    c = curve([20, 40, 16, 8], ks=[0, 2, 4, 5], chance=0.25)
    rows = c._rows(60, seed=2)
    expected = [drawn(c, r).highest_retention(4) for r in rows]
    assert c.highest_retention_draws(4, 60, seed=2) == pytest.approx(expected)
    low, high = percentiles(c.highest_retention_draws(4, 4000, seed=0))
    rng = np.random.default_rng(11)
    brute = [drawn(c, rng.choice(c.n, c.n)).highest_retention(4) for _ in range(2000)]
    assert (low, high) == pytest.approx(np.quantile(brute, [0.025, 0.975]), abs=0.02)
    # Item by item: what is lost of 80 right ones, not two proportions apart.
    lost = 1 - c.highest_retention(4)
    assert high - low < 2 * 2 * np.sqrt(lost * (1 - lost) / 80) * 1.25


def test_every_resample_draws_as_many_items_and_the_same_for_clean_and_changed() -> None:
    c = curve([0, 0], n=40, right=20)
    clean, changed = c.draws(200, seed=0)
    assert changed == pytest.approx(np.repeat(clean[:, None], 2, 1))
    assert clean.std() == pytest.approx(np.sqrt(0.25 / 40), rel=0.2)
    assert not np.array_equal(clean, c.draws(200, seed=1)[0])


def test_percentiles_leave_undefined_draws_out() -> None:
    values = np.arange(1001.0)
    assert percentiles(values) == (25, 975)
    assert percentiles(np.append(values, np.nan)) == (25, 975)


def test_a_curve_at_chance_is_known() -> None:
    assert curve([0], right=80, chance=0.5).above_chance()
    assert not curve([0], right=55, chance=0.5).above_chance()
