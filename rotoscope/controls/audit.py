"""All studies on every control of a set, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from rotoscope.controls import sets
from rotoscope.controls.sets import Control
from rotoscope.engine import Cell, Engine
from rotoscope.model.likelihood import token_nll
from rotoscope.model.lm import LM
from rotoscope.results import Result, provenance
from rotoscope.stats import intervals
from rotoscope.studies import depth, massive, position, rope, texts
from rotoscope.studies.arms import TAUGHT
from rotoscope.studies.conduct import Study, facts, fingerprint
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import Options

STUDIES: tuple[Study, ...] = (position, massive, depth)
TASKS = (*TAUGHT, "key_value", "passkey:tokens=128")
KEPT = ("disrupt", "depth", "massive_heads")
BUCKET, FURTHEST = 64, 2
LENGTH = "length"


def audit(
    root: Path | None = None,
    *,
    out: Path | str | None = None,
    options: Options | None = None,
    resume: bool = False,
    progress: bool = False,
    command: str | None = None,
) -> Result:
    """Run position, massive and depth study on every control, and their behaviour past the trained length.

    Parameters
    ----------
    root : Path, optional
        A set that ``rotoscope controls train`` wrote; by default the one that comes with rotoscope.
    out, resume, progress, command
        As in :func:`rotoscope.studies.conduct`.
    options : Options, optional
        Size, seed, texts, tasks; by default the quick size on the tasks that the controls were taught.

    Returns
    -------
    Result
        Claim M5, and tables whose names begin with ``control_``; ``control_claims`` holds every claim of every control.
    """
    with Engine(out, resume=resume, progress=progress) as engine:
        return audit_in(engine, root, options, command)


def audit_in(
    engine: Engine, root: Path | None = None, options: Options | None = None, command: str | None = None
) -> Result:
    """:func:`audit` in an engine that is already open."""
    options = options or Options("quick")
    if not options.tasks:
        options = replace(options, tasks=TASKS)
    some = sets.members(root)
    models = {control.name: held(control.source) for control in some}
    engine.begin({"controls": [fingerprint(lm, options, STUDIES) for lm in models.values()]})
    cells = [cell for control in some for cell in _cells(control, models[control.name], options)]
    done = engine.run(models[some[0].name], cells)
    result = rope.judged(sets.curves(some))
    result.tables |= _tables(some, models, options, done)
    of_first = facts(models[some[0].name], options)
    said = {name: of_first[name] for name in ("size", "n_texts", "tokens_per_text", "text", "dtype", "torch_threads")}
    name = "the controls that come with rotoscope" if root is None else str(root)
    result.provenance = provenance(seed=options.seed, command=command, model=name, **said)
    result.decisions += engine.decisions
    if engine.out is not None:
        result.save(engine.out)
    return result


@lru_cache(maxsize=16)
def held(source: str) -> LM:
    """A control, loaded once."""
    from rotoscope.model.loading import load

    return load(source)


def on_control(
    lm: LM, source: str, function: Callable[..., Tables], arguments: Mapping[str, Any], **more: Any
) -> Tables:
    """A study's cell on a control in place of the run's own model."""
    return function(held(source), **arguments, **more)


def past_length(lm: LM, source: str, ids: list[list[int]]) -> Tables:
    """Negative log-likelihood by position, up to twice the trained length."""
    nll = token_nll(held(source), torch.tensor(ids))
    at = np.arange(1, nll.shape[1] + 1) // BUCKET * BUCKET
    rows = [
        {"text": i, "position": int(start), "nll": float(row[at == start].mean())}
        for i, row in enumerate(nll.numpy())
        for start in np.unique(at)
    ]
    return {LENGTH: pd.DataFrame(rows)}


def _cells(control: Control, lm: LM, options: Options) -> list[Cell]:
    out = []
    for study in STUDIES:
        for cell in study.cells(lm, options):
            arguments = {"source": control.source, "function": cell.function, "arguments": cell.arguments}
            out.append(replace(cell, name=f"{control.name}/{cell.name}", function=on_control, arguments=arguments))
    # A learned table ends at the trained length.
    times = 1 if control.record["positions"] == "learned" else FURTHEST
    long = replace(options, tokens=times * (lm.trained_length or 0))
    some = [list(text.ids) for text in texts.texts(replace(lm, trained_length=None), long)]
    out.append(
        Cell(f"{control.name}/{LENGTH}", past_length, {"source": control.source, "ids": some}, sum(map(len, some)))
    )
    return out


def _tables(
    some: list[Control], models: Mapping[str, LM], options: Options, done: Mapping[str, Tables]
) -> dict[str, pd.DataFrame]:
    found: dict[str, list[pd.DataFrame]] = {}

    def add(name: str, control: Control, rows: pd.DataFrame) -> None:
        # The disruption table's own column of that name says which positions an arm changes.
        named = rows.rename(columns={"positions": "disrupted"})
        found.setdefault(f"control_{name}", []).append(named.assign(**control.labels))

    for control in some:
        lm, start = models[control.name], f"{control.name}/"
        own = {name.removeprefix(start): tables for name, tables in done.items() if name.startswith(start)}
        for study in STUDIES:
            result = study.finish(lm, options, own)
            add("claims", control, pd.DataFrame([_row(claim) for claim in result.claims]))
            for name in KEPT:
                if name in result.tables:
                    add(name, control, result.tables[name])
        add(LENGTH, control, own[LENGTH][LENGTH])
    tables = {name: _labels_first(pd.concat(parts, ignore_index=True)) for name, parts in found.items()}
    tables["control_shares"] = shares(tables["control_massive_heads"], options.seed)
    tables["control_length"] = _lengths(tables["control_length"])
    return tables


def shares(heads: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Share of heads with massive dims and mean largest ratio of each variant, over heads and seeds.

    Returns
    -------
    pandas.DataFrame
        positions, tensor, part ("all" or "upper half" of layers), share, low, high, ratio, ratio_low, ratio_high,
        heads, seeds. Intervals are by bootstrap of whole layers, each model's its own.
    """
    rows = []
    for part, some in (("all", heads), ("upper half", sets.upper_half(heads))):
        for (positions, tensor), of in some.groupby(["positions", "tensor"], sort=False):
            clusters = (of.seed * 1000 + of.layer).to_numpy()
            row: list[Any] = [positions, tensor, part]
            for values in ((of["count"] > 0).astype(float), of.max_ratio):
                row += [float(values.mean()), *intervals.layer_bootstrap(values.to_numpy(), clusters, seed=seed)]
            rows.append([*row, len(of), of.seed.nunique()])
    numbers = ["share", "low", "high", "ratio", "ratio_low", "ratio_high", "heads", "seeds"]
    return pd.DataFrame(rows, columns=["positions", "tensor", "part", *numbers])


def _lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean over texts by position, of each text over the seeds, with an interval over texts."""
    out = []
    for (positions, start), of in rows.groupby(["positions", "position"], sort=False):
        per_text = of.groupby("text").nll.mean()
        out.append((positions, start, float(per_text.mean()), *intervals.mean_t(per_text), len(per_text)))
    return pd.DataFrame(out, columns=["positions", "position", "nll", "low", "high", "n"])


def _row(claim: Any) -> dict[str, Any]:
    low, high = claim.interval or (np.nan, np.nan)
    numbers = {name: np.nan if (x := getattr(claim, name)) is None else float(x) for name in ("value", "null")}
    words = {name: getattr(claim, name) for name in ("id", "verdict", "n", "reason")}
    return words | numbers | {"low": low, "high": high}


def _labels_first(rows: pd.DataFrame) -> pd.DataFrame:
    first = ["positions", "seed"]
    return rows[[*first, *(c for c in rows if c not in first)]]
