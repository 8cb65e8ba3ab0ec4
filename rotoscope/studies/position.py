"""Are attention logits position + semantics? Claims P1 to P6 (Han & Ji 2025, arXiv 2503.13305).

P1, P2 and P3 are judged here, the causal ones in :mod:`rotoscope.studies.replace` (P4), ``perturb`` (P5) and
``length`` (P6).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rotoscope.engine import Cell
from rotoscope.model.lm import LM
from rotoscope.results import Claim, Result, not_tested
from rotoscope.stats import intervals, nulls
from rotoscope.stats.intervals import Interval
from rotoscope.studies import joint, length, observe, perturb, replace, texts
from rotoscope.studies.conduct import conduct
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled, scaled_from_one
from rotoscope.studies.observe import KINDS, TRAINED, Tables
from rotoscope.studies.options import Options

NAME = "position"
CAUSAL_PARTS: dict[str, Any] = {"replace": replace, "perturb": perturb, "length": length}
CAUSAL = ("causal", "causal_within")
ROLES = {"": "model", "isotropic": "null", "matched_gaussian": "check"}
RULES = {
    "P1": "Lower bounds of mean per-head within-query r, form 1 and form 2, full grid, position 0 out, d < min(1,024, "
    "trained length): both ≥ .95 holds, one of them partly, neither fails.",
    "P2": "Form-1 r with the means of queries and keys removed, trained − random weights of the same architecture "
    "(≥ 3 seeds, same layer): lower bound ≥ .10 holds, > 0 partly, else fails.",
    "P3": "Spearman over heads of form-1 within-query r with √(1 − Σ e v F / Σ e (v + |k̄|² F)): lower bound ≥ .80, "
    "mean absolute error ≤ .02 and better than the share of query energy in slow pairs holds; lower bound ≥ .50 "
    "partly; else fails.",
}


def run(
    lm: LM, *, out: Path | str | None = None, resume: bool = False, progress: bool = False, **options: Any
) -> Result:
    """Run this study alone; see :func:`rotoscope.studies.conduct` and, for ``**options``, ``Options``."""
    return conduct([sys.modules[__name__]], lm, Options(**options), out=out, resume=resume, progress=progress)


def cells(lm: LM, options: Options) -> list[Cell]:
    """What the study needs run."""
    causal = [cell for name in options.causal_parts for cell in CAUSAL_PARTS[name].cells(lm, options)]
    return [*observe.cells(lm, options, texts.texts(lm, options)), *causal, *joint.cells(lm, options)]


def finish(lm: LM, options: Options, done: Mapping[str, Tables]) -> Result:
    """Tables and claims from the finished cells."""
    result = _additivity(lm, options, done)
    for name, part in CAUSAL_PARTS.items():
        if name in options.causal_parts:
            tables, claims = part.finish(lm, options, done)
            result.tables |= tables
            result.claims += claims
        else:
            (rule,) = part.RULES.items()
            result.claims.append(not_tested(rule[0], f"not run at size {options.size} (--{name})", rule[1]))
    return result


def join(lm: LM, options: Options, done: Mapping[str, Tables], tables: Mapping[str, pd.DataFrame]) -> Tables:
    """What stands beside the other studies' tables, layer by layer."""
    return joint.finish(lm, options, done, tables)[0]


