"""Tables of the disruption grid: every arm against the clean run on the same items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rotoscope.engine import REFUSED
from rotoscope.model.lm import LM
from rotoscope.stats import paired
from rotoscope.studies.arms import CLEAN, DOSES, JUDGED, Arm, Grid
from rotoscope.studies.disruption import (
    ADDITIVITY,
    ATTENTION,
    DOSE,
    DOSE_ARMS,
    LAYER,
    OUTPUTS,
    SCORED,
    cell_name,
    layer_arms,
)
from rotoscope.studies.items import labels, slug
from rotoscope.studies.observe import Tables
from rotoscope.tasks import find

Done = Mapping[str, Tables]
ITEMS = ["task", "variant", "arm", "id", "correct", "logprob", "answer", "gold", "prompt_tokens", "chance", "template"]


def tables(lm: LM, of_size: Grid, done: Done, seed: int) -> dict[str, pd.DataFrame]:
    """What the report and the claim read, from the finished cells; tables that nothing was run for are left out."""
    arms = (*JUDGED, *of_size.arms)
    every: dict[str, list[dict[str, Any]]] = {"disrupt": [], "disrupt_layers": [], "dose": []}
    kept = []
    for spec in dict.fromkeys((*of_size.judged, *of_size.shown)):
        scored = {arm.label: items for arm in arms if (items := _items(done, SCORED, spec, arm)) is not None}
        if CLEAN not in scored:
            continue
        kept += list(scored.values())
        every["disrupt"] += _corrected(list(_grid_rows(spec, arms, scored, done, seed)))
        clean = scored[CLEAN]
        for arm in layer_arms(lm):
            every["disrupt_layers"] += _curve(spec, arm, LAYER, clean, done, seed, {"layer": int(arm.label or 0)})
        for arm, (kind, dose) in zip(DOSE_ARMS, DOSES, strict=True):
            dims = _measured(done, DOSE, spec, arm)
            facts = {"kind": kind, "dose": dose, "dims": dims.get("dims", np.nan) / dims.get("heads", np.nan)}
            every["dose"] += _curve(spec, arm, DOSE, clean, done, seed, facts)
    out = {name: pd.DataFrame(rows) for name, rows in every.items() if rows}
    if kept:
        out["items"] = pd.concat(kept, ignore_index=True)[ITEMS]
    for name, folder, table in (
        ("disrupt_attention", ATTENTION, "attention"),
        ("disrupt_additivity", ADDITIVITY, "additivity"),
        ("outputs", OUTPUTS, "outputs"),
    ):
        some = list(_by_arm(done, folder, table, arms, of_size))
        if some:
            out[name] = pd.concat(some, ignore_index=True)
    if "disrupt_additivity" in out:
        out["disrupt_additivity"] = (
            out["disrupt_additivity"].groupby(["arm", "layer"], as_index=False, sort=False).mean()
        )
    return out


def _items(done: Done, folder: str, spec: str, arm: Arm) -> pd.DataFrame | None:
    found = done.get(cell_name(folder, spec, arm))
    if found is None or REFUSED in found:
        return None
    return found["items"].assign(arm=arm.label)


def _measured(done: Done, folder: str, spec: str, arm: Arm) -> dict[str, float]:
    found = done.get(cell_name(folder, spec, arm), {})
    return dict(found["measured"].iloc[0]) if "measured" in found else {}


def _labels(spec: str) -> dict[str, str]:
    return {**labels(spec), "knowledge": find(spec).knowledge}


def _grid_rows(
    spec: str, arms: Sequence[Arm], scored: Mapping[str, pd.DataFrame], done: Done, seed: int
) -> Iterator[dict[str, Any]]:
    for arm in arms:
        if arm.label not in scored:
            continue
        how = arm.disrupt
        clean, changed = same_items(scored[CLEAN], scored[arm.label])
        chance = float(clean.chance.mean())
        kept, of_kept = paired.retention(clean.correct, changed.correct, chance, seed)
        sums = _measured(done, SCORED, spec, arm)
        yield {
            **_labels(spec),
            "arm": arm.label,
            "group": arm.group,
            "targets": how.targets if how else "",
            "selection": how.selection if how else "",
            "replacement": how.replacement if how else "",
            "positions": how.positions if how else "",
            **_against(clean, changed, seed),
            "chance": chance,
            "retention": kept,
            "retention_low": of_kept.low,
            "retention_high": of_kept.high,
            "p": paired.mcnemar(clean.correct, changed.correct) if how else np.nan,
            "change": sums["change"] / sums["energy"] if sums.get("energy") else np.nan,
            "judged": arm.judged,
        }


def same_items(clean: pd.DataFrame, changed: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Both on the items that both were asked, in the same order."""
    both = clean.merge(changed[["id"]], on="id")
    return both, changed.set_index("id").loc[both.id].reset_index()


def _against(clean: pd.DataFrame, changed: pd.DataFrame, seed: int) -> dict[str, Any]:
    value, (low, high) = paired.accuracy(changed.correct)
    change, (change_low, change_high) = paired.mean_change(clean.logprob, changed.logprob, seed)
    return {
        "n": len(changed), "accuracy": value, "low": low, "high": high, "logprob": float(changed.logprob.mean()),
        "dlogprob": change, "dlogprob_low": change_low, "dlogprob_high": change_high,
    }  # fmt: skip


def _corrected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one task with Holm's correction over its arms."""
    for row, p in zip(rows, paired.holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p
    return rows


def _curve(
    spec: str, arm: Arm, folder: str, clean: pd.DataFrame, done: Done, seed: int, facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    items = _items(done, folder, spec, arm)
    if items is None:
        return []
    return [{**facts, **_labels(spec), **_against(*same_items(clean, items), seed)}]


def _by_arm(done: Done, folder: str, table: str, arms: Sequence[Arm], of_size: Grid) -> Iterator[pd.DataFrame]:
    """One kind of cell's tables, each with its arm, and its task where it belongs to one."""
    for name, found in done.items():
        if not name.startswith(folder + "/") or table not in found:
            continue
        parts = name.split("/")
        arm = next(a for a in arms if slug(a.label) in parts)
        frame = found[table].assign(arm=arm.label)
        if folder == OUTPUTS:
            spec = next(s for s in (*of_size.judged, *of_size.shown) if slug(s) in parts)
            frame = frame.assign(**labels(spec))
        yield frame
