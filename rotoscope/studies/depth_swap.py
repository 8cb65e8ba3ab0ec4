"""Claim D3: swapped states are obeyed low down and ignored high up (Ben-Artzy & Schwartz 2024, section 4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from rotoscope.results import Claim, not_tested
from rotoscope.stats import intervals
from rotoscope.studies.judge import Condition, Ruling, claim, scaled, scaled_from_one
from rotoscope.studies.options import Options

FEWEST = {"quick": 40}
FEWEST_OTHERWISE = 60
DRAWS = 1000
RULE = (
    "Crossover k/L on pairs whose two clean answers are right (≥ 60; 40 quick). Donor > original at every tested k ≤ "
    "L/3, and at every tested k ≥ 2L/3 the donor's upper bound ≤ .10 and the original's retention's lower bound ≥ .80, "
    "holds; a crossover exists, partly; none, fails."
)


def d3(by_set: Mapping[str, pd.DataFrame], counts: pd.DataFrame, layers: int, options: Options, why_not: str) -> Claim:
    """The verdict over the pairs of all sets together.

    Parameters
    ----------
    by_set : mapping
        Per set, one row per pair and k: who was obeyed.
    counts : pandas.DataFrame
        Prompts, right answers and pairs of each set.
    """
    fewest = FEWEST.get(options.size, FEWEST_OTHERWISE)
    pairs = int(counts.pairs.sum()) if len(counts) else 0
    if pairs < fewest:
        told = ", ".join(f"{c.right} of {c.prompts} {c.set} prompts right" for c in counts.itertuples())
        few = f"{pairs} pairs, fewer than {fewest}"
        return not_tested("D3", f"{few}: {told}" if told else why_not or few, RULE)
    every = pd.concat([items.assign(pair=items["set"] + items.pair.astype(str)) for items in by_set.values()])
    original, donor = (
        every.assign(x=every.said == whose).pivot_table(index="pair", columns="k", values="x", aggfunc="mean")
        for whose in ("original", "donor")
    )
    low = [k for k in original.columns if k <= layers / 3]
    high = [k for k in original.columns if k >= 2 * layers / 3]
    if not low or not high:
        return not_tested("D3", f"{layers} layers leave no depth to test up to L/3 and from 2L/3 on", RULE)
    ks = original.columns.to_numpy(float)
    value = crossover(original.to_numpy(float), donor.to_numpy(float), ks)
    rows = np.random.default_rng(options.seed).integers(0, len(original), (DRAWS, len(original)))
    drawn = [crossover(original.to_numpy(float)[r], donor.to_numpy(float)[r], ks) for r in rows]
    if np.isnan(value):
        value, interval = 1.0, (1.0, 1.0)
    else:
        interval = tuple(np.quantile(np.nan_to_num(drawn, nan=layers) / layers, [0.025, 0.975]))
        value /= layers

    def decide(factor: float) -> Ruling:
        obeyed = all(donor[k].mean() > original[k].mean() for k in low)
        ignored = [
            condition
            for k in high
            for condition in (
                _share(f"donor at {k}", donor[k], "<=", scaled(0.10, factor)),
                _share(f"original at {k}", original[k], ">=", scaled_from_one(0.80, factor)),
            )
        ]
        broken = [str(condition) for condition in ignored if not condition.met]
        why = f"donor above original at {'every' if obeyed else 'not every'} tested k ≤ L/3"
        why += f"; {broken[0]}" if broken else "; ignored at every tested k ≥ 2L/3"
        if obeyed and not broken:
            return "holds", why
        return ("partly" if value < 1 else "fails"), why

    sets = ", ".join(f"{c.pairs} {c.set}" for c in counts.itertuples())
    return claim(
        "D3", RULE, decide, value=float(value), interval=(float(interval[0]), float(interval[1])), null=None,
        null_name="", n=f"{pairs} pairs ({sets})",
    )  # fmt: skip


def crossover(original: np.ndarray, donor: np.ndarray, ks: np.ndarray) -> float:
    """The depth where the original's share overtakes the donor's for good, between tested depths by a straight line.

    Parameters
    ----------
    original, donor
        Whether each was obeyed, ``[pairs, K]``.
    ks
        Depths, ascending.

    Returns
    -------
    float
        NaN where the donor is never ahead, or still ahead at the deepest.
    """
    lead = donor.mean(0) - original.mean(0)
    ahead = np.flatnonzero(lead > 0)
    if not len(ahead) or ahead[-1] == len(ks) - 1:
        return float("nan")
    i = ahead[-1]
    return float(ks[i] + (ks[i + 1] - ks[i]) * lead[i] / (lead[i] - lead[i + 1]))


def _share(label: str, obeyed: pd.Series, op: str, threshold: float) -> Condition:
    value = obeyed.to_numpy(float)
    return Condition(label, float(value.mean()), intervals.wilson(int(value.sum()), len(value)), op, threshold)
