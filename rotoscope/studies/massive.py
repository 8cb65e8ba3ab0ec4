"""Where massive values sit in Q, K and V, and what breaks without them (Jin et al. 2025, arXiv 2502.01563).

Claims M1, M2 and M3 are judged here, M4 in :mod:`rotoscope.studies.selectivity`.

``M[h, d]`` is the root mean square over tokens of post-RoPE values at head ``h``, dim ``d``; ``R[h, d]`` its ratio to
the head's mean over dims; a dim is massive iff ``R > λ``, with λ = 5.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rotoscope.engine import Cell
from rotoscope.model.lm import LM
from rotoscope.results import Claim, Result, not_tested
from rotoscope.stats import intervals
from rotoscope.stats.intervals import Interval
from rotoscope.studies import disruption, observe, selectivity, texts
from rotoscope.studies.conduct import conduct
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled, scaled_from_one
from rotoscope.studies.observe import TRAINED, Tables
from rotoscope.studies.options import Options

NAME = "massive"
LAMBDA = 5.0
FEWEST_DIMS = 20
PERMUTATIONS = 1000
HEAD = ["layer", "tensor", "head"]
DIM = [*HEAD, "dim"]
RULES = {
    "M1": "Share of heads with ≥ 1 dim at R > 5. Q and K: share's lower bound ≥ .25 and its difference to V's with "
    "lower bound > 0; V ≤ .10: all holds, one of Q and K partly, else fails. Value: min(Q, K) − V.",
    "M2": "Share of massive Q/K dims in pairs with wavelength ≥ trained length: lower bound ≥ .80, Jaccard between "
    "texts ≥ .80, and the most used quarter of pairs beats 99 % of within-head permutations holds; lower bound above "
    "the share of slow pairs partly; else fails; not tested under 20 dims.",
    "M3": "Share of heads with massive Q/K dims in the first tenth of layers (≥ 2) over the share in the rest: lower "
    "bound ≥ .5, and Spearman(layer, max ratio) > 0 for Q and K holds; one part partly; none in the first "
    "quarter fails.",
}


def run(
    lm: LM, *, out: Path | str | None = None, resume: bool = False, progress: bool = False, **options: Any
) -> Result:
    """Run this study alone; see :func:`rotoscope.studies.conduct` and, for ``**options``, ``Options``."""
    return conduct([sys.modules[__name__]], lm, Options(**options), out=out, resume=resume, progress=progress)


def cells(lm: LM, options: Options) -> list[Cell]:
    """What the study needs run."""
    return [*observe.cells(lm, options, texts.texts(lm, options)), *disruption.cells(lm, options)]


def finish(lm: LM, options: Options, done: Mapping[str, Tables]) -> Result:
    """Tables and claims from the finished cells."""
    some = texts.texts(lm, options)
    trained = [done[TRAINED.format(i)] for i in range(len(some))]
    wavelength = _wavelengths(trained[0])
    magnitudes = pooled([t["dims"] for t in trained])
    massive = _massive(magnitudes, wavelength, lm.trained_length)
    heads = per_head(magnitudes)
    overlap = _overlap([pooled([t["dims"]]) for t in trained])
    twins = [per_head(pooled([t["dims"]])) for t in observe.twins(done, options)[0]]
    tables = {
        "magnitudes": magnitudes.drop(columns=["n", "mean", "first"]),
        "massive": massive,
        "massive_heads": heads,
        "stability": _stability(overlap),
        "layers": _layers(lm, heads, [t["heads"] for t in trained]),
        "texts": texts.table(some),
    }
    n = f"{int((heads.tensor == 'Q').sum())} query and {int((heads.tensor == 'K').sum())} key heads, {len(some)} texts"
    claims = [
        _m1(heads, twins, options, n),
        _m2(massive, magnitudes, overlap, wavelength, lm.trained_length, options, len(some)),
        _m3(heads, options, n),
    ]
    broken, m4, losses = selectivity.finish(lm, options, done)
    shares = heads.assign(has=heads["count"] > 0).groupby("tensor").has.mean()
    headline = {f"share of {t} heads with massive dims": float(shares[t]) for t in "QKV"}
    headline |= {f"mean max ratio {t}": float(heads[heads.tensor == t].max_ratio.mean()) for t in "QKV"}
    return Result(tables | broken, [*claims, m4], headline | losses, {"lambda": LAMBDA})


def pooled(dims: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Magnitudes over several texts: token-weighted, with ratios to the head's mean and offsets.

    Returns
    -------
    pandas.DataFrame
        One row per layer, tensor, head and dim: pair, n, mean, rms, rms_pre (un-rotated), ratio, ratio_pre, offset
        (|mean| / std of un-rotated values), first, sign0 (position 0's sign against the other tokens' mean).
    """
    stacked = pd.concat(dims)
    weights = stacked.n
    sums = pd.DataFrame(
        {**{c: stacked[c] for c in [*DIM, "pair", "n", "first"]}}
        | {c: stacked[c] * weights for c in ("mean", "mean_pre")}
        | {c: stacked[c].pow(2) * weights for c in ("rms", "rms_pre")}
    )
    out = sums.groupby([*DIM, "pair"], as_index=False).sum()
    rest = out["mean"] - out["first"]
    for name in ("mean", "mean_pre", "rms", "rms_pre"):
        out[name] /= out.n
    variance = (out.rms_pre - out.mean_pre.pow(2)).clip(lower=0)
    out["offset"] = out.mean_pre.abs() / np.sqrt(variance).replace(0, np.nan)
    out["rms"], out["rms_pre"] = np.sqrt(out.rms), np.sqrt(out.rms_pre)
    for ratio, rms in (("ratio", "rms"), ("ratio_pre", "rms_pre")):
        out[ratio] = out[rms] / out.groupby(HEAD)[rms].transform("mean")
    out["sign0"] = np.sign(out["first"]) * np.sign(rest)
    return out.drop(columns="mean_pre")