def _additivity(lm: LM, options: Options, done: Mapping[str, Tables]) -> Result:
    """How near logits are to the two forms."""
    some = texts.texts(lm, options)
    trained = [done[TRAINED.format(i)] for i in range(len(some))]
    random, missing = observe.twins(done, options)
    per_text = pd.concat([t["heads"].assign(text=i) for i, t in enumerate(trained)], ignore_index=True)
    some_twins = [t["heads"].assign(text=i) for i, t in enumerate(random)]
    twins = pd.concat(some_twins or [per_text.loc[[], ["text", "layer", "head"]]], ignore_index=True)
    heads = _heads(per_text, twins)
    tables = {"heads": heads, "texts": texts.table(some), "layers": _layers(lm, heads)}
    if "pairs" in trained[0]:
        keys = ["layer", "head", "pair"]
        tables["pairs"] = pd.concat(t["pairs"] for t in trained).groupby(keys, as_index=False).mean()
    if not lm.anatomy.rotary:
        reason = "no layer rotates its queries and keys, so the full query × key × distance grid is not defined"
        if any(layer.slopes for layer in lm.anatomy.layers):
            reason = "no layer rotates its queries and keys; with ALiBi's distance added to content form 1 is trivial"
        return Result(tables, [not_tested(c, reason, RULES[c]) for c in RULES], {}, {})
    tables["explanation"] = explanation(per_text, twins, options.seed)
    n = f"{int(heads.form1.notna().sum())} heads, {len(some)} texts"
    claims = [
        _p1(tables["explanation"], n),
        _p2(heads, len(random), missing, options, n),
        _p3(heads, options, n),
    ]
    names = {kind: kind.replace("form", "form ").replace("_within", " within-query") for kind in (*KINDS, "causal")}
    means = {f"mean {name} r": float(heads[kind].mean()) for kind, name in names.items()}
    return Result(tables, claims, means, {})


