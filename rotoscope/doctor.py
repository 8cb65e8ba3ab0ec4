"""Is rotoscope exact on this model? A self-check that a user runs before believing any number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from rotoscope.model.anatomy import FLOOR, Anatomy, logits, probe_ids, relative
from rotoscope.model.lm import LM
from rotoscope.model.residual import check as check_boundaries
from rotoscope.model.tap import AttentionCall, tap

LENGTHS = (1, 7, 64)


@dataclass(frozen=True)
class Report:
    """What the doctor found.

    Attributes
    ----------
    ok : bool
        Whether rotoscope is exact here.
    table : pandas.DataFrame
        One row per layer: anatomy, calls per forward, what is reached.
    checks : pandas.DataFrame
        One row per check: what was compared, the difference, the largest that rounding explains, the verdict.
    reasons : list of str
        One sentence per failed check.
    notes : list of str
        What the model itself does that a reader of the numbers should know.
    """

    table: pd.DataFrame
    checks: pd.DataFrame
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.reasons

    def summary(self) -> dict[str, Any]:
        """The report in JSON's own types."""
        from rotoscope.results import plain

        rows = {name: frame.to_dict("records") for name, frame in (("layers", self.table), ("checks", self.checks))}
        summary: dict[str, Any] = plain({"ok": self.ok, "reasons": self.reasons, "notes": self.notes, **rows})
        return summary


class _Counter:
    """Counts calls per layer."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}

    def observe(self, call: AttentionCall) -> None:
        self.calls[call.layer] = self.calls.get(call.layer, 0) + 1


@torch.no_grad()
def doctor(lm: LM) -> Report:
    """Check the tap and the rotary tables on a model, over several lengths.

    Parameters
    ----------
    lm : LM
        A wrapped model.

    Returns
    -------
    Report
    """
    floor = FLOOR.get(lm.dtype, FLOOR[torch.float32])
    rows, counter = [], _Counter()
    before = getattr(lm.model.config, "_attn_implementation", None)
    lengths = [n for n in LENGTHS if n <= (lm.trained_length or max(LENGTHS))]
    for n in lengths:
        ids = probe_ids(lm.model, lm.anatomy.vocabulary, n)
        plain = logits(lm.model, ids)
        with tap(lm, counter):
            tapped = logits(lm.model, ids)
        again = logits(lm.model, ids)
        # Without an editor the tap only looks on, so nothing but a model that is itself not repeatable may differ.
        allowed = relative(again, plain)
        rows.append((f"tap, {n} tokens", relative(tapped, plain), allowed))
    rows.append(("a later token changes earlier logits", lm.anatomy.causal_difference, floor))
    errors = [layer.rotation.error for layer in lm.anatomy.rotary if layer.rotation is not None]
    if errors:
        rows.append(("re-rotated queries and keys", max(errors), floor))
    ids = probe_ids(lm.model, lm.anatomy.vocabulary, lengths[-1])
    boundaries = check_boundaries(lm.model, {"input_ids": ids})
    if boundaries.worst <= floor:
        rows.append(("resumed from every boundary", boundaries.worst, floor))
    after = getattr(lm.model.config, "_attn_implementation", None)
    rows.append(("attention implementation put back", float(before != after or type(before) is not type(after)), 0.0))
    missed = [a.layer for a in lm.anatomy.attention if counter.calls.get(a.layer, 0) != a.calls * len(lengths)]
    rows.append(("layers whose number of calls varies", float(len(missed)), 0.0))
    checks = pd.DataFrame(rows, columns=["check", "difference", "allowed"])
    checks["ok"] = checks.difference <= checks.allowed
    reasons = [f"{r.check}: {r.difference:.1e}, allowed {r.allowed:.1e}" for r in checks[~checks.ok].itertuples()]
    notes = _notes(lm)
    if boundaries.worst > floor:
        notes.append(f"residual boundaries are not reached: {boundaries.reason or f'off by {boundaries.worst:.1e}'}")
    return Report(reach_table(lm.anatomy), checks, reasons, notes)


def reach_table(anatomy: Anatomy) -> pd.DataFrame:
    """One row per layer: its shape, and whether Q, K, V and logits, and un-rotated Q and K, are reached."""
    rows = []
    for layer in anatomy.layers:
        reached = layer.kind == "attention"
        unrotated = "exact" if layer.rotation is not None and reached else "not reached"
        rows.append(
            (
                layer.layer,
                layer.kind,
                layer.position or "-",
                layer.heads,
                layer.kv_heads,
                layer.head_dim,
                layer.rotary_dims,
                layer.pairing or "-",
                layer.window,
                layer.softcap,
                layer.sinks,
                layer.calls,
                "exact" if reached else "none",
                unrotated if reached else "none",
                layer.note,
            )
        )
    names = (
        "layer", "kind", "position", "heads", "kv_heads", "head_dim", "rotary_dims", "pairing", "window", "softcap",
        "sinks", "calls", "qkv_logits", "pre_rope", "note",
    )  # fmt: skip
    return pd.DataFrame(rows, columns=list(names)).astype({"window": "Int64", "softcap": "Float64"})


def _notes(lm: LM) -> list[str]:
    notes = []
    without = [layer.layer for layer in lm.anatomy.layers if layer.kind == "none"]
    if without:
        notes.append(f"layers {', '.join(map(str, without))} compute no softmax attention: nothing is said of them")
    unknown = [layer.layer for layer in lm.anatomy.attention if layer.rotation is None]
    if unknown:
        notes.append(f"layers {', '.join(map(str, unknown))}: queries and keys before rotation are not reached")
    if lm.trained_length is None:
        notes.append("the trained length is not known; give it with --trained-length")
    return notes
