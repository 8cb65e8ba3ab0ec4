"""What joins the three papers, layer by layer: additivity, massive values, attention's spread, and depth.

Are layers whose logits are nearly position + content those with massive values, and those that need other tokens less?
Layers stand side by side with rank correlations between all that was measured of them; and massive dims are disrupted
and additivity measured again. No claim of a paper is judged here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from rotoscope.engine import REFUSED, Cell
from rotoscope.model.lm import LM
from rotoscope.results import Claim
from rotoscope.stats import intervals
from rotoscope.studies import massive, texts
from rotoscope.studies.arms import CLEAN, JUDGED
from rotoscope.studies.disruption import additivity_cells, additivity_name
from rotoscope.studies.observe import TRAINED, Tables
from rotoscope.studies.options import Options

TEXTS = {"quick": 0, "standard": 2, "full": 4}
"""Texts that additivity is measured on again with massive dims disrupted."""
WITHIN = "form1_within"
PROPERTIES = ("residual", "massive_energy_q", "massive_energy_k", "entropy", "sink_mass")
DAMAGES = ("freeze_damage", "skip_damage", "freeze_step", "skip_step")
DRAWS = 2000
FEWEST = 4
"""Layers below which nothing is correlated."""
RULES: dict[str, str] = {}
Columns = tuple[NDArray[np.float64], ...]


def cells(lm: LM, options: Options) -> list[Cell]:
    """Additivity under the judged arms of the disruption grid; the grid's own cells where it runs them, too."""
    count = TEXTS[options.size]
    if not count or not lm.anatomy.rotary:
        return []
    return list(additivity_cells(lm, options, texts.texts(lm, options), count))


def finish(
    lm: LM, options: Options, done: Mapping[str, Tables], tables: Mapping[str, pd.DataFrame]
) -> tuple[dict[str, pd.DataFrame], list[Claim]]:
    """Tables ``joint``, ``joint_correlations`` and ``joint_disrupted``, from what there is, and no claim.

    Parameters
    ----------
    tables
        Of finished studies: ``heads``, ``layers``, ``massive_heads``, ``depth``. What is missing is left out; what the
        observed texts alone tell is taken from their cells.
    """
    disrupted = _disrupted(done)
    given = {name: table for name, table in tables.items() if name != "layers" or "entropy" in table}
    every = {**_observed(done), **given}
    out = {
        "joint": joint(every, disrupted),
        "joint_correlations": correlations(every, options.seed),
        "joint_disrupted": changes(disrupted, options.seed),
    }
    return {name: table for name, table in out.items() if len(table)}, []


