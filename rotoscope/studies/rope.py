"""Do massive values arise only with RoPE? Claim M5, on matched small models (Jin et al. 2025, section 4).

The same decoder was trained with rotary positions, a learned table, ALiBi and no positions at all, from the same seeds
on the same rows; see :mod:`rotoscope.controls`. The verdict is a property of these controls, whatever model is audited.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from rotoscope.controls import sets
from rotoscope.engine import Cell
from rotoscope.model.lm import LM
from rotoscope.results import Claim, Result, not_tested
from rotoscope.stats import intervals
from rotoscope.stats.intervals import Interval
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import Options

NAME = "rope"
ROPE = "rope"
RULE = (
    "Matched controls, ≥ 2 seeds, upper half of layers: largest over mean dim of a head, RoPE − each other variant. "
    "For Q and K lower bound > 0 against each, and R > 5 in ≥ .25 of RoPE heads and in none without: holds; the gaps "
    "alone: partly; any variant not below: fails. Value: K, RoPE − the largest other. A property of the controls."
)


def cells(lm: LM, options: Options) -> list[Cell]:
    """Nothing: what is read was measured when the controls were trained."""
    return []


def finish(lm: LM, options: Options, done: Mapping[str, Tables]) -> Result:
    """The training curves of the controls that come with rotoscope, and the claim."""
    return judged(sets.curves(sets.members()))


def judged(curves: Mapping[str, pd.DataFrame]) -> Result:
    """Tables and the claim from the curves of any set of controls."""
    ratios = curves["control_ratios"]
    return Result({**curves, "control_gaps": gaps(ratios)}, [m5(ratios)], {}, {})


def gaps(ratios: pd.DataFrame) -> pd.DataFrame:
    """RoPE's max/mean ratio less each other variant's, upper half of layers, after every step that was measured.

    Returns
    -------
    pandas.DataFrame
        step, tensor, positions (the variant compared with), seeds ("all" or one), gap, low, high, rope, other (mean
        ratios), massive_rope, massive_other (shares of heads with a dim at R > 5), heads.
    """
    rows = []
    upper = sets.upper_half(ratios)
    seeds = ["all", *sorted(upper.seed.unique())]
    for (step, tensor), part in upper.groupby(["step", "tensor"], sort=False):
        for which in seeds:
            some = part if which == "all" else part[part.seed == which]
            for other in [p for p in some.positions.unique() if p != ROPE]:
                value, (low, high) = _gap(some, other)
                mean = some.groupby("positions").max_ratio.mean()
                share = some.assign(has=some["count"] > 0).groupby("positions").has.mean()
                rows.append(
                    (step, tensor, other, str(which), value, low, high, mean[ROPE], mean[other], share[ROPE],
                     share[other], int((some.positions == ROPE).sum()))
                )  # fmt: skip
    names = [
        "step", "tensor", "positions", "seeds", "gap", "low", "high", "rope", "other", "massive_rope",
        "massive_other", "heads",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=names)


def m5(ratios: pd.DataFrame) -> Claim:
    """The verdict on the last step of training."""
    variants = [p for p in ratios.positions.unique() if p != ROPE]
    if ROPE not in set(ratios.positions) or not variants:
        return not_tested("M5", "the set holds no control with RoPE, or none without", RULE)
    if (held := ratios.groupby("positions").seed.nunique().min()) < 2:
        return not_tested("M5", f"{held} seed of a variant; at least 2 are needed", RULE)
    upper = sets.upper_half(ratios)
    final = upper[upper.step == upper.groupby(["positions", "seed"]).step.transform("max")]
    by_tensor = {t: final[final.tensor == t] for t in "QK"}
    of = {t: {p: _gap(rows, p) for p in variants} for t, rows in by_tensor.items()}
    massive = pd.concat(by_tensor.values()).assign(has=lambda r: r["count"] > 0)
    share = {t: massive[massive.tensor == t].groupby("positions").has.mean() for t in "QK"}
    without = int(massive[massive.positions != ROPE].has.sum())
    nearest = min(of["K"], key=lambda p: of["K"][p][0])

    def decide(factor: float) -> Ruling:
        above = [Condition(f"{t}, RoPE − {p}", *of[t][p], ">", 0.0) for t in "QK" for p in variants]
        reached = {t: share[t][ROPE] >= scaled(0.25, factor) for t in "QK"}
        shares = "; ".join(f"R > 5 in {share[t][ROPE]:.0%} of RoPE's {t} heads" for t in "QK")
        why = f"{reasons(*above)}; {shares}, in {without} heads without RoPE"
        if not all(c.met for c in above):
            return "fails", why
        return ("holds" if all(reached.values()) and not without else "partly"), why

    first = upper[upper.step == upper.step.min()]
    value, interval = of["K"][nearest]
    heads = int((by_tensor["K"].positions == ROPE).sum())
    return claim(
        "M5", RULE, decide, value=value, interval=interval,
        null=_gap(first[first.tensor == "K"], nearest)[0], null_name="the same before training",
        n=f"{heads} heads a variant and tensor, {ratios.seed.nunique()} seeds, {int(final.step.max()):,} steps",
    )  # fmt: skip


def _gap(rows: pd.DataFrame, other: str) -> tuple[float, Interval]:
    """Mean ratio with RoPE less the other's, with Student's t over layers of all seeds.

    Layers of one number and seed are matched: they began from the same weights. A bootstrap of so few is too narrow.
    """
    mean = rows.groupby(["positions", "seed", "layer"]).max_ratio.mean().unstack("positions")
    difference = mean[ROPE] - mean[other]
    return float(difference.mean()), intervals.mean_t(difference)
