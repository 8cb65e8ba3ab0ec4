"""From which layer on do earlier tokens stop mattering? Claims D1 to D4 (Ben-Artzy & Schwartz 2024, arXiv 2409.03621).

At layer k the previous tokens' states are replaced by noise, frozen, or swapped for another prompt's, or attention is
skipped from there on; see :mod:`rotoscope.interventions`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rotoscope.engine import REFUSED, Cell
from rotoscope.model.lm import LM
from rotoscope.results import Claim, Result, not_tested
from rotoscope.stats.curves import Curve, percentiles
from rotoscope.studies import depth_cells, depth_tables
from rotoscope.studies.conduct import conduct
from rotoscope.studies.depth_plan import EPSILON, FEWEST, FEWEST_QUICK, plan
from rotoscope.studies.depth_swap import d3
from rotoscope.studies.items import asked
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import Options

NAME = "depth"
DRAWS = 500
FEWEST_LOW = 60
RULES = {
    "D1": "s = smallest k/L such that there and at all deeper tested k the upper bound of the loss is < 5 points (n ≥ "
    "100; quick: 64 and log-likelihood loss < .1 nats besides). Value: median over tasks of max(s noise, s freeze): ≤ "
    ".70 holds; ≤ .85, or freeze alone ≤ .70, partly; else fails. Half and double: of the loss allowed.",
    "D2": "Largest retention over tested k ≤ L/4, median over tasks (n ≥ 60): upper bound ≤ .15 for noise and freeze "
    "holds; lower bound > .50 for both fails; else partly.",
    "D4": "s of D1 for skipping attention, median over tasks: ≤ .70 holds, ≤ .90 partly, else fails. Half and double: "
    "of the loss allowed.",
}
Curves = Mapping[str, Mapping[str, Curve]]


def run(
    lm: LM, *, out: Path | str | None = None, resume: bool = False, progress: bool = False, **options: Any
) -> Result:
    """Run this study alone; see :func:`rotoscope.studies.conduct` and, for ``**options``, ``Options``."""
    return conduct([sys.modules[__name__]], lm, Options(**options), out=out, resume=resume, progress=progress)


def cells(lm: LM, options: Options) -> list[Cell]:
    """What the study needs run."""
    return depth_cells.cells(lm, options)


def finish(lm: LM, options: Options, done: Mapping[str, Tables]) -> Result:
    """Tables and claims from the finished cells."""
    of_size, layers = plan(options), len(lm.anatomy.layers)
    specs = depth_cells.sweepable(of_size.tasks)
    found = depth_tables.curves(done, list(specs), layers)
    tables = {
        "depth": depth_tables.depth(found, options.seed),
        "safe_depth": depth_tables.safe_depth(found),
        "swap": depth_tables.swap(done),
        "swap_counts": depth_tables.swap_counts(done),
        "depth_cost": depth_tables.depth_cost(lm, done),
    }
    why_not = _why_not(lm, options, done)
    n = FEWEST_QUICK if options.size == "quick" else FEWEST
    judged, reason = _judged(found, n, why_not)
    low, low_reason = _judged(found, min(n, FEWEST_LOW), why_not)
    claims = [
        _d1(judged, reason, options.seed),
        _d2(low, low_reason, options.seed),
        d3(depth_tables.swap_items(done), tables["swap_counts"], layers, options, why_not),
        _d4(judged, reason, options.seed),
    ]
    headline = {
        f"safe depth of {':'.join(filter(None, (row.task, row.variant)))} under {row.manipulation}": float(row.share)
        for row in tables["safe_depth"].itertuples()
        if not np.isnan(row.share)
    }
    return Result({name: table for name, table in tables.items() if len(table)}, claims, headline, {"epsilon": EPSILON})


def _why_not(lm: LM, options: Options, done: Mapping[str, Tables]) -> str:
    """Why nothing could be swept, where that is so."""
    if not lm.anatomy.attention:
        return "no layer has attention"
    if lm.tokenizer is None:
        return "there is no tokenizer, and without one no task"
    for name, tables in done.items():
        if name.startswith(depth_cells.TASK) and REFUSED in tables:
            return str(tables[REFUSED].reason[0])
    wanted = plan(options).tasks
    unasked = asked(lm, depth_cells.sweepable(wanted), options.seed)[1]
    generated = [spec for spec in wanted if spec not in depth_cells.sweepable(wanted)]
    return "; ".join([*unasked.values(), *(f"{spec} is scored by what is generated" for spec in generated)])


def _judged(found: Curves, fewest: int, why_not: str) -> tuple[dict[str, Mapping[str, Curve]], str]:
    """The tasks that claims are judged on, and why the others are not."""
    out, reasons_ = {}, [why_not] if why_not else []
    for spec, by_name in found.items():
        curve = next(iter(by_name.values()))
        if curve.n < fewest:
            reasons_.append(f"{spec} has {curve.n} items, fewer than {fewest}")
        elif not curve.above_chance():
            reasons_.append(f"{spec}: clean accuracy {curve.clean.mean():.2f} is not above chance ({curve.chance:.2f})")
        else:
            out[spec] = by_name
    return out, "; ".join(reasons_)


def _share(curve: Curve, factor: float) -> float:
    """Safe depth as a share of L, 1 where there is none."""
    k, _ = depth_tables.safe(curve, factor)
    return 1.0 if np.isnan(k) else k / curve.layers


def _drawn(curve: Curve, seed: int) -> Any:
    """The same on items drawn again."""
    return curve.safe_draws(EPSILON, DRAWS, seed, depth_tables.nats(curve)) / curve.layers


def _median(of_task: Callable[[Mapping[str, Curve]], Any], judged: Curves) -> Any:
    return np.median([of_task(by_name) for by_name in judged.values()], axis=0)


def _d1(judged: Curves, reason: str, seed: int) -> Claim:
    if not judged:
        return not_tested("D1", reason or "no task was run", RULES["D1"])

    def worst(by_name: Mapping[str, Curve], factor: float = 1.0, names: Sequence[str] = ("noise", "freeze")) -> float:
        return max(_share(by_name[name], factor) for name in names)

    def draws(by_name: Mapping[str, Curve]) -> Any:
        return np.max([_drawn(by_name[name], seed) for name in ("noise", "freeze")], axis=0)

    def decide(factor: float) -> Ruling:
        both = float(_median(lambda c: worst(c, factor), judged))
        freeze = float(_median(lambda c: worst(c, factor, ("freeze",)), judged))
        noise = float(_median(lambda c: worst(c, factor, ("noise",)), judged))
        none = " (1.00: at no depth tested)" if both == 1 else ""
        why = _with(f"safe from {noise:.2f} L under noise, {freeze:.2f} L under freeze{none}", reason)
        if both <= 0.70:
            return "holds", why
        return ("partly" if both <= 0.85 or freeze <= 0.70 else "fails"), why

    return claim(
        "D1", RULES["D1"], decide, value=float(_median(worst, judged)), interval=percentiles(_median(draws, judged)),
        null=1.0, null_name="no layer is safe", n=_counts(judged),
    )  # fmt: skip


def _d2(judged: Curves, reason: str, seed: int) -> Claim:
    if not judged:
        return not_tested("D2", reason or "no task was run", RULES["D2"])
    values = {}
    for name in ("noise", "freeze"):
        deepest = {spec: by_name[name].layers / 4 for spec, by_name in judged.items()}
        kept = np.median([c[name].highest_retention(deepest[s]) for s, c in judged.items()])
        drawn = [c[name].highest_retention_draws(deepest[s], DRAWS, seed) for s, c in judged.items()]
        values[name] = (float(kept), percentiles(np.median(drawn, axis=0)))

    def decide(factor: float) -> Ruling:
        low = [Condition(f"retention under {x}", *values[x], "<=", scaled(0.15, factor)) for x in values]
        high = [Condition(f"retention under {x}", *values[x], ">", 0.50) for x in values]
        why = _with(reasons(*low), reason)
        if all(c.met for c in low):
            return "holds", why
        return ("fails" if all(c.met for c in high) else "partly"), why

    name = max(values, key=lambda x: values[x][0])
    return claim(
        "D2", RULES["D2"], decide, value=values[name][0], interval=values[name][1], null=1.0,
        null_name="nothing lost", n=_counts(judged),
    )  # fmt: skip


def _d4(judged: Curves, reason: str, seed: int) -> Claim:
    if not judged:
        return not_tested("D4", reason or "no task was run", RULES["D4"])

    def decide(factor: float) -> Ruling:
        share = float(_median(lambda c: _share(c["skip"], factor), judged))
        why = _with(f"safe from {share:.2f} L{' (at no depth tested)' if share == 1 else ''}", reason)
        return ("holds" if share <= 0.70 else "partly" if share <= 0.90 else "fails"), why

    drawn = _median(lambda c: _drawn(c["skip"], seed), judged)
    return claim(
        "D4", RULES["D4"], decide, value=float(_median(lambda c: _share(c["skip"], 1.0), judged)),
        interval=percentiles(drawn), null=1.0, null_name="no layer is safe", n=_counts(judged),
    )  # fmt: skip


def _with(why: str, reason: str) -> str:
    return f"{why}; {reason}" if reason else why


def _counts(judged: Curves) -> str:
    return ", ".join(f"{next(iter(by_name.values())).n} items of {spec}" for spec, by_name in judged.items())
