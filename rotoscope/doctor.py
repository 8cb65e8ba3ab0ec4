"""Is rotoscope exact on this model? A self-check that a user runs before believing any number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from rotoscope.checks import checks, terminal
from rotoscope.checks.bench import Bench, Check, Measure, ModelRaised, in_double
from rotoscope.checks.boundaries import RESUMED
from rotoscope.checks.edits import RESTORED, left_behind, traces
from rotoscope.checks.forwards import MODEL, OBSERVED, WEIGHTS
from rotoscope.checks.rotation import AGAIN, BEFORE, DISTANCE
from rotoscope.model.anatomy import FLOOR, Anatomy, LayerAnatomy
from rotoscope.model.lm import LM, evaluating

WIDTH = 100
# What float64 must shrink a difference to, for rounding to be what it was: transformers computes norms and softmax in
# float32 even then, so it does not vanish.
ROUNDING = FLOOR[torch.float32] / 10


@dataclass(frozen=True)
class Report:
    """What the doctor found.

    Attributes
    ----------
    model : str
        Where the model came from.
    table : pandas.DataFrame
        One row per layer: anatomy; whether Q, K and V (``qkv``), logits, un-rotated Q and K, and the boundary in
        front of the layer are reached (``exact``, ``wrong``, ``not reached``, ``undefined``, ``none``), and why not.
    checks : pandas.DataFrame
        One row per comparison: ``difference``, the largest that rounding explains (``allowed``), the same in float64
        where it was rerun, the verdict (``exact``, ``rounding``, ``the model's own``, ``fault``, ``not tested``), and
        the layer where it was largest.
    reasons : list of str
        One sentence per fault.
    notes : list of str
        What the model itself does that a reader of the numbers should know.
    """

    model: str
    table: pd.DataFrame
    checks: pd.DataFrame
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.reasons

    def summary(self) -> dict[str, Any]:
        """The report in JSON's own types: model, ok, reasons, notes, layers, checks."""
        from rotoscope.results import plain

        rows = {
            name: frame.astype(object).where(frame.notna(), None).to_dict("records")
            for name, frame in (("layers", self.table), ("checks", self.checks))
        }
        head = {"model": self.model, "ok": self.ok, "reasons": self.reasons, "notes": self.notes}
        summary: dict[str, Any] = plain({**head, **rows})
        return summary

    def text(self) -> str:
        """The report for a terminal of 100 columns; runs of layers that are alike share a line."""
        parts = [
            terminal.layers(self.table, WIDTH),
            terminal.checks(self.checks, WIDTH),
            terminal.sentences(self.notes, "-", WIDTH),
            terminal.sentences(self.reasons, "!", WIDTH),
            f"{self.model}: {'rotoscope is exact here' if self.ok else 'something is wrong'}",
        ]
        return "\n\n".join(part for part in parts if part)


@torch.no_grad()
def doctor(lm: LM) -> Report:
    """Try the tap, the rotary tables, the observers and the boundaries on a model in every way that they are used.

    Rows of several lengths run alone, batched, padded on either side and with a cache, each time on the untouched
    model too: what that does by itself is a note, what rotoscope adds is a fault. A difference above what rounding
    explains is measured again in float64, if a copy fits into memory, to tell the two apart.

    Parameters
    ----------
    lm : LM
        A wrapped model; it is left as found.

    Returns
    -------
    Report
    """
    before = traces(lm.model)
    notes = ["the model is in training mode; it was examined in evaluation mode"] if lm.model.training else []
    with _quietly(lm):
        rows = _examine(lm)
    changed = left_behind(before, traces(lm.model))
    rows.append(_Row(Measure(RESTORED, "after all checks", float(changed), 0.0, strict=True)))
    table = reach_table(lm.anatomy, rows)
    notes += [*_layer_notes(lm, table), *_model_notes(lm, rows)]
    names = ["check", "case", "difference", "allowed", "float64", "verdict", "layer", "note"]
    frame = pd.DataFrame([row.cells() for row in rows], columns=names).astype({"layer": "Int64"})
    return Report(lm.source, table, frame, [row.sentence() for row in rows if row.verdict == "fault"], notes)


@dataclass(frozen=True)
class _Row:
    """A measure, and the same in float64 (NaN where it was not rerun), or why there is none."""

    measure: Measure
    double: float = math.nan
    no_double: str = ""

    @property
    def verdict(self) -> str:
        m = self.measure
        if math.isnan(m.difference):
            return "not tested"
        if m.difference == 0:
            return "exact"
        if m.passed or self.double <= min(ROUNDING, m.difference / 10):
            return "rounding"
        return "fault" if m.whose == "ours" else "the model's own"

    @property
    def worst_layer(self) -> int | None:
        layers = self.measure.layers
        return max(layers, key=lambda layer: layers[layer]) if any(layers.values()) else None

    def cells(self) -> tuple[Any, ...]:
        m = self.measure
        note = "; ".join(part for part in (m.note, self.no_double) if part)
        return m.check, m.case, m.difference, m.allowed, self.double, self.verdict, self.worst_layer, note

    def sentence(self) -> str:
        m = self.measure
        where = "" if self.worst_layer is None else f", most in layer {self.worst_layer}"
        double = f"; in float64 {self.double:.1e}" if not math.isnan(self.double) else ""
        note = f" ({m.note})" if m.note else ""
        off = f"off by {m.difference:.1e}, allowed {m.allowed:.1e}"
        return f"{m.check} [{m.case}]: {off}{double}{where}{note}"


def _examine(lm: LM) -> list[_Row]:
    bench = Bench(lm)
    rows, in_float64 = [], _InDouble(lm)
    for check in checks(bench):
        measures = _run(check, bench)
        doubtful = [m for m in measures if not m.passed and not m.strict]
        again = {(m.check, m.case): m for m in (in_float64.rerun(check) if doubtful else [])}
        for m in measures:
            other = again.get((m.check, m.case)) if m in doubtful else None
            double = other.difference if other else math.nan
            rows.append(_Row(m, double, f"no float64: {in_float64.why_not}" if m in doubtful and not other else ""))
    return rows


def _run(check: Check, bench: Bench) -> list[Measure]:
    found: list[Measure] = []
    try:
        found.extend(check.run(bench))
    except ModelRaised as error:
        note = f"the model itself does not run so: {error}"
        found.append(Measure(check.name, check.case, math.nan, 0.0, whose="the model's", note=note))
    except Exception as error:  # whatever rotoscope raises where the untouched model runs is a fault to report
        note = " ".join(f"{type(error).__name__}: {error}".split())
        found.append(Measure(check.name, check.case, math.inf, 0.0, strict=True, note=note))
    return found


class _InDouble:
    """The float64 copy, made when it is first needed."""

    def __init__(self, lm: LM):
        self.lm = lm
        self.bench: Bench | None = None
        self.why_not = ""

    def rerun(self, check: Check) -> list[Measure]:
        """The measures of one check in float64, if that can be."""
        if self.bench is None and not self.why_not:
            copy = in_double(self.lm)
            if isinstance(copy, str):
                self.why_not = copy
            else:
                self.bench = Bench(copy)
        if self.bench is None:
            return []
        return _run(check, self.bench)


@contextmanager
def _quietly(lm: LM) -> Iterator[None]:
    """Evaluation mode and a random state of its own, both put back."""
    devices = sorted({p.device.index or 0 for p in lm.model.parameters() if p.device.type == "cuda"})
    with evaluating(lm.model), torch.random.fork_rng(devices):
        yield


def reach_table(anatomy: Anatomy, rows: Iterable[_Row] = ()) -> pd.DataFrame:
    """One row per layer: its shape, and what of it is reached.

    Without measures, what the anatomy promises stands as exact.
    """
    wrong: dict[str, set[int]] = {}
    boundary: dict[int, float] = {}
    for row in rows:
        m = row.measure
        if m.check == RESUMED:
            boundary = dict(m.layers) if row.verdict == "the model's own" else {}
        if row.verdict == "fault":
            wrong.setdefault(m.check, set()).update(i for i, gap in m.layers.items() if gap > m.allowed)
    floor = FLOOR[torch.float32]
    records = []
    for a in anatomy.layers:
        seen = "none" if a.kind == "none" else "wrong" if a.layer in wrong.get(OBSERVED, ()) else "exact"
        logits = "wrong" if a.layer in wrong.get(WEIGHTS, ()) else seen
        turned = any(a.layer in wrong.get(name, ()) for name in (BEFORE, AGAIN, DISTANCE))
        carried = not boundary or boundary.get(a.layer, 0.0) <= floor
        why = [a.note] if a.note else []
        if not carried:
            why.append(f"h[{a.layer}] alone does not carry what the layers from here on need")
        records.append(
            {
                "layer": a.layer, "kind": a.kind, "position": a.position or "-", "heads": a.heads,
                "kv_heads": a.kv_heads, "head_dim": a.head_dim, "v_head_dim": a.v_head_dim,
                "rotary_dims": a.rotary_dims, "pairing": a.pairing or "-", "window": a.window, "softcap": a.softcap,
                "sinks": a.sinks, "calls": a.calls, "qkv": seen, "logits": logits,
                "pre_rope": "wrong" if turned else _pre_rope(a), "boundary": "exact" if carried else "not reached",
                "why": "; ".join(why),
            }
        )  # fmt: skip
    return pd.DataFrame(records).astype({"window": "Int64", "softcap": "Float64"})


def _pre_rope(a: LayerAnatomy) -> str:
    if a.kind == "none":
        return "none"
    if a.rotation is None:
        return "not reached"
    return "exact" if a.position in ("rotary", "none") else "undefined"


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


_KINDS: list[tuple[Callable[[LayerAnatomy], bool], str]] = [
    (lambda a: a.kind == "none", "no softmax attention, hence no Q, K, V and logits"),
    (lambda a: a.position == "learned", "learned positions are part of the residual stream; nothing to un-rotate"),
    (lambda a: a.position == "alibi", "positions enter as a bias on the logits (ALiBi); nothing to un-rotate"),
    (lambda a: a.position == "none", "no positions enter queries and keys (NoPE)"),
    (lambda a: a.kind != "none" and a.rotation is None, "queries and keys before rotation are not reached"),
    (
        lambda a: a.calls > 1,
        "several calls a forward: studies count their heads on, observers used directly add them up",
    ),
]


def _layer_notes(lm: LM, table: pd.DataFrame) -> list[str]:
    layers = lm.anatomy.layers
    notes = []
    for holds, sentence in _KINDS:
        if some := [a.layer for a in layers if holds(a)]:
            notes.append(f"layers {ranges(some)}: {sentence}")
    if some := list(table.layer[table.boundary != "exact"]):
        notes.append(f"layers {ranges(some)}: the residual boundary in front of them is not all that they need")
    if lm.trained_length is None:
        notes.append("the trained length is not known; give it with --trained-length")
    bench = Bench(lm)
    if bench.window >= max(bench.lengths):
        notes.append(f"a sliding window of {bench.window} tokens is wider than the rows tried ({max(bench.lengths)})")
    return notes


def _model_notes(lm: LM, rows: list[_Row]) -> list[str]:
    notes = []
    for row in rows:
        m = row.measure
        if m.check == RESUMED and row.verdict == "the model's own":
            notes.append(f"residual boundaries {_unreached(m)} are not exact: {m.note or f'off by {m.difference:.1e}'}")
        elif row.verdict == "the model's own" and m.check == MODEL:
            by = "gives NaN" if m.note else f"changes by {m.difference:.1e} of its logits' range"
            notes.append(f"the model itself {by} under {m.case}{_cause(lm, m.case)}")
        elif row.verdict == "not tested":
            notes.append(f"not tested: {m.check} [{m.case}]: {m.note}")
    return notes


def _unreached(m: Measure) -> str:
    return ranges(k for k, gap in m.layers.items() if gap > m.allowed)


def _cause(lm: LM, case: str) -> str:
    if "padding" not in case:
        return ""
    if any(a.kind == "none" for a in lm.anatomy.layers):
        return ": its layers without attention may see padding"
    return "" if "position_ids" in Bench(lm).takes else ": it takes no position_ids and makes its own"
