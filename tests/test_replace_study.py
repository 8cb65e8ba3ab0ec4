"""Fitted logits in place of real ones: what the study scores, its tables, claim P4's rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from small import small

import rotoscope as rs
from rotoscope.engine import Engine
from rotoscope.interventions import LogitMeans, ReplaceLogits
from rotoscope.results import Claim
from rotoscope.stats.ratio import ratio_t
from rotoscope.studies import replace
from rotoscope.studies.options import Options


@torch.no_grad()
def nll(model: Any, ids: Any) -> float:
    """Mean nats of every token but the first, from all logits at once."""
    row = torch.tensor([list(ids)])
    likely = model(row, use_cache=False).logits[0].double().log_softmax(-1)
    return -likely[:-1].gather(-1, row[0, 1:, None]).mean().item()


def ran(lm: rs.LM, **given: Any) -> tuple[dict[str, pd.DataFrame], Claim, dict[str, Any]]:
    some = Options(**given)
    done = Engine(None, progress=False).run(lm, replace.cells(lm, some))
    tables, (claim,) = replace.finish(lm, some, done)
    return tables, claim, done


@pytest.fixture(scope="module")
def lm(tmp_path_factory: Any) -> rs.LM:
    return rs.load(str(small(tmp_path_factory.mktemp("small") / "model")))


# ---- what is scored -------------------------------------------------------------------------------------------------


def test_the_study_equals_forwards_done_by_hand(lm: rs.LM) -> None:
    tables, claim, _ = ran(lm, size="quick", texts=3, tokens=48)
    some = [text.ids for text in replace._texts(lm, Options(size="quick", texts=3, tokens=48))]
    table = tables["replace"].set_index("arm")
    assert table["layers"].unique().tolist() == ["all"]
    assert sorted(table.index) == ["f", "form1", "g", "permuted"]
    dnll: dict[str, list[float]] = {"form1": [], "f": [], "g": []}
    for i, ids in enumerate(some):
        means = LogitMeans.measure(lm, [ids_ for j, ids_ in enumerate(some) if j != i])
        clean = nll(lm.model, ids)
        for arm, values in dnll.items():
            with ReplaceLogits(means, arm).on(lm):
                values.append(nll(lm.model, ids) - clean)
    for arm, values in dnll.items():
        half = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / np.sqrt(3)
        mean = np.mean(values)
        assert abs(mean) > 1e-3
        assert table.loc[arm, ["dnll", "low", "high"]].tolist() == pytest.approx(
            [mean, mean - half, mean + half], abs=1e-5
        )
        assert table.loc[arm].ratio == pytest.approx(mean / table.loc["permuted"].dnll, rel=1e-3)
        assert table.loc[arm].n == 3
    assert np.isnan(table.loc["permuted"].ratio)
    assert claim.value is None or claim.value == pytest.approx(table.loc["form1"].ratio)


def test_no_text_s_fit_sees_the_text(lm: rs.LM) -> None:
    for size, count in (("quick", 4), ("standard", 8)):
        cells = [c for c in replace.cells(lm, Options(size=size, tokens=32)) if "others" in c.arguments]
        scored = [c for c in cells if "ids" in c.arguments]
        assert len({tuple(c.arguments["ids"]) for c in scored}) == count
        for cell in scored:
            others = cell.arguments["others"]
            assert len(others) == min(count - 1, 3 if "random" in cell.name else 7)
            assert cell.arguments["ids"] not in others


def test_thirds_single_layers_and_a_twin_s_means(lm: rs.LM) -> None:
    tables, _, done = ran(lm, size="full", texts=2, tokens=32, limit=2)
    table = tables["replace"].set_index(["layers", "arm"])
    assert table.index.get_level_values("layers").unique().tolist() == ["all", "0", "1", "2"]
    arms = {layers: set(of.reset_index().arm) for layers, of in table.groupby("layers")}
    every = {*replace.JUDGED, *replace.SHOWN}
    assert arms == {"all": every | {"form1-random-means"}, **dict.fromkeys("012", every)}
    assert {"form1", "permuted", "f", "g", "form2", "form2-causal"} <= every
    # one layer's third is the layer: both cells scored form 1 there, and agree
    third, single = (
        done[f"replace/{name}/text-0"]["replace"].set_index(["layers", "arm"]).nll for name in ("thirds", "each-layer")
    )
    assert third["1", "form1"] == single["1", "form1"]
    assert table.loc["0", "form1"].dnll != table.loc["1", "form1"].dnll
    ids = [text.ids for text in replace._texts(lm, Options(size="full", texts=2, tokens=32))]
    with ReplaceLogits(LogitMeans.measure(lm, ids[1:]), "form2", layers=1).on(lm):
        by_hand = nll(lm.model, ids[0])
    assert third["1", "form2"] == pytest.approx(by_hand, abs=1e-5)
    clean = done["replace/all/text-0"]["replace"].set_index("arm").nll["clean"]
    twin = done["replace/form1-random-means/text-0"]["replace"].nll[0]
    assert abs(twin - clean) > 1e-3
    assert twin != done["replace/all/text-0"]["replace"].set_index("arm").nll["form1"]


def test_thirds() -> None:
    assert list(replace.thirds(range(30))) == ["0-9", "10-19", "20-29"]
    assert replace.thirds([0, 2, 4, 6, 8]) == {"0-2": [0, 2], "4-6": [4, 6], "8": [8]}


def test_tasks_under_every_arm(lm: rs.LM) -> None:
    tables, _, _ = ran(lm, size="quick", texts=2, tokens=32, tasks=("capitals",), limit=5)
    table = tables["replace_tasks"].set_index("arm")
    assert sorted(table.index) == ["clean", "f", "form1", "g", "permuted"]
    assert (table.n == 5).all()
    assert table.loc["clean"].dlogprob == 0
    others = [text.ids for text in replace._texts(lm, Options(size="quick", texts=2, tokens=32, limit=5))]
    clean = rs.evaluate(lm, "capitals", n=5)
    changed = rs.evaluate(lm, "capitals", n=5, under=ReplaceLogits(LogitMeans.measure(lm, others), "g"))
    assert table.loc["g"].accuracy == changed.correct.mean()
    assert table.loc["g"].dlogprob == pytest.approx((changed.logprob - clean.logprob).mean(), abs=1e-5)
    assert "replace_tasks" not in ran(lm, size="quick", texts=2, tokens=32)[0]


def test_means_of_several_texts_are_those_of_all_their_tokens(lm: rs.LM) -> None:
    some = [[*range(3, 40)], [*range(90, 30, -1)], [*range(5, 25)]]
    got, expected = replace.pooled(lm, some), LogitMeans.measure(lm, some)
    for name in ("query", "key", "turn"):
        for layer, x in getattr(expected, name).items():
            assert torch.allclose(getattr(got, name)[layer], x, atol=1e-12)


# ---- where nothing is tested ----------------------------------------------------------------------------------------


def test_models_without_rotation(tmp_path: Path) -> None:
    tables, claim, done = ran(rs.load(str(small(tmp_path / "model", "gpt2"))), texts=2, tokens=32)
    assert (tables, done, claim.verdict) == ({}, {}, "not tested")
    assert "no layer rotates" in claim.reason


def test_one_text_leaves_no_other(lm: rs.LM) -> None:
    tables, claim, done = ran(lm, size="quick", texts=1, tokens=32)
    assert (tables, done, claim.verdict) == ({}, {}, "not tested")
    assert "--texts 2" in claim.reason


# ---- the rule -------------------------------------------------------------------------------------------------------


def judged(form1: Any, control: Any, f: Any = 9.0, g: Any = 9.0) -> Claim:
    wiggle = {"form1": [1, -1, 0, 0], "permuted": [0, 1, -1, 0], "f": [0, 0, 1, -1], "g": [1, 0, 0, -1]}
    rows = []
    for arm, value in (("form1", form1), ("permuted", control), ("f", f), ("g", g)):
        values = value if isinstance(value, list) else [value + 0.001 * by for by in wiggle[arm]]
        rows += [(arm, "all", text, x) for text, x in enumerate(values)]
        rows += [(arm, "0-9", text, -x) for text, x in enumerate(values)]  # of no account
    return replace.p4(pd.DataFrame(rows, columns=["arm", "layers", "text", "dnll"]))


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.2, 1.0), "holds"),
        ((-0.1, 1.0), "holds"),
        ((0.2, 1.0, 0.2), "partly"),  # f alone does as well
        ((0.2, 1.0, 9.0, 0.1), "partly"),
        ((0.7, 1.0), "partly"),
        ((0.5, 1.0), "partly"),  # the interval reaches past .5
        ((0.99, 1.0), "partly"),
        ((1.0, 1.0), "fails"),
        ((2.0, 1.0), "fails"),
        (([0.1, 0.1, 0.1, 1.4], 1.0), "fails"),  # open
        ((0.001, 0.019), "not tested"),
        ((0.001, -0.5), "not tested"),
        ((0.001, 0.03), "holds"),
    ],
)
def test_p4(values: tuple[Any, ...], verdict: str) -> None:
    claim = judged(*values)
    assert claim.verdict == verdict
    if verdict == "not tested":
        assert "the control costs" in claim.reason
        return
    mean = np.mean(values[0])
    assert claim.value == pytest.approx(mean / values[1])
    assert claim.interval is not None
    assert claim.interval[0] < claim.value < claim.interval[1]
    assert claim.null == 1.0
    for label in ("ratio to control", "form 1 − f alone", "form 1 − g alone", "form 1 − control"):
        assert label in claim.reason


def test_p4_at_half_and_double() -> None:
    claim = judged(0.4, 1.0)
    assert (claim.verdict, claim.at_half, claim.at_double) == ("holds", "partly", "holds")
    claim = judged(0.8, 1.0)
    assert (claim.verdict, claim.at_half, claim.at_double) == ("partly", "partly", "holds")


def test_ratio_holds_what_a_paired_test_does_not_exclude() -> None:
    rng = np.random.default_rng(3)
    b = rng.normal(1.0, 0.3, 7)
    a = 0.4 * b + rng.normal(0.0, 0.1, 7)
    low, high = ratio_t(a, b)
    for r in np.linspace(0, 1, 201):
        inside = stats.ttest_1samp(a - r * b, 0).pvalue > 0.05
        assert inside == (low < r < high)
    assert low < a.mean() / b.mean() < high
    assert stats.ttest_1samp(a - low * b, 0).pvalue == pytest.approx(0.05)
    assert ratio_t([*a, np.nan], [*b, 1.0]) == (low, high)


def test_no_ratio_to_what_may_be_zero() -> None:
    assert np.isnan(ratio_t([1.0, 2.0, 3.0], [1.0, -1.0, 0.5])).all()
    assert np.isnan(ratio_t([1.0, 2.0, 3.0], [-1.0, -1.1, -0.9])).all()
    assert np.isnan(ratio_t([1.0], [1.0])).all()
    claim = judged(0.2, [3.0, 0.0, 0.0, 0.0])
    assert (claim.verdict, "no interval" in claim.reason) == ("not tested", True)
