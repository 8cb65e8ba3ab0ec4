"""Tables of the depth study: curves, safe depths, swaps and costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rotoscope.engine import REFUSED
from rotoscope.model.layers import decoder_layers
from rotoscope.model.lm import LM
from rotoscope.stats import intervals, paired
from rotoscope.stats.curves import Curve
from rotoscope.studies.depth_cells import CLEAN, COST, SWAP, TASK
from rotoscope.studies.depth_plan import ENOUGH, EPSILON, NATS
from rotoscope.studies.items import labels, slug
from rotoscope.studies.observe import Tables
from rotoscope.studies.swap_pairs import SETS

Done = Mapping[str, Tables]
WHOSE = ("original", "donor", "other")


def curves(done: Done, specs: Sequence[str], layers: int) -> dict[str, dict[str, Curve]]:
    """Per task and manipulation, every item clean and at each depth."""
    out: dict[str, dict[str, Curve]] = {}
    for spec in specs:
        found = done.get(f"{TASK}/{slug(spec)}", {})
        if "depth_items" not in found:
            continue
        items = found["depth_items"]
        by_item = items.set_index(["id", "manipulation", "k"])
        right, logprob = (by_item[column].unstack(["manipulation", "k"]) for column in ("correct", "logprob"))
        clean = (CLEAN, layers)
        out[spec] = {
            name: Curve(
                layers, np.array(sorted(right[name].columns), float), right[clean].to_numpy(),
                right[name].sort_index(axis=1).to_numpy(), logprob[clean].to_numpy(),
                logprob[name].sort_index(axis=1).to_numpy(), float(items.chance.mean()),
            )
            for name in dict.fromkeys(items.manipulation)
            if name != CLEAN
        }  # fmt: skip
    return out


def depth(found: Mapping[str, Mapping[str, Curve]], seed: int) -> pd.DataFrame:
    """One row per task, manipulation and depth, with intervals; ``k = L`` is the clean model."""
    rows: list[dict[str, Any]] = []
    for spec, by_name in found.items():
        named = labels(spec)
        for name, curve in by_name.items():
            ends = (*zip(curve.ks, curve.changed.T, curve.changed_logprob.T, strict=True),)
            for k, right, logprob in (*ends, (curve.layers, curve.clean, curve.logprob)):
                value, (low, high) = paired.accuracy(right)
                change, (change_low, change_high) = paired.mean_change(curve.logprob, logprob, seed)
                loss = intervals.agresti_min(curve.clean, right)
                rows.append(
                    {
                        **named, "manipulation": name, "k": int(k), "n": curve.n, "accuracy": value,
                        "low": low, "high": high, "chance": curve.chance, "clean": float(curve.clean.mean()),
                        "loss": float(curve.clean.mean() - value), "loss_low": loss.low, "loss_high": loss.high,
                        "logprob": float(logprob.mean()), "dlogprob": change, "dlogprob_low": change_low,
                        "dlogprob_high": change_high,
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def safe_depth(found: Mapping[str, Mapping[str, Curve]]) -> pd.DataFrame:
    """The smallest depth from which on nothing more than `EPSILON` is lost, per task and manipulation."""
    rows = []
    for spec, by_name in found.items():
        named = labels(spec)
        for name, curve in by_name.items():
            k, reason = safe(curve)
            there = curve.ks == k
            rows.append(
                {
                    **named, "manipulation": name, "k": k, "share": k / curve.layers,
                    "loss": _at(curve.clean.mean() - curve.changed.mean(0), there),
                    "loss_high": _at(curve.loss_high, there),
                    "dlogprob": _at((curve.changed_logprob - curve.logprob[:, None]).mean(0), there), "n": curve.n,
                    "epsilon": EPSILON, "reason": reason,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def safe(curve: Curve, factor: float = 1.0) -> tuple[float, str]:
    """Safe depth and, where there is none (NaN), why; ``factor`` scales what may be lost."""
    if not curve.above_chance():
        return np.nan, f"not tested: clean accuracy {curve.clean.mean():.2f} is not above chance ({curve.chance:.2f})"
    k = curve.safe(EPSILON * factor, nats(curve, factor))
    if k == curve.layers:
        return np.nan, f"none of the depths tested, {curve.ks[0]:.0f} to {curve.ks[-1]:.0f}"
    return k, "" if curve.n >= ENOUGH else f"{curve.n} items: log-likelihood loss below {NATS * factor:g} nats besides"


def nats(curve: Curve, factor: float = 1.0) -> float | None:
    """What log-likelihood may be lost besides; None where there are enough items for accuracy alone."""
    return NATS * factor if curve.n < ENOUGH else None


def _at(values: np.ndarray, there: np.ndarray) -> float:
    return float(values[there][0]) if there.any() else np.nan


def swap(done: Done) -> pd.DataFrame:
    """Shares of the answers of either prompt by set and depth, with Wilson intervals."""
    rows = []
    for name, items in swap_items(done).items():
        for k, of_k in items.groupby("k"):
            row = {"set": name, "k": int(k), "n": len(of_k)}
            for whose in WHOSE:
                count = int((of_k.said == whose).sum())
                low, high = intervals.wilson(count, len(of_k))
                row |= {whose: count / len(of_k), f"{whose}_low": low, f"{whose}_high": high}
            rows.append(row)
    return pd.DataFrame(rows)


def swap_items(done: Done) -> dict[str, pd.DataFrame]:
    """What was said after each swap, by set."""
    found = {name: done.get(f"{SWAP}/{name}", {}).get("swap_items") for name in SETS}
    return {name: items for name, items in found.items() if items is not None and len(items)}


def swap_counts(done: Done) -> pd.DataFrame:
    """Prompts of each set, how many are answered rightly, and the pairs made of them."""
    found = (done.get(f"{SWAP}/{name}", {}).get("swap_counts") for name in SETS)
    some = [table for table in found if table is not None]
    return pd.concat(some, ignore_index=True) if some else pd.DataFrame()


def depth_cost(lm: LM, done: Done) -> pd.DataFrame:
    """Share of prefill's multiplications that is left at each depth, and the time measured at some."""
    layers = len(lm.anatomy.layers)
    paid = np.array(list(_shares(lm)))
    k = np.arange(layers + 1)
    above = np.concatenate([np.cumsum(paid[::-1])[::-1], [0.0]])
    out = pd.DataFrame({"k": k, "share": k / layers, "flops": (k + above) / layers})
    timed = done.get(COST, {}).get("prefill")
    columns = ["seconds", "full_seconds", "tokens"]
    if timed is None or REFUSED in done.get(COST, {}):
        return out.assign(**dict.fromkeys([*columns, "speedup"], np.nan))
    out = out.merge(timed, on="k", how="left")
    return out.assign(speedup=out.full_seconds / out.seconds)


def _shares(lm: LM) -> Iterator[float]:
    """Per layer, the share of its weights that makes queries, keys and values; 1 where there is no attention.

    All experts of a mixture count, though a token runs through some: the share is a lower bound there.
    """
    for anatomy, module in zip(lm.anatomy.layers, decoder_layers(lm.model), strict=True):
        width = lm.anatomy.hidden
        projected = anatomy.heads * anatomy.head_dim + anatomy.kv_heads * (anatomy.head_dim + anatomy.v_head_dim)
        weights = sum(p.numel() for p in module.parameters())
        if any(not p.is_floating_point() for p in module.parameters()):
            yield np.nan  # packed weights do not tell how many they are
        else:
            yield min(1.0, width * projected / weights) if anatomy.kind == "attention" and weights else 1.0