def _massive(magnitudes: pd.DataFrame, wavelength: pd.Series, trained: int | None) -> pd.DataFrame:
    """The massive dims: rank in their head, share of the head's energy, wavelength of their pair."""
    energy = magnitudes.rms.pow(2)
    share = energy / energy.groupby([magnitudes[c] for c in HEAD]).transform("sum")
    rank = magnitudes.groupby(HEAD).ratio.rank(ascending=False, method="first").astype(int)
    out = magnitudes.assign(energy_share=share, rank=rank)
    out = out.merge(wavelength.rename("wavelength"), left_on=["layer", "pair"], right_index=True, how="left")
    out["wavelength_ratio"] = out.wavelength / (trained or np.nan)
    columns = ["ratio", "rank", "energy_share", "offset", "wavelength", "wavelength_ratio", "sign0"]
    return out.loc[out.ratio > LAMBDA, [*DIM, "pair", *columns]].reset_index(drop=True)


def per_head(magnitudes: pd.DataFrame) -> pd.DataFrame:
    """Per head: largest ratio, number of massive dims and their share of energy, the top dim and its pair."""
    top = magnitudes.loc[magnitudes.groupby(HEAD).ratio.idxmax(), [*HEAD, "dim", "pair", "ratio"]]
    top = top.rename(columns={"dim": "top_dim", "pair": "top_pair", "ratio": "max_ratio"})
    energy = magnitudes.rms.pow(2)
    is_massive = magnitudes.ratio > LAMBDA
    sums = magnitudes[HEAD].assign(count=is_massive, energy=energy, taken=energy.where(is_massive, 0))
    sums = sums.groupby(HEAD, as_index=False).sum()
    sums["energy_share"] = sums.taken / sums.energy
    pre = magnitudes.groupby(HEAD, as_index=False).ratio_pre.max().rename(columns={"ratio_pre": "max_ratio_pre"})
    return top.merge(pre, on=HEAD).merge(sums.drop(columns=["energy", "taken"]), on=HEAD)


def _wavelengths(tables: Tables) -> pd.Series:
    """Tokens per full circle by (layer, pair)."""
    if "pairs" not in tables:
        return pd.Series(dtype=float, index=pd.MultiIndex.from_tuples([], names=["layer", "pair"]))
    return tables["pairs"].groupby(["layer", "pair"]).wavelength.first()


