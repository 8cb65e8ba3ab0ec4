"""Layers side by side, their rank correlations, and additivity with massive dims disrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from small import small
from tiny import tiny

import rotoscope as rs
from rotoscope.engine import Engine
from rotoscope.interventions import Disrupt
from rotoscope.observers import Grams
from rotoscope.stats.additive import fit_moments
from rotoscope.studies import joint
from rotoscope.studies.observe import observe
from rotoscope.studies.options import Options
from rotoscope.studies.texts import texts

LAYERS = 12


def tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """Two query heads reading one key head in each of 12 layers; two tasks swept with depth."""
    rng = np.random.default_rng(seed)
    layer = np.repeat(np.arange(LAYERS), 2)
    head = np.tile([0, 1], LAYERS)
    heads = pd.DataFrame({"layer": layer, "head": head, "kv_head": 0, "form1_within": rng.uniform(0.5, 1, 2 * LAYERS)})
    energies = pd.concat(
        pd.DataFrame({"layer": layer[h == head], "tensor": t, "head": h, "energy_share": rng.uniform(0, 1, LAYERS)})
        for t, h in (("Q", 0), ("Q", 1), ("K", 0), ("V", 0))
    )
    spread = pd.DataFrame({"layer": range(LAYERS), "entropy": rng.uniform(1, 4, LAYERS), "sink_mass": 0.5})
    depth = pd.concat(
        pd.DataFrame(
            {"task": task, "variant": variant, "manipulation": m, "k": range(LAYERS + 1), "accuracy": 0.5}
        ).assign(dlogprob=[*-np.sort(rng.uniform(0, 5, LAYERS))[::-1], 0.0])
        for task, variant in (("capitals", ""), ("passkey", "tokens=64"))
        for m in ("freeze", "skip", "noise")
    )
    return {"heads": heads, "massive_heads": energies, "layers": spread, "depth": depth}


def test_layers_stand_side_by_side() -> None:
    given = tables()
    table = joint.joint(given).set_index("layer")
    heads, energies, depth = (given[name] for name in ("heads", "massive_heads", "depth"))
    assert len(table) == LAYERS
    for layer, row in table.iterrows():
        r = heads[heads.layer == layer].form1_within
        assert row.form1_within == pytest.approx(r.mean())
        assert row.residual == pytest.approx(np.mean(1 - r**2))
        of = energies[energies.layer == layer].groupby("tensor").energy_share.mean()
        assert [row.massive_energy_q, row.massive_energy_k] == pytest.approx([of.Q, of.K])
        assert row.entropy == given["layers"].entropy[layer]
        assert row.task == "capitals"
        for name in ("freeze", "skip"):
            lost = -depth[(depth.task == "capitals") & (depth.manipulation == name)].set_index("k").dlogprob
            assert row[f"{name}_damage"] == pytest.approx(lost[layer])
            assert row[f"{name}_step"] == pytest.approx(lost[layer] - lost[layer + 1])
    assert table.freeze_step.sum() == pytest.approx(table.freeze_damage[0])


def test_what_is_missing_is_left_out() -> None:
    given = tables()
    table = joint.joint({"heads": given["heads"]})
    assert list(table) == ["layer", "form1_within", "residual"]
    assert joint.correlations({"heads": given["heads"]}, 0).empty
    assert joint.joint({}).empty
    assert joint.correlations({}, 0).empty
    table = joint.joint({"massive_heads": given["massive_heads"], "depth": given["depth"]})
    assert {"massive_energy_q", "freeze_damage"} <= set(table)
    assert "residual" not in table


def test_correlations_of_layers() -> None:
    given = tables()
    found = joint.correlations(given, seed=1)
    layers = found[found.over == "layers"].set_index(["a", "b", "task"])
    table = joint.joint(given)
    assert set(layers.index.get_level_values("task")) == {"", "capitals", "passkey:tokens=64"}
    assert len(layers) == 10 + 2 * 5 * 4
    row = layers.loc[("residual", "entropy", "")]
    assert row.rho == pytest.approx(stats.spearmanr(table.residual, table.entropy).statistic)
    assert row.low < row.rho < row.high
    assert row.n == LAYERS
    # what is left of both ranks beside a straight line in depth
    ranks = [stats.rankdata(x) for x in (table.residual, table.entropy)]
    left = [x - np.polyval(np.polyfit(table.layer, x, 1), table.layer) for x in ranks]
    assert row.partial == pytest.approx(np.corrcoef(*left)[0, 1])
    assert row.partial_low < row.partial < row.partial_high
    # the sink mass is the same everywhere, and ranks nothing
    assert layers.loc[("residual", "sink_mass", ""), ["rho", "low", "high"]].tolist() == [0, 0, 0]
    row = layers.loc[("residual", "freeze_damage", "capitals")]
    assert row.rho == pytest.approx(stats.spearmanr(table.residual, table.freeze_damage).statistic)
    assert layers.loc[("residual", "freeze_damage", "passkey:tokens=64")].rho == pytest.approx(row.rho)  # both fall
    assert row.partial == pytest.approx(0, abs=1e-9), "a damage that is ranked as depth is says nothing beside it"


def test_the_interval_covers_what_layers_drawn_anew_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "DRAWS", 400)
    rng = np.random.default_rng(8)
    covered = 0
    truth = stats.spearmanr(*rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 100_000).T).statistic
    for seed in range(60):
        x, y = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 30).T
        found = joint._over_layers(pd.DataFrame({"x": x, "y": y}), "x", "y", "", seed)
        assert found is not None
        covered += found[5] <= truth <= found[6]
    assert 52 <= covered <= 60


def test_correlations_of_heads_use_the_keys_that_they_read() -> None:
    given = tables()
    found = joint.correlations(given, seed=1)
    heads = found[found.over == "heads"].set_index("b")
    both = given["heads"].merge(given["massive_heads"].query("tensor == 'K'")[["layer", "energy_share"]], on="layer")
    expected = stats.spearmanr(1 - both.form1_within**2, both.energy_share).statistic
    assert heads.loc["massive_energy_k"].rho == pytest.approx(expected)
    assert heads.loc["massive_energy_k"].n == 2 * LAYERS
    queries = given["massive_heads"].query("tensor == 'Q'")
    both = given["heads"].merge(queries[["layer", "head", "energy_share"]], on=["layer", "head"])
    expected = stats.spearmanr(1 - both.form1_within**2, both.energy_share).statistic
    assert heads.loc["massive_energy_q"].rho == pytest.approx(expected)


def test_few_layers_are_not_correlated() -> None:
    given = {name: table[table.layer < 3] if "layer" in table else table for name, table in tables().items()}
    assert joint.correlations(given, 0).empty
    assert len(joint.joint(given)) == 3


def test_change_of_additivity() -> None:
    rows = [(arm, layer, base + 0.01 * layer) for arm, base in (("clean", 0.9), ("top-1", 0.7)) for layer in range(8)]
    rows[-1] = ("top-1", 7, 0.5)
    table = joint.changes(pd.DataFrame(rows, columns=["arm", "layer", "form1_within"]), seed=0).set_index("arm")
    assert table.loc["clean", ["change", "low", "high"]].tolist() == [0, 0, 0]
    row = table.loc["top-1"]
    assert row.change == pytest.approx((7 * -0.2 - 0.47) / 8)
    assert row.low < row.change < row.high <= -0.2 + 1e-12
    assert (row.kind, row.n) == ("form1_within", 8)


def test_the_study_measures_additivity_again_under_disrupt(tmp_path: Path) -> None:
    lm = rs.load(str(small(tmp_path / "model", layers=4)))
    some = Options(size="standard", texts=2, tokens=64)
    done = Engine(None, progress=False).run(lm, joint.cells(lm, some))
    found, claims = joint.finish(lm, some, done, {})
    assert not claims
    # by hand: the logits of the running, disrupted model
    expected: Any = []
    for text in texts(lm, some):
        with torch.no_grad(), Disrupt().on(lm), rs.tap(lm, Grams()) as (grams,):
            lm.model(torch.tensor([text.ids]), use_cache=False)
        fits = [fit_moments(g.q, g.keys(), g.turns(128)) for g in grams.layers.values()]
        expected.append([fit.form1_within.mean().item() for fit in fits])
    change = found["joint_disrupted"].set_index(["arm", "kind"])
    assert change.loc[("top-1", "form1_within")].value == pytest.approx(np.mean(expected), abs=1e-6)
    assert set(change.index.get_level_values("arm")) == {"clean", "top-1", "change-matched", "top-1 all"}
    assert abs(change.loc[("top-1", "form1_within")].change) > 1e-4
    given = {"heads": pd.DataFrame({"layer": range(4), "head": 0, "kv_head": 0, "form1_within": 0.9})}
    table = joint.finish(lm, some, done, given)[0]["joint"]
    assert table["form1_within_top-1"].tolist() == pytest.approx(np.mean(expected, 0), abs=1e-6)
    assert not joint.cells(lm, Options(size="quick"))


def test_observed_texts_serve_where_the_massive_study_did_not_run() -> None:
    lm = rs.wrap(tiny("llama", layers=4))
    seen = [observe(lm, [*range(start, start + 40)], 0, ()) for start in (3, 50)]
    done = {f"observe/trained/text-{i}": of for i, of in enumerate(seen)}
    heads = seen[0]["heads"]
    lacking = pd.DataFrame({"layer": range(4), "form1_within": 0.5})  # this study's own table of layers has no entropy
    table = joint.finish(lm, Options(), done, {"heads": heads, "layers": lacking})[0]["joint"].set_index("layer")
    assert {"massive_energy_q", "massive_energy_k"} <= set(table)
    expected = np.mean([of["heads"].groupby("layer").entropy.mean() for of in seen], 0)
    assert table.entropy.tolist() == pytest.approx(list(expected))
    given = pd.DataFrame({"layer": range(4), "entropy": 2.0, "sink_mass": 0.1})
    table = joint.finish(lm, Options(), done, {"heads": heads, "layers": given})[0]["joint"]
    assert table.entropy.tolist() == [2.0] * 4
