"""Claim M4 and the disruption tables on made-up items whose answer is known by counting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small import small
from statsmodels.stats import contingency_tables

import rotoscope as rs
from rotoscope.engine import REFUSED
from rotoscope.errors import BadInput
from rotoscope.results import Claim
from rotoscope.stats.intervals import wilson
from rotoscope.studies import arms, disruption_tables, selectivity
from rotoscope.studies.arms import CLEAN, CONTROL, EVERYWHERE, GRIDS, MASSIVE, grid
from rotoscope.studies.disruption import DOSE, SCORED, cell_name, layer_arms
from rotoscope.studies.items import asked, slug
from rotoscope.studies.options import Options
from rotoscope.tasks import find

PARAMETRIC, CONTEXTUAL = "capitals:filler=144:facts=2", "capitals_in_context:filler=144"


def rows(
    spec: str,
    n: int = 100,
    right: int = 60,
    massive: int = 0,
    control: int = 0,
    everywhere: int = 0,
    chance: float = 0.0,
    lost_arms: Mapping[str, int] | None = None,
) -> pd.DataFrame:
    """A task's items under the judged arms, each of which loses so many of the right ones; every arm in its own order.

    Each arm loses other items than the one before, so that pairing one arm with another differs from pairing with
    clean.
    """
    name, _, variant = spec.partition(":")
    lost = lost_arms or {MASSIVE: massive, CONTROL: control, EVERYWHERE: everywhere}
    rng = np.random.default_rng(n + right)
    first, frames = 0, []
    for arm, count in {CLEAN: 0, **lost}.items():
        correct = (np.arange(n) < right).astype(float)
        correct[(first + np.arange(count)) % right] = 0
        first += count
        frame = pd.DataFrame({"id": [f"{name}-{i}" for i in range(n)], "correct": correct}).sample(
            frac=1, random_state=int(rng.integers(2**31))
        )
        frames.append(frame.assign(task=name, variant=variant, arm=arm, chance=chance, logprob=-1.0))
    return pd.concat(frames, ignore_index=True)


def m4(*tables: pd.DataFrame, size: str = "standard", unasked: Mapping[str, str] | None = None) -> Claim:
    return selectivity.m4(pd.concat(tables, ignore_index=True), size, 0, unasked or {})[0]


def by_hand(seed: int, clean: int, *lost: int, n: int = 100, draws: int = 4000) -> list[np.ndarray]:
    """Share of the right answers that is lost, on items drawn again, per number lost: losses item by item."""
    rng = np.random.default_rng(seed)
    right = (np.arange(n) < clean).astype(float)
    starts = np.cumsum((0, *lost))
    drawn = rng.integers(0, n, (draws, n))
    return [
        np.isin(drawn, (start + np.arange(count)) % clean).sum(1) / right[drawn].sum(1)
        for start, count in zip(starts, lost, strict=False)
    ]


# Of 60 right answers in context 22 are lost: .367. Item by item its standard error is √(.367 · .633 / 60) = .062, so
# the bound is about .24; as two proportions apart it would be about .18.
HURT = {"right": 60, "massive": 22, "everywhere": 22}
# 15 of 60: .25 ± .11, whose bound of .14 is above 0 and not above .20.
BARELY = {"right": 60, "massive": 15, "everywhere": 15}


@pytest.mark.parametrize(
    ("parametric", "contextual", "verdict", "half", "double", "broken"),
    [
        ({}, HURT, "holds", "holds", "partly", ""),
        ({}, HURT | {"control": 22}, "partly", "partly", "fails", "(b)"),
        ({}, HURT | {"everywhere": 15}, "partly", "holds", "partly", "(c)"),
        ({}, HURT | {"everywhere": 15, "control": 22}, "fails", "partly", "fails", "(b) (c)"),
        ({}, BARELY, "partly", "holds", "partly", "(a) (c)"),
        ({}, BARELY | {"control": 15}, "fails", "partly", "fails", "(a) (b) (c)"),
        ({}, BARELY | {"everywhere": 40}, "partly", "holds", "partly", "(a)"),
        # .10 more of the one than of the other, which may be none.
        ({"massive": 8, "everywhere": 8}, {"massive": 14, "everywhere": 14}, "fails", "fails", "fails", "(a) (c)"),
        # Both are hurt alike: what breaks everything is not selective.
        (HURT, HURT, "fails", "fails", "fails", "(a) (c)"),
        (HURT, {"right": 60}, "fails", "fails", "fails", "(a) (b) (c)"),
        # Position 0 hurts recall as much.
        ({"everywhere": 22}, HURT, "partly", "partly", "partly", "(c)"),
        # The control hurts recall: that is no matter of (b).
        ({"control": 40}, HURT, "holds", "holds", "partly", ""),
    ],
)
def test_every_verdict(
    parametric: dict[str, int], contextual: dict[str, int], verdict: str, half: str, double: str, broken: str
) -> None:
    claim = m4(rows(PARAMETRIC, **parametric), rows(CONTEXTUAL, **contextual))
    assert (claim.verdict, claim.at_half, claim.at_double) == (verdict, half, double)
    for part in claim.reason.split("; ")[:3]:
        assert part.endswith("met") == (part[:3] not in broken), claim.reason


def test_the_value_is_the_difference_of_losses_with_an_interval_item_by_item() -> None:
    claim = m4(
        rows(PARAMETRIC, n=120, right=90, massive=18, control=9, everywhere=45),
        rows(CONTEXTUAL, n=100, right=60, massive=33, control=6, everywhere=48),
    )
    assert claim.value == pytest.approx(33 / 60 - 18 / 90)
    parametric, contextual = by_hand(1, 90, 18, n=120)[0], by_hand(2, 60, 33)[0]
    assert claim.interval == pytest.approx(np.quantile(contextual - parametric, [0.025, 0.975]), abs=0.015)
    assert claim.null == pytest.approx(6 / 60 - 9 / 90)
    assert claim.n == f"100 items each of {PARAMETRIC} and {CONTEXTUAL}"
    massive, control = by_hand(3, 60, 33, 6)
    low, high = np.quantile(massive - control, [0.025, 0.975])
    b = claim.reason.split("; ")[1]
    value, bounds = (33 - 6) / 60, [float(x) for x in b[b.index("[") + 1 : b.index("]")].split(", ")]
    assert f"control {value:.3g} [" in b
    assert bounds == pytest.approx([low, high], abs=0.015)
    assert f"all positions {48 / 60 - 45 / 90:.3g} [" in claim.reason


def test_losses_are_measured_from_chance() -> None:
    """20 of 100 are lost in both tasks: of .40 above chance here, of .70 there."""
    parametric = rows(PARAMETRIC, right=80, massive=20, control=20, everywhere=20, chance=0.1)
    contextual = rows(CONTEXTUAL, right=80, massive=20, everywhere=20, chance=0.4)
    claim, headline = selectivity.m4(pd.concat([parametric, contextual]), "standard", 0, {})
    assert claim.value == pytest.approx(20 / 40 - 20 / 70)
    assert claim.null == pytest.approx(0 - 20 / 70)
    assert f"control {20 / 40:.3g} [" in claim.reason
    assert headline == {
        f"loss of {PARAMETRIC} without top-1 dims": pytest.approx(20 / 70),
        f"loss of {CONTEXTUAL} without top-1 dims": pytest.approx(20 / 40),
    }


def test_items_are_paired_by_what_they_are_not_by_their_order() -> None:
    parametric, contextual = rows(PARAMETRIC), rows(CONTEXTUAL, **HURT)
    claim = m4(parametric, contextual)
    assert claim.interval is not None
    assert claim.interval[0] > 0.22  # .18 if they were apart
    again = m4(parametric.iloc[::-1], contextual.groupby("arm").sample(frac=1, random_state=4))
    assert again.interval == pytest.approx(claim.interval, abs=0.02)


def test_other_lengths_and_tasks_are_never_averaged_in() -> None:
    alone = m4(rows(PARAMETRIC), rows(CONTEXTUAL, **HURT))
    others = [
        rows(spec, massive=60 if "context" not in spec else 0)
        for spec in ("capitals", "capitals:filler=48", "capitals:filler=144", "capitals_in_context", "passkey")
    ]
    among = m4(*others, rows(PARAMETRIC), rows(CONTEXTUAL, **HURT))
    assert (among.value, among.interval, among.verdict) == (alone.value, alone.interval, alone.verdict)


@pytest.mark.parametrize(
    ("parametric", "contextual", "size", "reason"),
    [
        ({"right": 0}, HURT, "standard", "capitals:filler=144:facts=2: clean accuracy 0.00 is not above chance (0.00)"),
        ({}, HURT | {"chance": 0.55}, "full", "context:filler=144: clean accuracy 0.60 is not above chance (0.55)"),
        ({"n": 99}, HURT, "standard", "capitals:filler=144:facts=2 has 99 items, fewer than 100"),
        ({}, HURT | {"n": 99}, "full", "capitals_in_context:filler=144 has 99 items, fewer than 100"),
        ({"n": 59, "right": 50}, HURT, "quick", "capitals:filler=144:facts=2 has 59 items, fewer than 60"),
    ],
)  # fmt: skip
def test_not_tested(parametric: dict[str, Any], contextual: dict[str, Any], size: str, reason: str) -> None:
    claim = m4(rows(PARAMETRIC, **parametric), rows(CONTEXTUAL, **contextual), size=size)
    assert claim.verdict == "not tested"
    assert reason in claim.reason
    assert claim.value is None


def test_sixty_items_are_enough_for_quick() -> None:
    tables = rows(PARAMETRIC, n=60, right=50), rows(CONTEXTUAL, n=60, right=50, massive=30, everywhere=30)
    assert m4(*tables, size="quick").verdict == "holds"
    assert m4(*tables, size="standard").verdict == "not tested"


@pytest.mark.parametrize("arm", [MASSIVE, CONTROL, EVERYWHERE])
def test_a_missing_arm_is_named(arm: str) -> None:
    contextual = rows(CONTEXTUAL, **HURT)
    claim = m4(rows(PARAMETRIC), contextual[contextual.arm != arm])
    assert claim.verdict == "not tested"
    assert f"{CONTEXTUAL} was not run under {arm}" in claim.reason.split("; ")
    gone = m4(rows(PARAMETRIC), contextual[contextual.arm != CLEAN])
    assert f"{CONTEXTUAL} was not run" in gone.reason.split("; ")


def test_a_pair_needs_the_judged_amount_of_filler() -> None:
    claim = m4(rows("capitals:filler=48"), rows("capitals_in_context:filler=48", **HURT))
    assert claim.verdict == "not tested"
    assert f"{PARAMETRIC} was not run" in claim.reason.split("; ")


def test_prompts_that_are_too_long_for_the_model_are_the_reason() -> None:
    unasked = {CONTEXTUAL: "takes 185 tokens, the model was trained on 128"}
    claim = m4(rows(PARAMETRIC), unasked=unasked)
    assert claim.verdict == "not tested"
    assert "trained on 128" in claim.reason
    nothing, headline = selectivity.m4(None, "standard", 0, unasked)
    assert (nothing.verdict, headline) == ("not tested", {})
    assert "trained on 128" in nothing.reason
    assert selectivity.m4(None, "standard", 0, {})[0].reason == "no task was run"


def test_the_grid_left_out_is_the_reason() -> None:
    tables, claim, headline = selectivity.finish(None, Options(disrupt=("none",)), {})  # type: ignore[arg-type]
    assert (tables, headline, claim.verdict) == ({}, {}, "not tested")
    assert "left out" in claim.reason


SHORTER = "capitals:filler=144"


def test_other_pairs_stand_beside_the_first_and_are_judged_where_it_cannot_be() -> None:
    cities = rows("cities", right=90, chance=0.5)
    in_context = rows("cities_in_context", right=90, massive=30, everywhere=30, chance=0.5)
    capitals = rows(PARAMETRIC), rows(CONTEXTUAL)
    among = m4(*capitals, rows(SHORTER, massive=15), cities, in_context)
    assert (among.value, among.verdict) == (0.0, "fails")
    assert f"{SHORTER} / {CONTEXTUAL}: {-15 / 60:.2f} [" in among.reason
    assert f"cities / cities_in_context: {30 / 40:.2f} [" in among.reason
    alone = m4(*capitals, cities, in_context, unasked={CONTEXTUAL: "too long"})
    assert (alone.value, alone.verdict) == (pytest.approx(30 / 40), "holds")
    assert alone.n == "100 items each of cities and cities_in_context"
    assert "too long" in alone.reason
    at_chance = m4(*capitals, rows("cities", right=55, chance=0.5), in_context)
    assert "cities: clean accuracy 0.55 is not above chance (0.50)" in at_chance.reason


def test_prompts_of_a_pair_differ_in_where_the_fact_is(demo: rs.LM) -> None:
    """The same filler in all of them; with facts of no use the same length too, to half a sentence."""
    (amid_facts, read), (recalled, _) = arms.PAIRS[0], arms.SHORTER
    prompts = {
        spec: [example.prompt for example in find(spec).examples(demo, 60, 0)] for spec in (recalled, amid_facts, read)
    }
    assert {prompt.count("The grass is green.") for some in prompts.values() for prompt in some} == {6}
    length = {spec: np.mean([len(demo.encode(prompt)) for prompt in some]) for spec, some in prompts.items()}
    assert length[amid_facts] == pytest.approx(length[read], abs=5)


# --- what is run ---


def test_the_user_s_arms_tasks_and_limit_take_the_place_of_the_size_s() -> None:
    own = grid(Options(disrupt=("top-2:positions=all", "targets=K:layers=3-4"), tasks=("passkey", "cities"), limit=7))
    assert own is not None
    assert own.judged == own.shown == {"passkey": 7, "cities": 7}
    first, second = (arm.disrupt for arm in own.arms)
    assert first is not None
    assert (first.selection, first.positions, first.targets) == ("top-2", "all", "QK")
    assert second is not None
    assert (second.selection, second.targets, second.layers) == ("top-1", "K", (3, 4))
    assert {arm.group for arm in own.arms} == {"own"}
    assert grid(Options(disrupt=("none",))) is None
    with pytest.raises(BadInput):
        grid(Options(disrupt=("top-2:place=all",)))


def test_an_arm_that_is_judged_anyway_is_not_run_twice() -> None:
    own = grid(Options(disrupt=("top-1", "change-matched", "top-2", "top-2")))
    assert own is not None
    assert [arm.label for arm in (*arms.JUDGED, *own.arms)] == [CLEAN, MASSIVE, CONTROL, EVERYWHERE, "top-2"]


@pytest.mark.parametrize("size", sorted(GRIDS))
def test_every_size_has_what_m4_needs(size: str) -> None:
    found = grid(Options(size=size))
    assert found is not None
    assert all(found.judged[spec] >= (60 if size == "quick" else 100) for spec in (PARAMETRIC, CONTEXTUAL))
    labels = [arm.label for arm in (*arms.JUDGED, *found.arms)]
    assert len(set(map(slug, labels))) == len(labels)
    assert {CLEAN, MASSIVE, CONTROL, EVERYWHERE} < set(labels)
    assert set(found.shown) <= set(found.judged)
    for arm in (*arms.JUDGED, *found.arms):
        assert find(next(iter(found.items(arm)))).name


def test_the_arms_of_the_claim_are_what_its_rule_says() -> None:
    massive, control, everywhere = (arm.disrupt for arm in arms.JUDGED[1:])
    for how, selection, positions in (
        (massive, "top-1", "all-but-0"), (control, "change-matched", "all-but-0"), (everywhere, "top-1", "all")
    ):  # fmt: skip
        assert how is not None
        assert (how.targets, how.selection, how.replacement) == ("QK", selection, "token-mean")
        assert (how.positions, how.layers) == (positions, None)


def test_tasks_that_do_not_fit_the_model_are_left_out_with_the_reason(tmp_path: Path) -> None:
    lm = rs.load(str(small(tmp_path)))  # one token a character, trained on 128
    found, refused = asked(lm, {"capitals": 5, SHORTER: 5}, 0)
    assert [(task.spec, task.n) for task in found] == [("capitals", 5)]
    assert found[0].tokens == sum(len(e.prompt) for e in find("capitals").examples(lm, 5, 0))
    assert list(refused) == [SHORTER]
    assert "128" in refused[SHORTER]
    with pytest.raises(BadInput):
        asked(lm, {"capitols": 5}, 0)


def test_slugs_are_folder_names() -> None:
    assert slug("capitals:filler=144") == "capitals-filler=144"
    assert re.fullmatch(r"jsonl-a-b-c\.jsonl-\w{8}-top-1-all", slug("jsonl:/a b/c.jsonl", "top-1 all"))
    assert slug("jsonl:a/b.jsonl") != slug("jsonl:a-b.jsonl")
    assert slug("top-1:layers=3,7") != slug("top-1:layers=3-7")


# --- tables ---

LM = SimpleNamespace(anatomy=SimpleNamespace(attention=[SimpleNamespace(layer=i) for i in range(4)]))


def finished(spec: str, items: pd.DataFrame, **measured: float) -> dict[str, Any]:
    """Cells as the engine gives them back, from items of several arms."""
    out = {}
    for arm in (*arms.JUDGED, *arms.SHOWN):
        own = items[items.arm == arm.label]
        if len(own):
            tables = {"items": own.drop(columns="arm").assign(answer="a", gold="b", prompt_tokens=9, template=False)}
            if arm.how is not None:
                tables["measured"] = pd.DataFrame([measured])
            out[cell_name(SCORED, spec, arm)] = tables
    return out


def test_the_table_of_arms() -> None:
    items = rows(CONTEXTUAL, right=60, lost_arms={MASSIVE: 9, CONTROL: 3, "V top-1": 30, "top-2": 0}, chance=0.1)
    number = items.id.str.split("-").str[-1].astype(int)
    # Log-likelihoods differ a lot between items, and by exactly .5 under every arm.
    items["logprob"] = -1.0 * number - 0.5 * (items.arm != CLEAN)
    done = finished(CONTEXTUAL, items, change=3.0, energy=60.0)
    table = disruption_tables.tables(LM, GRIDS["quick"], done, 0)["disrupt"].set_index("arm")  # type: ignore[arg-type]
    assert list(table.index) == [CLEAN, MASSIVE, CONTROL, "top-2", "V top-1"]
    row = table.loc[MASSIVE]
    assert (row.task, row.variant, row.knowledge) == ("capitals_in_context", "filler=144", "contextual")
    assert (row.targets, row.selection, row.replacement, row.positions) == ("QK", "top-1", "token-mean", "all-but-0")
    assert (row.n, row.accuracy, row.chance, row.judged) == (100, 0.51, pytest.approx(0.1), True)
    assert (row.low, row.high) == pytest.approx(wilson(51, 100))
    assert row.retention == pytest.approx(0.41 / 0.50)
    assert row.retention_low < row.retention < row.retention_high
    assert (row.dlogprob, row.dlogprob_low, row.dlogprob_high) == pytest.approx((-0.5, -0.5, -0.5))
    assert row.change == pytest.approx(0.05)
    p = {
        arm: contingency_tables.mcnemar([[60 - lost, lost], [0, 40]], exact=True).pvalue
        for arm, lost in ((MASSIVE, 9), (CONTROL, 3), ("top-2", 0), ("V top-1", 30))
    }
    assert {arm: table.p[arm] for arm in p} == pytest.approx(p)
    expected = {"V top-1": 4 * p["V top-1"], MASSIVE: 3 * p[MASSIVE], CONTROL: 2 * p[CONTROL], "top-2": 1.0}
    assert {arm: table.p_holm[arm] for arm in p} == pytest.approx(expected)
    clean = table.loc[CLEAN]
    assert (clean.accuracy, clean.retention, clean.dlogprob, clean.judged) == (0.6, 1.0, 0.0, True)
    assert np.isnan([clean.p, clean.p_holm, clean.change]).all()
    assert not table.loc["top-2"].judged


def test_holm_corrects_over_the_arms_of_one_task_alone() -> None:
    tables = {spec: rows(spec, right=60, lost_arms={MASSIVE: 6}) for spec in (PARAMETRIC, CONTEXTUAL)}
    done = {name: cell for spec, items in tables.items() for name, cell in finished(spec, items).items()}
    table = disruption_tables.tables(LM, GRIDS["quick"], done, 0)["disrupt"].set_index(["task", "arm"])  # type: ignore[arg-type]
    for task in ("capitals", "capitals_in_context"):
        assert table.p_holm[task, MASSIVE] == table.p[task, MASSIVE] == pytest.approx(2 / 2**6)


def test_refused_cells_and_tasks_without_a_clean_run_are_left_out() -> None:
    done = finished(CONTEXTUAL, rows(CONTEXTUAL, **HURT)) | finished(PARAMETRIC, rows(PARAMETRIC))
    done[cell_name(SCORED, CONTEXTUAL, arms.JUDGED[2])] = {REFUSED: pd.DataFrame({"reason": ["no memory"]})}
    done[cell_name(SCORED, PARAMETRIC, arms.JUDGED[0])] = {REFUSED: pd.DataFrame({"reason": ["no memory"]})}
    found = disruption_tables.tables(LM, GRIDS["quick"], done, 0)  # type: ignore[arg-type]
    assert list(found["disrupt"].arm) == [CLEAN, MASSIVE, EVERYWHERE]
    assert set(found["items"].task) == {"capitals_in_context"}
    assert set(found) == {"disrupt", "items"}


def test_curves_over_layers_and_dose_are_against_the_clean_run() -> None:
    spec = "capitals:filler=48"
    items = rows(spec, n=60, right=40, lost_arms={MASSIVE: 8})
    done = finished(spec, items)
    after = done[cell_name(SCORED, spec, arms.JUDGED[1])]["items"].assign(logprob=-1.25)
    third = layer_arms(LM)[2]  # type: ignore[arg-type]
    assert third.disrupt is not None
    assert third.disrupt.layers == (2,)
    done[cell_name("disrupt/layers", spec, third)] = {"items": after}
    dose = disruption_tables.DOSE_ARMS[arms.DOSES.index(("lambda", 4))]
    assert dose.disrupt is not None
    assert dose.disrupt.selection == "lambda-4"
    done[cell_name(DOSE, spec, dose)] = {"items": after, "measured": pd.DataFrame([{"dims": 60.0, "heads": 24.0}])}
    found = disruption_tables.tables(LM, GRIDS["full"], done, 0)  # type: ignore[arg-type]
    (layer,) = found["disrupt_layers"].itertuples()
    assert (layer.layer, layer.task, layer.variant, layer.n) == (2, "capitals", "filler=48", 60)
    assert (layer.accuracy, layer.dlogprob) == pytest.approx((32 / 60, -0.25))
    (row,) = found["dose"].itertuples()
    assert (row.kind, row.dose, row.dims) == ("lambda", 4, pytest.approx(2.5))
    assert (row.accuracy, row.dlogprob, row.dlogprob_high) == pytest.approx((32 / 60, -0.25, -0.25))


def test_same_items_are_those_that_both_were_asked() -> None:
    clean = pd.DataFrame({"id": list("abcd"), "correct": [1, 0, 1, 0]})
    changed = pd.DataFrame({"id": list("dxba"), "correct": [4, 9, 2, 1]})
    one, other = disruption_tables.same_items(clean, changed)
    assert list(one.id) == list(other.id) == ["a", "b", "d"]
    assert list(other.correct) == [1, 2, 4]