def explanation(per_text: pd.DataFrame, twins: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Mean per-head r of every arm and kind, with intervals over texts (t) and over heads (bootstrap of layers)."""
    rows = []
    for arm, kind in itertools.product(("", *nulls.ARMS, "with_position_0"), (*KINDS, *CAUSAL)):
        if (column := f"{kind}__{arm}" if arm else kind) in per_text:
            role = ROLES.get(arm, "arm")
            rows.append((arm or "as_it_is", kind, *_summary(per_text, column, seed), role))
    for arm, kind in itertools.product(("", *nulls.RANDOM_WEIGHTS_ARMS), (*KINDS, *CAUSAL)):
        if (column := f"{kind}__{arm}" if arm else kind) in twins:
            name = f"random_{arm}" if arm else "random"
            rows.append((name, kind, *_summary(twins, column, seed), "null"))
    bounds = ["value", "low", "high", "low_heads", "high_heads", "n_heads", "n_texts"]
    return pd.DataFrame(rows, columns=["arm", "kind", *bounds, "role"])


def _summary(rows: pd.DataFrame, column: str, seed: int) -> tuple[float, float, float, float, float, int, int]:
    over_texts = rows.groupby("text")[column].mean()
    by_head = rows.groupby(["layer", "head"])[column].mean().dropna()
    layers = by_head.index.get_level_values("layer").to_numpy()
    across = intervals.mean_t(over_texts)
    within = intervals.layer_bootstrap(by_head.to_numpy(), layers, seed=seed)
    return float(by_head.mean()), *across, *within, len(by_head), len(over_texts)


def _heads(per_text: pd.DataFrame, twins: pd.DataFrame) -> pd.DataFrame:
    """One row per head: means over texts, and of the random twins' heads over their seeds."""
    keys = ["layer", "head"]
    fixed = per_text.drop_duplicates(keys)[[*keys, "kv_head", "position"]]
    numbers = per_text.drop(columns=["text", "kv_head", "position", "entropy", "sink_mass"])
    out = fixed.merge(numbers.groupby(keys, as_index=False).mean(), on=keys)
    kept = [c for c in twins if c.split("__")[0] in (*KINDS, *CAUSAL) and not c.endswith("__with_position_0")]
    renamed = {c: "__random_".join(c.split("__")) if "__" in c else f"{c}__random" for c in kept}
    if not kept:
        return out
    null = twins.groupby(keys, as_index=False)[kept].mean().rename(columns=renamed)
    return out.merge(null, on=keys)


def _layers(lm: LM, heads: pd.DataFrame) -> pd.DataFrame:
    kept = [c for c in ("form1", "form1_within", "form2_within", "predicted") if c in heads]
    frame = pd.DataFrame(
        [(a.layer, a.kind, a.position) for a in lm.anatomy.layers], columns=["layer", "kind", "position"]
    )
    return frame.merge(heads.groupby("layer", as_index=False)[kept].mean(), on="layer", how="left")


def _p1(table: pd.DataFrame, n: str) -> Claim:
    of = table.set_index(["arm", "kind"])

    def outer(kind: str) -> Interval:
        """The wider of the two intervals at each end, none if one is missing: neither may carry the verdict alone."""
        row = of.loc[("as_it_is", kind)]
        return Interval(np.min([row.low, row.low_heads]), np.max([row.high, row.high_heads]))

    def decide(factor: float) -> Ruling:
        both = [
            Condition(name, of.loc[("as_it_is", kind)].value, outer(kind), ">=", scaled_from_one(0.95, factor))
            for name, kind in (("form 1 within-query r", "form1_within"), ("form 2 within-query r", "form2_within"))
        ]
        met = sum(c.met for c in both)
        return ("fails", "partly", "holds")[met], reasons(*both)

    raw = of.loc[("as_it_is", "form1")].value
    null = of.loc[("random", "form1")].value if ("random", "form1") in of.index else None
    return claim(
        "P1", RULES["P1"], decide, value=raw, interval=outer("form1"), null=null,
        null_name="the same r with random weights", n=n,
    )  # fmt: skip


def _p2(heads: pd.DataFrame, seeds: int, missing: str, options: Options, n: str) -> Claim:
    if seeds < 3:
        return not_tested("P2", missing or "fewer than 3 seeds of random weights", RULES["P2"])
    layers = heads.layer.to_numpy()
    difference = {
        arm: heads[f"form1__{arm}"] - heads[f"form1__random_{arm}"]
        for arm in ("both_means_removed", "no_means_equal_energies")
    }
    interval = {arm: intervals.layer_bootstrap(d, layers, seed=options.seed) for arm, d in difference.items()}
    equalised = difference["no_means_equal_energies"].mean()

    def decide(factor: float) -> Ruling:
        gap = Condition(
            "trained − random", difference["both_means_removed"].mean(), interval["both_means_removed"], ">=",
            scaled(0.10, factor),
        )  # fmt: skip
        low, high = interval["no_means_equal_energies"]
        beside = f"with pair energies equalised as well {equalised:.3f} [{low:.3f}, {high:.3f}]"
        verdict = "holds" if gap.met else "partly" if gap.interval[0] > 0 else "fails"
        return verdict, f"{reasons(gap)}; {beside}"  # type: ignore[return-value]

    return claim(
        "P2", RULES["P2"], decide, value=difference["both_means_removed"].mean(),
        interval=interval["both_means_removed"], null=heads["form1__random_both_means_removed"].mean(),
        null_name="level with random weights", n=f"{n}, {seeds} random twins",
    )  # fmt: skip


def _p3(heads: pd.DataFrame, options: Options, n: str) -> Claim:
    rows = heads.dropna(subset=["form1_within", "predicted"])
    measured, predicted, slow = (rows[c].to_numpy() for c in ("form1_within", "predicted", "slow_query_share"))
    layers = rows.layer.to_numpy()

    def bootstrap(columns: Sequence[np.ndarray], statistic: object) -> Interval:
        return intervals.layer_bootstrap(tuple(columns), layers, statistic, seed=options.seed)  # type: ignore[arg-type]

    def better(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> float:
        return intervals.spearman(x, y) - intervals.spearman(x, z)

    rho = intervals.spearman(measured, predicted)
    null = intervals.spearman(measured, slow)
    error = np.abs(measured - predicted)
    of_rho = bootstrap((measured, predicted), intervals.spearman)
    of_error = intervals.layer_bootstrap(error, layers, seed=options.seed)
    of_gain = bootstrap((measured, predicted, slow), better)

    def decide(factor: float) -> Ruling:
        rank = Condition("Spearman", rho, of_rho, ">=", scaled_from_one(0.80, factor))
        close = Condition("mean absolute error", error.mean(), of_error, "<=", scaled(0.02, factor))
        gain = Condition("Spearman above slow-pair energy's", rho - null, of_gain, ">", 0.0)
        if rank.met and close.met and gain.met:
            return "holds", reasons(rank, close, gain)
        return "partly" if of_rho.low >= scaled_from_one(0.50, factor) else "fails", reasons(rank, close, gain)

    return claim(
        "P3", RULES["P3"], decide, value=rho, interval=of_rho, null=null,
        null_name="Spearman with the share of query energy in slow pairs", n=n,
    )  # fmt: skip