def _overlap(per_text: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Sizes of the sets of chosen dims in two texts, of their intersection and union, per layer and tensor."""
    rows = []
    chosen = {
        "lambda-5": [t.ratio > LAMBDA for t in per_text],
        "top-1": [t.groupby(HEAD).ratio.rank(ascending=False, method="first") == 1 for t in per_text],
    }
    for (rule, sets), (a, b) in itertools.product(chosen.items(), itertools.combinations(range(len(per_text)), 2)):
        frame = per_text[a][["layer", "tensor"]].assign(
            n_a=sets[a], n_b=sets[b], both=sets[a] & sets[b], either=sets[a] | sets[b]
        )
        rows.append(frame.groupby(["layer", "tensor"], as_index=False).sum().assign(rule=rule, text_a=a, text_b=b))
    columns = ["layer", "tensor", "n_a", "n_b", "both", "either", "rule", "text_a", "text_b"]
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=columns)


def _stability(overlap: pd.DataFrame) -> pd.DataFrame:
    keys = ["tensor", "text_a", "text_b", "rule"]
    out = overlap.groupby(keys, as_index=False)[["n_a", "n_b", "both", "either"]].sum()
    out["jaccard"] = (out.both / out.either.replace(0, np.nan)).astype(float)
    return out.drop(columns=["both", "either"])


def _layers(lm: LM, heads: pd.DataFrame, per_text: Sequence[pd.DataFrame]) -> pd.DataFrame:
    out = pd.DataFrame(
        [(a.layer, a.kind, a.position) for a in lm.anatomy.layers], columns=["layer", "kind", "position"]
    )
    of_layer = heads.assign(has=heads["count"] > 0).groupby(["layer", "tensor"])
    for name, column in (("max_ratio", "max_ratio"), ("massive", "has")):
        wide = of_layer[column].mean().unstack()
        wide.columns = [f"{name}_{t.lower()}" for t in wide.columns]
        out = out.merge(wide.reset_index(), on="layer", how="left")
    spread = pd.concat(per_text).groupby("layer", as_index=False)[["entropy", "sink_mass"]].mean()
    return out.merge(spread, on="layer", how="left")


def _m1(heads: pd.DataFrame, twins: Sequence[pd.DataFrame], options: Options, n: str) -> Claim:
    by_layer = heads.assign(has=heads["count"] > 0).groupby(["layer", "tensor"]).has.mean().unstack()
    layers = by_layer.index.to_numpy()
    share = by_layer.mean()

    def bounds(first: str, second: str | None = None) -> Interval:
        values = by_layer[first] - (by_layer[second] if second else 0)
        return intervals.layer_bootstrap(values, layers, seed=options.seed)

    def decide(factor: float) -> Ruling:
        of = {
            t: (
                Condition(f"share {t}", share[t], bounds(t), ">=", scaled(0.25, factor)),
                Condition(f"{t} − V", share[t] - share.V, bounds(t, "V"), ">", 0.0),
            )
            for t in "QK"
        }
        v = Condition("share V", share.V, bounds("V"), "<=", scaled(0.10, factor))
        good = [all(c.met for c in of[t]) for t in "QK"]
        why = reasons(*of["Q"], *of["K"], v)
        if all(good) and v.met:
            return "holds", why
        return ("partly" if any(good) else "fails"), why

    lesser = "Q" if share.Q <= share.K else "K"
    null = None
    if twins:
        of_twins = pd.concat(twins).assign(has=lambda t: t["count"] > 0).groupby("tensor").has.mean()
        null = float(min(of_twins.Q, of_twins.K) - of_twins.V)
    return claim(
        "M1", RULES["M1"], decide, value=share[lesser] - share.V, interval=bounds(lesser, "V"),
        null=null, null_name="the same with random weights", n=n,
    )  # fmt: skip


def _m2(
    massive: pd.DataFrame,
    magnitudes: pd.DataFrame,
    overlap: pd.DataFrame,
    wavelength: pd.Series,
    trained: int | None,
    options: Options,
    n_texts: int,
) -> Claim:
    found = massive[massive.tensor.isin(["Q", "K"]) & (massive.pair >= 0)]
    if wavelength.empty:
        return not_tested("M2", "no layer rotates its queries and keys, so no dim belongs to a pair", RULES["M2"])
    if trained is None:
        return not_tested("M2", "the trained length is not known; give it with --trained-length", RULES["M2"])
    if len(found) < FEWEST_DIMS:
        return not_tested("M2", f"{len(found)} massive Q/K dims, fewer than {FEWEST_DIMS}", RULES["M2"])
    if n_texts < 2:
        return not_tested("M2", "one text says nothing of stability between texts", RULES["M2"])
    slow = (found.wavelength >= trained).to_numpy(float)
    of_slow = intervals.layer_bootstrap(slow, found.layer.to_numpy(), seed=options.seed)
    pairs = float((wavelength >= trained).mean())
    sets = overlap[(overlap.rule == "lambda-5") & overlap.tensor.isin(["Q", "K"])]
    by_layer = sets.groupby("layer")[["both", "either"]].sum()
    by_layer = by_layer[by_layer.either > 0].astype(float)
    jaccard = float(by_layer.both.sum() / by_layer.either.sum())
    of_jaccard = intervals.layer_bootstrap(
        (by_layer.both, by_layer.either), by_layer.index.to_numpy(), lambda b, e: b.sum() / e.sum(), seed=options.seed
    )
    used, beaten = _concentrated(found, magnitudes, options.seed)

    def decide(factor: float) -> Ruling:
        share = Condition("share in slow pairs", slow.mean(), of_slow, ">=", scaled_from_one(0.80, factor))
        stable = Condition("Jaccard between texts", jaccard, of_jaccard, ">=", scaled_from_one(0.80, factor))
        rank = beaten >= 1 - 0.01 * factor
        why = (
            f"{reasons(share, stable)}; the most used quarter of pairs holds {used:.0%} of them, more "
            f"than in {beaten * PERMUTATIONS:,.0f} of {PERMUTATIONS:,} within-head permutations"
        )
        if share.met and stable.met and rank:
            return "holds", why
        return ("partly" if of_slow.low > pairs else "fails"), why

    return claim(
        "M2", RULES["M2"], decide, value=float(slow.mean()), interval=of_slow, null=pairs,
        null_name="share of all pairs that are slow", n=f"{len(found)} massive Q/K dims, {n_texts} texts",
    )  # fmt: skip


def _concentrated(found: pd.DataFrame, magnitudes: pd.DataFrame, seed: int) -> tuple[float, float]:
    """Share of massive dims in the most used quarter of pairs, and the share of permutations that it beats.

    A permutation gives each head as many massive dims as it has, at random among its rotated dims.
    """
    rng = np.random.default_rng(seed)
    pairs = int(magnitudes.pair.max()) + 1
    quarter = max(1, math.ceil(pairs / 4))

    def most_used(at: np.ndarray) -> float:
        return float(np.sort(np.bincount(at, minlength=pairs))[::-1][:quarter].sum() / len(at))

    counts = found.groupby(HEAD).size().to_numpy()
    real = most_used(found.pair.to_numpy())
    # Ranks of random numbers are a permutation of each head's dims; dim d belongs to pair d mod pairs.
    draws = np.argsort(rng.random((PERMUTATIONS, len(counts), 2 * pairs)), axis=-1) % pairs
    taken = np.arange(2 * pairs) < counts[:, None]
    beaten = sum(real > most_used(draw[taken]) for draw in draws) / PERMUTATIONS
    return real, beaten


def _m3(heads: pd.DataFrame, options: Options, n: str) -> Claim:
    qk = heads[heads.tensor.isin(["Q", "K"])].assign(has=lambda h: h["count"] > 0)
    layers = np.sort(qk.layer.unique())
    first = layers[: max(2, math.ceil(len(layers) / 10))]
    if len(first) >= len(layers):
        return not_tested("M3", f"{len(layers)} layers of attention leave none to compare the first with", RULES["M3"])
    if not qk.has.any():
        return not_tested("M3", "no head of Q or K has a massive dim", RULES["M3"])
    share = qk.groupby("layer").has.mean()
    early, rest = share[share.index.isin(first)], share[~share.index.isin(first)]
    ratio = float(early.mean() / rest.mean()) if rest.mean() else math.inf
    of_ratio = _ratio_interval(early.to_numpy(float), rest.to_numpy(float), options.seed)
    quarter = layers[: max(2, math.ceil(len(layers) / 4))]
    present = bool(share[share.index.isin(quarter)].any())
    growth = {}
    for t in "QK":
        mean = heads[heads.tensor == t].groupby("layer").max_ratio.mean()
        columns = (mean.index.to_numpy(float), mean.to_numpy())
        of = intervals.layer_bootstrap(columns, mean.index.to_numpy(), intervals.spearman, seed=options.seed)
        growth[t] = (intervals.spearman(*columns), of)

    def decide(factor: float) -> Ruling:
        there = Condition("early over later share", ratio, of_ratio, ">=", scaled(0.5, factor))
        grows = [Condition(f"Spearman(layer, max ratio) {t}", *growth[t], ">", 0.0) for t in "QK"]
        why = reasons(there, *grows)
        if not present:
            return "fails", f"{why}; none in the first quarter of layers"
        if there.met and all(c.met for c in grows):
            return "holds", why
        return ("partly" if there.met or all(c.met for c in grows) or not there.missed else "fails"), why

    return claim(
        "M3", RULES["M3"], decide, value=ratio, interval=of_ratio, null=1.0,
        null_name="ratio if depth made no difference", n=f"{n}, first {len(first)} of {len(layers)} layers",
    )  # fmt: skip


def _ratio_interval(early: np.ndarray, rest: np.ndarray, seed: int, draws: int = 2000) -> Interval:
    """Percentile bootstrap of a ratio of means, the layers of each part redrawn among themselves."""
    rng = np.random.default_rng(seed)
    top, bottom = (x[rng.integers(0, len(x), (draws, len(x)))].mean(1) for x in (early, rest))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanquantile(top / bottom, [0.025, 0.975])
    return Interval(float(low), float(high))
