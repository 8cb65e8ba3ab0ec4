"""The report's section on position generalization: what it says is in the tables, and it is there only with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import synthetic
import synthetic_generalization
import vl_convert
from browser import all_drawn, chromium, console, open_report
from drawn import marks, numbers, words
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from rotoscope import report
from rotoscope.report.labels import PERTURBATIONS
from rotoscope.results import Result
from rotoscope.studies import perturb

FIGURES = {
    "generalization-replace": "replace",
    "generalization-replace-tasks": "replace_tasks",
    "generalization-perturb": "perturb",
    "generalization-distance": "distance",
    "generalization-length": "length",
    "generalization-length-attention": "length_attention",
    "generalization-joint": "joint",
    "generalization-joint-correlations": "joint_correlations",
    "generalization-joint-disrupted": "joint_disrupted",
}

BOUNDS = (("low", "high"), ("partial_low", "partial_high"))


@pytest.fixture(scope="module")
def result() -> Result:
    return Result(synthetic_generalization.tables(), provenance={"trained_length": 2048})


@pytest.fixture(scope="module")
def figures(result: Result) -> dict[str, report.Figure]:
    return report.figures(result)


@pytest.fixture(scope="module")
def readings(figures: dict[str, report.Figure]) -> dict[str, str]:
    return {name: figure.reading for name, figure in figures.items()}


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    with chromium() as driver:
        yield driver


def test_every_figure_is_drawn_without_a_word_or_a_request(driver: WebDriver, result: Result, tmp_path: Path) -> None:
    all_drawn(driver, report.write(result, tmp_path / "report.html"), FIGURES)
    assert len(driver.find_elements(By.CSS_SELECTOR, "#generalization-joint-table tbody tr")) == 30


def test_doses_have_their_lines(figures: dict[str, report.Figure], result: Result, readings: dict[str, str]) -> None:
    table = result.tables["perturb"]
    shown = marks(figures["generalization-perturb"])
    for title, column in (("ΔNLL (nats a token)", "dnll"), ("95 % low", "low"), ("95 % high", "high")):
        assert sorted(numbers(shown, title)) == pytest.approx(sorted(table[column]), abs=6e-5)
    assert sorted(numbers(shown, "targets scored")) == sorted(table["targets"])
    written = words(figures["generalization-perturb"])
    assert "0.05 nats" in written
    assert written.count("10%") == 2  # on the axis, and at its line
    few = table[table["share"] == 0.05].set_index("kind")
    swaps, jitter = few.loc["swap-arbitrary"], few.loc["jitter-arbitrary"]
    said = readings["generalization-perturb"]
    for name, row in (("swaps", swaps), ("jitter", jitter)):
        assert f"{name} {row['dnll']:+.3f} (95 % {row['low']:+.3f} to {row['high']:+.3f})" in said
    assert f"with 5 % of the tokens disturbed swaps {swaps['dnll']:+.3f}" in said
    assert f"(8 texts, {int(swaps['targets']):,} targets); with 20 %" in said


def test_the_line_of_harm_and_the_kinds_are_the_study_s() -> None:
    from rotoscope.report.topics import perturb as shown

    assert (shown.HARM, shown.FEW, shown.MANY) == (perturb.HARM, perturb.FEW, perturb.MANY)
    assert tuple(PERTURBATIONS) == perturb.KINDS
    assert set(shown._JUDGED) == set(perturb.JUDGED)


def test_distance_gives_a_number_for_every_head(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["distance"]
    longest = table[table["d"] == 1023]
    key, distance = longest["key_axis_shift"].median(), longest["distance_axis_shift"].median()
    said = readings["generalization-distance"]
    assert f"the distance axis shifts by {distance:.2f} sd and the key axis by {key:.2f} sd" in said
    for d in (1023, 16):
        own = table[table["d"] == d].set_index(["layer", "head"])
        shown = marks(figures["generalization-distance"], "rect mark", dummy=str(d))
        assert len(shown) == len(own)
        for mark in shown[::25]:
            row = own.loc[(int(mark["layer"]), int(mark["head"]))]
            squares = row["distance_axis_shift"] ** 2, row["key_axis_shift"] ** 2
            assert numbers([mark], "share") == pytest.approx([squares[0] / sum(squares)], abs=1e-4)
            assert float(mark["shift of the key axis (sd)"]) == pytest.approx(row["key_axis_shift"], abs=6e-4)


def test_replaced_logits_have_a_bar_an_arm_and_a_mark_a_range(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["replace"]
    whole = table[table["layers"] == "all"].set_index("arm")
    figure = figures["generalization-replace"]
    bars, points = marks(figure, "bar"), marks(figure)
    assert numbers(bars, "ΔNLL (nats a token)") == pytest.approx(list(whole["dnll"]), abs=6e-5)
    some = table[table["layers"] != "all"]
    assert sorted(numbers(points, "ΔNLL (nats a token)")) == pytest.approx(sorted(some["dnll"]), abs=6e-5)
    form1, control = whole.loc["form1"], whole.loc["permuted"]
    said = readings["generalization-replace"]
    assert f"form 1 {form1['dnll']:+.2f} (95 % {form1['low']:+.2f} to {form1['high']:+.2f})" in said
    assert f"form 1 costs {form1['dnll'] / control['dnll']:.2f} times what its permuted residual costs" in said
    written = words(figure)
    spots = [written.index(name) for name in ("0-9", "10-19", "20-29", "layers replaced", "12", "29")]
    assert spots == sorted(spots)
    tasks = result.tables["replace_tasks"]
    shown = marks(figures["generalization-replace-tasks"])
    assert sorted(numbers(shown, "accuracy")) == pytest.approx(sorted(tasks["accuracy"]), abs=6e-4)
    right = tasks.query("task == 'passkey'").set_index("arm")["accuracy"]
    assert (
        f"passkey, tokens 128 (n = 60): as it is {100 * right['clean']:.0f} %, form 1 {100 * right['form1']:.0f} %"
    ) in readings["generalization-replace-tasks"]


def test_length_compares_both_sides_of_the_trained_length(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["length"]
    for variant, said in (("plain", "plain RoPE"), ("lambda+cap", "Λ-mask + distance cap")):
        own = table[table["variant"] == variant]
        sides = [own[own["position"] < 2048]["nll"].mean(), own[own["position"] >= 2048]["nll"].mean()]
        before, after = readings["generalization-length"].split("beyond 2,048 tokens")
        assert f"{said} {sides[0]:.2f}" in before
        assert f"{said} {sides[1]:.2f}" in after
    assert "trained up to 2,048" in words(figures["generalization-length"])
    shown = marks(figures["generalization-length"])
    assert sorted(numbers(shown, "nats a token")) == pytest.approx(sorted(table["nll"]), abs=6e-5)
    unknown = report.figures(Result({"length": table}))["generalization-length"]
    assert "over all positions" in unknown.reading
    assert "trained up to" not in " ".join(words(unknown))


def test_attention_follows_the_layer(figures: dict[str, report.Figure], result: Result) -> None:
    table = result.tables["length_attention"]
    means = table.groupby(["variant", "position"])["entropy"].mean()
    for layer, entropy in (("-1", means), ("7", table[table["layer"] == 7]["entropy"])):
        shown = marks(figures["generalization-length-attention"], of_layer=layer)
        assert len(shown) == 3 * len(entropy)  # panels
        wanted = sorted(entropy.repeat(3))
        assert sorted(numbers(shown, "attention entropy (nats)")) == pytest.approx(wanted, abs=6e-4)


def test_joint_ranks_layers_within_each_quantity(result: Result, readings: dict[str, str]) -> None:
    table = result.tables["joint"]
    rows = next(iter(report.figures(result)["generalization-joint"].chart.to_dict()["datasets"].values()))
    shown = pd.DataFrame(rows).set_index(["quantity", "layer"])["stands"]
    for name in ("entropy", "freeze_damage"):
        assert shown[name, int(table[name].idxmin())] == 0
        assert shown[name, int(table[name].idxmax())] == 1
    assert ("freeze_damage", 0) not in shown.index  # not measured there
    top = table.loc[table["residual"].idxmax()]
    assert f"form 1 residual {top['residual']:.3f} in layer {int(top['layer'])}" in readings["generalization-joint"]


def test_correlations_follow_what_is_held_fixed(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["joint_correlations"]
    figure = figures["generalization-joint-correlations"]
    (over,) = [p["bind"] for p in figure.chart.to_dict()["params"] if p["name"] == "view"]
    assert over["labels"] == ["layers; damage on capitals", "layers; damage on arithmetic", "heads"]
    of_layers = table["over"] == "layers"
    for view, rows in (
        ("0", table[of_layers & table["task"].isin(["", "capitals"])]),
        ("1", table[of_layers & table["task"].isin(["", "arithmetic"])]),
        ("2", table[~of_layers]),
    ):
        for kind in ("rho", "partial"):
            shown = marks(figure, "rect mark", view=view, kind=kind)
            drawn = sorted(float(text.replace("−", "-")) for text in words(figure, view=view, kind=kind) if "." in text)
            assert sorted(numbers(shown, "with depth held fixed")) == pytest.approx(sorted(rows["partial"]), abs=6e-4)
            assert drawn == pytest.approx(sorted(rows[kind]), abs=6e-3)
    plain, fixed = (((table[low] > 0) | (table[high] < 0)).sum() for low, high in BOUNDS)
    said = readings["generalization-joint-correlations"]
    assert f"{plain} of {len(table)} intervals leave out 0, {fixed} with depth held fixed" in said
    assert "form 1 residual with massive energy share, Q over 270 heads −0.90 (95 % −0.95 to −0.80)" in said


def test_disruption_moves_additivity_as_measured(readings: dict[str, str]) -> None:
    said = "top-1 −0.080 (95 % −0.100 to −0.060), change-matched −0.010 (95 % −0.030 to +0.010)"
    assert said in readings["generalization-joint-disrupted"]
    assert "clean −" not in readings["generalization-joint-disrupted"]


def test_a_run_without_them_does_not_speak_of_them(tmp_path: Path) -> None:
    page = report.write(synthetic.result(), tmp_path / "report.html").read_text("utf-8")
    assert 'id="position"' in page
    assert 'href="#generalization"' not in page
    assert 'id="generalization' not in page


def test_parts_of_another_command_are_left_out_and_empty_ones_are_not(result: Result, tmp_path: Path) -> None:
    some = Result({"perturb": result.tables["perturb"], "distance": result.tables["distance"].head(0)})
    page = report.write(some, tmp_path / "report.html").read_text("utf-8")
    body = page[: page.index("figure-data")]
    assert 'id="generalization-perturb"' in body
    assert "this run has an empty table “distance”" in body
    assert 'id="generalization-length"' not in body


@pytest.mark.parametrize("only", FIGURES.values())
def test_each_table_can_be_shown_alone(result: Result, only: str) -> None:
    figures = report.figures(Result({only: result.tables[only]}))
    assert [FIGURES[name] for name in figures] == [only]
    for figure in figures.values():
        assert vl_convert.vegalite_to_svg(figure.chart.to_dict()).count("<path") > 5


@pytest.mark.parametrize("only", FIGURES.values())
def test_nothing_measured_draws_nothing(result: Result, only: str) -> None:
    table = result.tables[only].copy()
    table[table.select_dtypes("float").columns] = float("nan")
    assert report.figures(Result({only: table})) == {}


def test_a_quick_run_still_draws(result: Result) -> None:
    quick = result.tables["perturb"].query("share in (0.05, 0.2) and kind in ('swap-arbitrary', 'jitter-arbitrary')")
    assert "20 %" in report.figures(Result({"perturb": quick}))["generalization-perturb"].reading
    replaced = result.tables["replace"].query("layers == 'all' and arm in ('form1', 'permuted')")
    figure = report.figures(Result({"replace": replaced}))["generalization-replace"]
    assert vl_convert.vegalite_to_svg(figure.chart.to_dict()).count("<path") > 5


def test_hostile_names_are_only_text(driver: WebDriver, result: Result, tmp_path: Path) -> None:
    tables = dict(result.tables)
    for name, column, value in (
        ("perturb", "kind", "swap-adjacent"),
        ("replace", "arm", "g"),
        ("replace", "layers", "12"),
        ("replace_tasks", "task", "capitals"),
        ("joint_disrupted", "arm", "top-1"),
        ("length", "variant", "yarn"),
        ("length_attention", "variant", "yarn"),
        ("joint_correlations", "a", "entropy"),
    ):
        tables[name] = tables[name].replace({column: {value: synthetic.HOSTILE}})
    tables["joint"] = tables["joint"].rename(columns={"entropy": synthetic.HOSTILE})
    open_report(driver, report.write(Result(tables), tmp_path / "report.html"))
    assert driver.execute_script("return window.pwned") is None
    assert driver.find_elements(By.TAG_NAME, "img") == []
    assert len(driver.find_elements(By.CSS_SELECTOR, "[data-figure] svg.marks")) == len(FIGURES)
    assert console(driver) == []