def joint(tables: Mapping[str, pd.DataFrame], disrupted: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per layer of attention, with the columns that the tables allow.

    Returns
    -------
    pandas.DataFrame
        layer; form1_within, residual (``1 - r²`` of form 1 within a query), entropy, sink_mass, means over heads;
        massive_energy_q, massive_energy_k (share of a head's energy in massive dims, mean over heads); and of the
        first task that depth was swept with, named in ``task``: freeze_damage, skip_damage (nats of the right answer's
        log-likelihood lost by freezing, or skipping attention, from this layer on), freeze_step, skip_step (what this
        layer adds to that of the layers above). Where it was measured, form1_within under each arm of ``disrupted``
        (arm, layer, form1_within), as ``form1_within_<arm>``.
    """
    out = _layers(tables)
    if out.empty:
        return out
    if damages := list(_damages(tables)):
        task, table = damages[0]
        out = out.join(table.assign(task=task))
    if disrupted is not None and len(disrupted):
        wide = disrupted.pivot_table(index="layer", columns="arm", values=WITHIN, sort=False)
        out = out.join(wide.add_prefix(f"{WITHIN}_"))
    return out.reset_index()


def correlations(tables: Mapping[str, pd.DataFrame], seed: int) -> pd.DataFrame:
    """Spearman's rank correlations over layers, and over heads between massive energy and additivity.

    Returns
    -------
    pandas.DataFrame
        a, b, over ("layers" or "heads"), task (of a damage; tasks are never averaged), rho, low, high (95 %,
        bootstrap of whole layers), and the same as ``partial``, ``partial_low``, ``partial_high`` with the rank of the
        layer held fixed: what grows with depth correlates with all else that does. n counts layers or heads.
    """
    layers = _layers(tables)
    rows = [_over_layers(layers, a, b, "", seed) for a, b in itertools.combinations(_there(layers, PROPERTIES), 2)]
    for task, table in _damages(tables):
        both = layers.join(table)
        pairs = itertools.product(_there(both, PROPERTIES), DAMAGES)
        rows += [_over_layers(both, a, b, task, seed) for a, b in pairs]
    rows += list(_over_heads(tables, seed))
    bounds = ["rho", "low", "high", "partial", "partial_low", "partial_high"]
    return pd.DataFrame([row for row in rows if row], columns=["a", "b", "over", "task", *bounds, "n"])


def changes(disrupted: pd.DataFrame, seed: int) -> pd.DataFrame:
    """How additivity changes with massive dims disrupted: one row per arm and kind, mean over layers.

    Returns
    -------
    pandas.DataFrame
        arm, kind, value, change (from clean), low, high (95 %, bootstrap of layers), n (layers).
    """
    rows = []
    kinds = [kind for kind in ("form1", WITHIN, "form2_within") if kind in disrupted]
    by_layer = disrupted.set_index(["layer", "arm"])[kinds] if kinds else pd.DataFrame()
    for kind in kinds:
        wide = by_layer[kind].unstack("arm").dropna()
        for arm in [arm.label for arm in JUDGED if arm.label in wide and CLEAN in wide]:
            change = wide[arm] - wide[CLEAN]
            bounds = intervals.layer_bootstrap(change, wide.index.to_numpy(), seed=seed)
            rows.append((arm, kind, wide[arm].mean(), change.mean(), *bounds, len(wide)))
    return pd.DataFrame(rows, columns=["arm", "kind", "value", "change", "low", "high", "n"])


def rank_correlations(x: NDArray[np.float64], y: NDArray[np.float64], z: NDArray[np.float64]) -> Columns:
    """Spearman's correlation of x and y, plain and with the rank of z held fixed, along the last axis; 0 where one of
    the two is constant, or is ranked as z is."""
    ranks = [stats.rankdata(of, axis=-1) for of in (x, y, z)]
    x, y, z = (of - of.mean(-1, keepdims=True) for of in ranks)
    plain = _cosine(x, y)
    x, y = (of - z * ((of * z).sum(-1) / np.maximum((z * z).sum(-1), 1e-12))[..., None] for of in (x, y))
    return plain, _cosine(x, y)


def _cosine(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    square = (x * x).sum(-1) * (y * y).sum(-1)
    # Squares of ranks are halves at least; what rounding leaves is far below.
    there = square > 1e-9
    return np.where(there, (x * y).sum(-1) / np.sqrt(np.where(there, square, 1.0)), 0.0)


def _over_layers(layers: pd.DataFrame, a: str, b: str, task: str, seed: int) -> tuple[Any, ...] | None:
    kept = layers[[a, b]].astype(float).dropna()
    if len(kept) < FEWEST:
        return None
    columns = (kept[a].to_numpy(), kept[b].to_numpy(), kept.index.to_numpy(float))
    drawn = np.random.default_rng(seed).integers(0, len(kept), (DRAWS, len(kept)))
    values = rank_correlations(*columns)
    draws = rank_correlations(*(column[drawn] for column in columns))
    found = [(float(value), *np.quantile(of, [0.025, 0.975])) for value, of in zip(values, draws, strict=True)]
    return a, b, "layers", task, *found[0], *found[1], len(kept)


def _over_heads(tables: Mapping[str, pd.DataFrame], seed: int) -> Iterator[tuple[Any, ...]]:
    """Massive energy of a head's queries, and of the keys that it reads, against its additivity."""
    heads, energies = tables.get("heads"), tables.get("massive_heads")
    if heads is None or energies is None or WITHIN not in heads:
        return
    for tensor, reads in (("Q", "head"), ("K", "kv_head")):
        of_tensor = energies[energies.tensor == tensor].rename(columns={"head": reads})
        both = heads.merge(of_tensor[["layer", reads, "energy_share"]], on=["layer", reads])
        both = both[[WITHIN, "energy_share", "layer"]].dropna()
        if both.layer.nunique() < FEWEST:
            continue
        columns = (1 - both[WITHIN] ** 2, both.energy_share, both.layer)
        found = []
        for which in (0, 1):

            def statistic(*drawn: Any, which: int = which) -> float:
                return float(rank_correlations(*drawn)[which])

            arrays = tuple(column.to_numpy(float) for column in columns)
            found += [statistic(*arrays), *intervals.layer_bootstrap(arrays, columns[2], statistic, n=500, seed=seed)]
        yield "residual", f"massive_energy_{tensor.lower()}", "heads", "", *found, len(both)


def _layers(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """What is known of each layer that attends, by layer."""
    parts = []
    heads, energies, spread = (tables.get(name) for name in ("heads", "massive_heads", "layers"))
    if heads is not None and WITHIN in heads:
        of_heads = heads.assign(residual=1 - heads[WITHIN] ** 2)
        parts.append(of_heads.groupby("layer")[[WITHIN, "residual"]].mean())
    if energies is not None:
        wide = energies[energies.tensor.isin(["Q", "K"])].groupby(["layer", "tensor"]).energy_share.mean().unstack()
        parts.append(wide.rename(columns={t: f"massive_energy_{t.lower()}" for t in "QK"}).rename_axis(columns=None))
    if spread is not None and "entropy" in spread:
        parts.append(spread.dropna(subset="entropy").set_index("layer")[["entropy", "sink_mass"]])
    if not parts:
        return pd.DataFrame()
    return pd.concat(parts, axis=1).sort_index().rename_axis("layer")


def _damages(tables: Mapping[str, pd.DataFrame]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Per task, what freezing and skipping from each layer on costs, and what each layer adds, by layer."""
    depth = tables.get("depth")
    if depth is None or depth.empty:
        return
    for (task, variant), of in depth.groupby(["task", "variant"], sort=False):
        out = {}
        for name in ("freeze", "skip"):
            curve = -of[of.manipulation == name].set_index("k").dlogprob.sort_index()
            # k = L, where nothing is changed, is the last row.
            out[f"{name}_damage"], out[f"{name}_step"] = curve[:-1], (curve - curve.shift(-1))[:-1]
        table = pd.DataFrame(out)[list(DAMAGES)].rename_axis("layer")
        if table.notna().any(axis=None):
            yield ":".join(filter(None, (task, variant))), table


def _observed(done: Mapping[str, Tables]) -> dict[str, pd.DataFrame]:
    """Massive values, entropy and sink mass, as far as observed texts tell."""
    found = [of for name, of in done.items() if name.startswith(TRAINED.format("")) and REFUSED not in of]
    if not found:
        return {}
    spread = pd.concat(of["heads"] for of in found).groupby("layer", as_index=False)[["entropy", "sink_mass"]].mean()
    return {"massive_heads": massive.per_head(massive.pooled([of["dims"] for of in found])), "layers": spread}


def _disrupted(done: Mapping[str, Tables]) -> pd.DataFrame:
    """Additivity by arm and layer, means over texts."""
    frames = [pd.DataFrame({"arm": [], "layer": []})]
    for arm in JUDGED:
        prefix = additivity_name(arm.label, "")
        some = [of["additivity"] for name, of in done.items() if name.startswith(prefix) and "additivity" in of]
        if some:
            frames.append(pd.concat(some).groupby("layer", as_index=False).mean().assign(arm=arm.label))
    return pd.concat(frames[1:] or frames, ignore_index=True)


def _there(table: pd.DataFrame, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in table]
