"""Claim M5's rule, on ratios made to meet, to miss and to leave open each condition."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from rotoscope.studies import rope

VARIANTS = ("rope", "learned", "alibi", "none")


def ratios(mean, massive=0.0, massive_without=0, seeds=(0, 1), spread=0.0, first=1.5):
    """Four layers of three heads after steps 0 and 100; ``mean[variant]`` is the ratio in the upper half of layers.

    ``massive`` is the share of RoPE's upper heads with a dim at R > 5, ``massive_without`` how many others have one;
    ``spread`` is added to the layers in turn. Lower layers say the opposite, so that reading them would show.
    """
    rows = []
    for positions, seed, layer, tensor, head in itertools.product(VARIANTS, seeds, range(4), "QKV", range(3)):
        upper = layer >= 2
        value = mean[positions] if upper else 10 - mean[positions]
        value += spread * (-1) ** (layer + seed)
        at = (layer - 2) * 3 + head
        count = int(upper and positions == "rope" and at < 6 * massive)
        count += int(upper and positions == "none" and seed == 0 and tensor == "K" and at < massive_without)
        for step, ratio in ((0, first), (100, value)):
            rows.append((positions, seed, step, layer, tensor, head, ratio, count if step else 0, 0.0))
    names = ["positions", "seed", "step", "layer", "tensor", "head", "max_ratio", "count", "energy_share"]
    return pd.DataFrame(rows, columns=names)


FLAT = {"rope": 4.0, "learned": 1.6, "alibi": 1.5, "none": 1.4}


@pytest.mark.parametrize(
    ("table", "verdict"),
    [
        (ratios(FLAT, massive=1 / 3), "holds"),
        (ratios(FLAT), "partly"),
        (ratios(FLAT, massive=1 / 6), "partly"),
        (ratios(FLAT, massive=1 / 3, massive_without=1), "partly"),
        (ratios({**FLAT, "none": 4.0}, massive=1 / 3), "fails"),
        (ratios({**FLAT, "alibi": 5.0}, massive=1 / 3), "fails"),
    ],
)
def test_verdicts(table, verdict):
    assert rope.m5(table).verdict == verdict


def test_value_is_the_gap_to_the_nearest_variant_and_the_null_is_the_gap_before_training():
    claim = rope.m5(ratios(FLAT))
    assert claim.value == pytest.approx(2.4)
    assert claim.null == pytest.approx(0.0)
    assert claim.interval == pytest.approx((2.4, 2.4))


def test_the_interval_is_students_t_over_matched_layers():
    table = ratios(FLAT)
    table.loc[(table.positions == "rope") & (table.seed == 1) & (table.step == 100), "max_ratio"] += 1.0
    differences = np.array([2.4, 2.4, 3.4, 3.4])  # two layers of each seed
    half = 3.182446 * differences.std(ddof=1) / 2  # t(.975, 3) and the square root of four
    claim = rope.m5(table)
    assert claim.interval == pytest.approx((2.9 - half, 2.9 + half), abs=1e-5)


def test_a_gap_within_the_noise_fails():
    table = ratios({**FLAT, "rope": 1.7})
    noise = {(0, 2): 0.8, (0, 3): -0.8, (1, 2): 0.5, (1, 3): -0.5}
    for (seed, layer), value in noise.items():
        at = (table.positions == "rope") & (table.step == 100) & (table.seed == seed) & (table.layer == layer)
        table.loc[at, "max_ratio"] += value
    assert rope.m5(table).verdict == "fails"


def test_one_seed_is_not_tested():
    claim = rope.m5(ratios(FLAT, seeds=(0,)))
    assert claim.verdict == "not tested"
    assert "1 seed" in claim.reason


def test_a_set_without_rope_is_not_tested():
    table = ratios(FLAT)
    assert rope.m5(table[table.positions != "rope"]).verdict == "not tested"


def test_gaps_by_step_and_seed():
    table = ratios(FLAT, massive=1 / 3)
    found = rope.gaps(table).set_index(["step", "tensor", "positions", "seeds"])
    assert len(found) == 2 * 3 * 3 * 3
    row = found.loc[(100, "K", "learned", "1")]
    assert (row.gap, row.rope, row.other) == pytest.approx((2.4, 4.0, 1.6))
    assert (row.massive_rope, row.massive_other, row.heads) == pytest.approx((1 / 3, 0, 6))
    assert found.loc[(0, "K", "learned", "all")].gap == pytest.approx(0)
