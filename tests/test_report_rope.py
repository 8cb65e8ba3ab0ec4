"""The report's section on the matched controls: what it says is in the tables, and it is there only with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
import synthetic_controls
import vl_convert
from browser import chromium, console, open_report, requests
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select

from rotoscope import report
from rotoscope.report.topics import controls, rope
from rotoscope.results import Result
from rotoscope.studies.rope import gaps

TRAINING = {
    "rope-ratios": "control_ratios",
    "rope-gaps": "control_gaps",
    "rope-losses": "control_losses",
    "rope-additivity": "control_additivity",
}
AUDIT = {
    "rope-claims": "control_claims",
    "rope-shares": "control_shares",
    "rope-heads": "control_massive_heads",
    "rope-disrupt": "control_disrupt",
    "rope-depth": "control_depth",
    "rope-length": "control_length",
}
FIGURES = TRAINING | AUDIT


@pytest.fixture(scope="module")
def result() -> Result:
    return Result(synthetic_controls.tables())


@pytest.fixture(scope="module")
def readings(result: Result) -> dict[str, str]:
    return {name: figure.reading for name, figure in report.figures(result).items()}


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def opened(driver: WebDriver, result: Result, tmp_path_factory: pytest.TempPathFactory) -> WebDriver:
    open_report(driver, report.write(result, tmp_path_factory.mktemp("rope") / "report.html"))
    return driver


def marks(driver: WebDriver, figure: str, group: str = "symbol") -> list[str]:
    found = driver.find_elements(By.CSS_SELECTOR, f"#{figure} .mark-{group} path[aria-label]")
    return [(mark.get_attribute("aria-label") or "").replace("−", "-") for mark in found]


def numbers(labels: list[str], field: str) -> list[float]:
    """The values of one field in accessible labels."""
    found = (re.search(rf"(?:^|; ){re.escape(field)}: (-?[\d.,]+)", label) for label in labels)
    return [float(match.group(1).replace(",", "")) for match in found if match]


def test_every_figure_is_drawn_without_a_word_or_a_request(opened: WebDriver, result: Result) -> None:
    assert list(report.figures(result)) == list(FIGURES)
    assert console(opened) == []
    assert requests(opened) == []
    for figure in FIGURES:
        assert len(opened.find_elements(By.CSS_SELECTOR, f"#{figure} svg.marks path[aria-label]")) > 20, figure


def test_ratios_are_means_over_the_layers_chosen(opened: WebDriver, result: Result, readings: dict[str, str]) -> None:
    table = result.tables["control_ratios"]
    final = table[table["step"] == table["step"].max()]
    upper = final[final["layer"] >= 2]
    for tensor in "QKV":
        mean = upper[upper["tensor"] == tensor].groupby("positions")["max_ratio"].mean()
        said = f"{tensor} RoPE {mean['rope']:.2f}, learned table {mean['learned']:.2f}, ALiBi {mean['alibi']:.2f}"
        assert said in readings["rope-ratios"]
    massive = upper[(upper["positions"] == "rope") & (upper["tensor"] == "K")]["count"].gt(0).mean()
    assert f"{100 * massive:.0f} % of RoPE’s K heads" in readings["rope-ratios"]
    assert "12 heads a variant and tensor over 2 seeds" in readings["rope-ratios"]

    def drawn() -> list[float]:
        labels = [label for label in marks(opened, "rope-ratios") if "RoPE" in label and "step: 2,200" in label]
        return sorted(numbers(labels, "largest dim / mean of its head") + numbers(labels, "value"))

    def meant(rows: pd.DataFrame) -> list[float]:
        return sorted(rows[rows["positions"] == "rope"].groupby("tensor")["max_ratio"].mean())

    assert drawn() == pytest.approx(meant(upper), rel=1e-3)
    Select(opened.find_element(By.CSS_SELECTOR, "#rope-ratios select")).select_by_visible_text("all")
    assert drawn() == pytest.approx(meant(final), rel=1e-3)
    assert meant(final) != pytest.approx(meant(upper), rel=1e-3)


def test_bands_go_from_the_lowest_to_the_highest_layer_of_a_seed(result: Result) -> None:
    some = "positions == 'rope' and tensor == 'K' and layer >= 2 and step == 900"
    layers = result.tables["control_ratios"].query(some).groupby(["seed", "layer"])["max_ratio"].mean()
    datasets = report.figures(result)["rope-ratios"].chart.to_dict()["datasets"].values()
    every = pd.concat([pd.DataFrame(rows) for rows in datasets]).dropna(subset=["value"])
    shown = every.query("words == 'RoPE' and tensor == 'K' and step == 900 and part == 'upper'")
    for row in shown.itertuples():
        assert (row.low, row.high, row.n) == (pytest.approx(layers.min()), pytest.approx(layers.max()), 12)
    assert len(shown)


def test_gaps_follow_the_seed_and_have_the_study_s_columns(
    opened: WebDriver, result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["control_gaps"]
    few = result.tables["control_ratios"].query("step == 0 and tensor == 'Q'")
    assert list(gaps(few, 0).columns) == list(table.columns)
    final = table[(table["step"] == table["step"].max()) & (table["seeds"] == "all")].set_index(["tensor", "positions"])
    row = final.loc[("K", "alibi")]
    assert f"ALiBi {row['gap']:+.2f} (95 % {row['low']:+.2f} to {row['high']:+.2f})" in readings["rope-gaps"]
    Select(opened.find_element(By.CSS_SELECTOR, "#rope-gaps select")).select_by_visible_text("only 1")
    only = table[table["seeds"] == "1"]
    labels = marks(opened, "rope-gaps")
    drawn = sorted(value for label in labels for value in numbers([label], "gap")[:1])
    if not drawn:  # the first panel's axis names the field
        drawn = sorted(numbers(labels, "ratio with RoPE,− ratio without"))
    wanted = only["gap"].round(4).to_numpy()
    assert drawn
    assert all(np.isclose(wanted, value, atol=2e-3).any() for value in drawn)
    assert console(opened) == []


def test_losses_draw_one_line_a_model(opened: WebDriver, result: Result, readings: dict[str, str]) -> None:
    table = result.tables["control_losses"]
    lines = opened.find_elements(By.CSS_SELECTOR, "#rope-losses .mark-line path")
    assert len(lines) == 4 * 8  # panels, models
    mean = table[table["step"] == table["step"].max()].groupby("positions")[["loss", "key_value"]].mean()
    assert f"held-out loss RoPE {mean.at['rope', 'loss']:.3f}" in readings["rope-losses"]
    assert f"key-value RoPE {100 * mean.at['rope', 'key_value']:.0f} %, learned table 0 %" in readings["rope-losses"]


def test_additivity_starts_from_random_weights(result: Result, readings: dict[str, str]) -> None:
    table = result.tables["control_additivity"].query("positions == 'rope'")
    mean = table.groupby("step")["form1__both_means_removed"].mean()
    assert f"RoPE {mean[0]:.3f} at step 0, {mean[2200]:.3f} at 2,200 (24 heads × seeds)" in readings["rope-additivity"]
    assert "ALiBi" not in readings["rope-additivity"]  # it does not rotate


def test_claims_that_only_rope_holds_are_named(opened: WebDriver, readings: dict[str, str]) -> None:
    assert "5 claims on 8 controls: 12 holds, 2 partly, 14 fails, 12 not tested" in readings["rope-claims"]
    assert readings["rope-claims"].endswith("holds on every seed with RoPE and on none without: M1 and M2.")
    text = opened.find_element(By.CSS_SELECTOR, "#rope-claims svg").text
    assert [text.count(symbol) for symbol in "✓◐✗○"] == [12, 2, 14, 12]


def test_disruption_says_what_was_at_chance(opened: WebDriver, result: Result, readings: dict[str, str]) -> None:
    table = result.tables["control_disrupt"].query("arm == 'top-1' and positions == 'rope'")
    lost = 1 - table.groupby("task")["retention"].mean()
    assert (
        f"RoPE {100 * lost['known_values']:.0f} % of known values, {100 * lost['key_value']:.0f} % of key value"
    ) in readings["rope-disrupt"]
    # Two seeds, two contextual tasks, five arms.
    assert opened.find_element(By.CSS_SELECTOR, "#rope-disrupt svg").text.count("clean at chance") == 2 * 2 * 5
    assert len(marks(opened, "rope-disrupt")) >= 8 * 3 * 5 - 20


def test_length_says_where_each_variant_ends(result: Result, readings: dict[str, str]) -> None:
    nll = result.tables["control_length"].set_index(["positions", "position"])["nll"]
    assert f"RoPE {nll['rope', 192]:.2f} (at 192) to {nll['rope', 448]:.2f} (at 448)" in readings["rope-length"]
    assert f"learned table {nll['learned', 192]:.2f} (at 192) (ends there)" in readings["rope-length"]


def test_what_the_text_says_of_the_controls_is_so() -> None:
    from rotoscope.controls import audit, curve, data

    assert controls.TRAINED == data.LENGTH
    how = next(part.how for part in rope.TOPIC.parts if part.id == "rope-losses")
    named = {task.partition(":")[0]: n for task, n in curve.TASKS.items()}
    assert named == {"key_value": 60, "known_values": 60, "passkey": 30}
    assert "(60 key-value items, 30 passkeys)" in how
    assert "(60 known values)" in how
    assert {name.removeprefix("control_") for name in AUDIT.values()} >= {*audit.KEPT, audit.LENGTH}


def test_a_run_without_controls_does_not_speak_of_them(driver: WebDriver, tmp_path: Path) -> None:
    open_report(driver, report.write(synthetic.result(), tmp_path / "report.html"))
    assert driver.find_elements(By.CSS_SELECTOR, "#rope, nav a[href='#rope'], [id^=rope-]") == []


def test_a_usual_audit_leaves_out_the_controls_own_and_keeps_its_layers(driver: WebDriver, tmp_path: Path) -> None:
    small = synthetic.result(layers=2, heads=2, kv_heads=1, head_dim=8)
    small.tables |= synthetic_controls.training()
    assert [id for id in report.figures(small) if id.startswith("rope")] == list(TRAINING)
    # The controls' four layers are not this model's.
    layers = report.figures(small)["position-heads"].chart.to_dict()["encoding"]["x"]["scale"]["domain"]
    assert layers == [0, 1]
    open_report(driver, report.write(small, tmp_path / "report.html"))
    parts = driver.find_elements(By.CSS_SELECTOR, "#rope figure, #rope .listing")
    assert [part.get_attribute("id") for part in parts] == list(TRAINING)
    assert driver.find_elements(By.CSS_SELECTOR, "nav a[href='#rope']")
    assert console(driver) == []


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
    if only == "control_claims":
        table = table.head(0)
    assert report.figures(Result({only: table})) == {}


def test_one_seed_and_one_variant_still_draw(result: Result) -> None:
    few = {}
    for name, table in result.tables.items():
        few[name] = table[(table["positions"] == "rope") & (table.get("seed", 0) == 0)]
    few["control_gaps"] = few["control_gaps"].head(0)
    figures = report.figures(Result(few))
    assert set(figures) == set(FIGURES) - {"rope-gaps"}
    assert "over 1 seed)" in figures["rope-ratios"].reading


def test_hostile_names_are_only_text(driver: WebDriver, result: Result, tmp_path: Path) -> None:
    tables = {
        name: table.replace({"positions": {"alibi": synthetic.HOSTILE, "none": "it's \"\\"}})
        for name, table in result.tables.items()
    }
    open_report(driver, report.write(Result(tables), tmp_path / "report.html"))
    assert driver.execute_script("return window.pwned") is None
    assert len(driver.find_elements(By.CSS_SELECTOR, "[data-figure] svg.marks")) == len(FIGURES)
    assert console(driver) == []
