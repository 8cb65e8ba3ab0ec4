"""Tables of the quantization study, from its finished cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from rotoscope.engine import REFUSED
from rotoscope.stats import intervals, paired
from rotoscope.studies.disruption_tables import same_items
from rotoscope.studies.items import labels
from rotoscope.studies.observe import Tables
from rotoscope.studies.quantization_plan import REFERENCE, Method
from rotoscope.tasks import find

PLAIN = "plain"
COLUMNS = [
    "method", "kind", "bits", "share_changed", "bytes", "nll", "dnll", "dnll_low", "dnll_high", "kl", "kl_low",
    "kl_high", "n", "task", "variant", "knowledge", "items", "chance", "accuracy", "retention", "low", "high",
    "dlogprob", "dlogprob_low", "dlogprob_high", "note",
]  # fmt: skip
KEYS = ["method", "arm", "draw"]


@dataclass(frozen=True)
class Measured:
    """What a method's cells gave.

    Attributes
    ----------
    facts
        bits, share_changed, bytes.
    texts
        text, clean, nll, kl.
    items
        Every task's, with their spec.
    note
        Why it was not run, or what to make of it.
    """

    method: Method
    facts: Mapping[str, float] = field(default_factory=dict)
    texts: pd.DataFrame | None = None
    items: pd.DataFrame | None = None
    note: str = ""


def quantization(clean: pd.DataFrame, every: Sequence[Measured], seed: int) -> pd.DataFrame:
    """One row per method and task; what belongs to the method alone stands in each of its rows.

    Parameters
    ----------
    clean : pandas.DataFrame
        Items of the model as it is, by spec.
    """
    rows = [row for measured in every for row in _rows(clean, measured, seed)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(clean: pd.DataFrame, of: Measured, seed: int) -> Iterator[dict[str, Any]]:
    shared = {"method": of.method.label, "kind": of.method.kind, **of.facts, **likelihood(of.texts), "note": of.note}
    if of.items is None or of.items.empty:
        yield shared | {"task": "", "variant": "", "knowledge": ""}
        return
    for spec, items in of.items.groupby("spec", sort=False):
        yield shared | _on_task(str(spec), *same_items(clean[clean.spec == spec], items), seed)


def likelihood(texts: pd.DataFrame | None) -> dict[str, float]:
    """Means over texts, with Student's t."""
    if texts is None or texts.empty:
        return {"n": 0}
    dnll = texts.nll - texts.clean
    out = {"n": len(texts), "nll": float(texts.nll.mean())}
    for name, x in (("dnll", dnll), ("kl", texts.kl)):
        bounds = intervals.mean_t(x)
        out |= {name: float(x.mean()), f"{name}_low": bounds.low, f"{name}_high": bounds.high}
    return out


def _on_task(spec: str, clean: pd.DataFrame, changed: pd.DataFrame, seed: int) -> dict[str, Any]:
    chance = float(clean.chance.mean())
    kept, of_kept = paired.retention(clean.correct, changed.correct, chance, seed)
    change, of_change = paired.mean_change(clean.logprob, changed.logprob, seed)
    return {
        **labels(spec), "knowledge": find(spec).knowledge, "items": len(changed), "chance": chance,
        "accuracy": float(changed.correct.mean()), "retention": kept, "low": of_kept.low, "high": of_kept.high,
        "dlogprob": change, "dlogprob_low": of_change.low, "dlogprob_high": of_change.high,
    }  # fmt: skip


def protected(clean: pd.DataFrame, items: pd.DataFrame, bits: pd.DataFrame) -> pd.DataFrame:
    """One row per width, arm, seed and task: mean −log-probability of the right answers.

    Parameters
    ----------
    clean, items : pandas.DataFrame
        Items of the model as it is; and with method, arm, draw of every width that something is protected from.
    bits : pandas.DataFrame
        method, arm, draw, bits.
    """
    of_bits = bits.drop_duplicates(KEYS).set_index(KEYS).bits if len(bits) else {}
    rows = []
    for (method, arm, draw, spec), some in items.groupby([*KEYS, "spec"], sort=False):
        before, after = same_items(clean[clean.spec == spec], some)
        nll, lost = -after.logprob, before.logprob - after.logprob
        rows.append(
            {
                "width": method, "arm": arm, "seed": draw, "bits": of_bits.get((method, arm, draw), np.nan),
                **labels(spec), "knowledge": find(spec).knowledge, "nll": float(nll.mean()),
                "dnll": float(lost.mean()), "n": len(after),
            }
        )  # fmt: skip
    names = ["width", "arm", "seed", "bits", "task", "variant", "knowledge", "nll", "dnll", "n"]
    return pd.DataFrame(rows, columns=names)


def layers(done: Mapping[str, Tables], folder: str, methods: Sequence[str]) -> pd.DataFrame:
    """One row per method and layer that was quantized alone."""
    rows = []
    for method in methods:
        for name, found in done.items():
            if not name.startswith(f"{folder}/{method}/") or REFUSED in found:
                continue
            texts = found["texts"]
            if "layer" not in texts:
                texts = texts.assign(layer=int(name.rpartition("/")[2]))
            for layer, of in texts.groupby("layer"):
                told = likelihood(of)
                rows.append((layer, method, *(told[x] for x in ("dnll", "dnll_low", "dnll_high")), told["n"]))
    return pd.DataFrame(rows, columns=["layer", "method", "dnll", "low", "high", "n"])


def effects(reference: pd.DataFrame, by_method: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """What was re-measured: method, measure, value, clean; the model itself first."""
    clean = reference.set_index("measure").value
    found = [reference.assign(method=REFERENCE, clean=reference.value)]
    for method, of in by_method.items():
        own = of if "clean" in of else of.assign(clean=of.measure.map(clean))
        found.append(own.assign(method=method))
    return pd.concat(found, ignore_index=True)[["method", "measure", "value", "clean"]]
