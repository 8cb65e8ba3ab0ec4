"""The report's section on the matched controls: what it says is in the tables, and it is there only with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import synthetic
import synthetic_controls
import vl_convert
from browser import all_drawn, chromium, console, open_report
from drawn import marks, numbers, words
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from rotoscope import report
from rotoscope.report.labels import VARIANTS
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
NAMES = {words: name for name, words in VARIANTS.items()}


@pytest.fixture(scope="module")
def result() -> Result:
    return Result(synthetic_controls.tables())


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


def test_ratios_are_means_over_the_layers_chosen(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
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
    for part, rows in (("upper", upper), ("all", final)):
        shown = [
            mark
            for mark in marks(figures["rope-ratios"], part=part)
            if mark["training step"].replace(",", "") == "2200"
        ]
        assert len(shown) == 3 * 4
        for mark in shown:
            own = rows[(rows["tensor"] == mark["tensor"]) & (rows["positions"] == NAMES[mark["positions"]])]
            assert float(mark["largest ratio, mean over heads"]) == pytest.approx(own["max_ratio"].mean(), abs=6e-4)
            layers = own.groupby(["seed", "layer"])["max_ratio"].mean()
            assert float(mark["lowest layer of a seed"]) == pytest.approx(layers.min(), abs=6e-4)
            assert float(mark["highest layer of a seed"]) == pytest.approx(layers.max(), abs=6e-4)
            assert numbers([mark], "heads with a dim above 5") == pytest.approx([own["count"].gt(0).mean()], abs=6e-4)
            assert int(mark["heads × seeds"]) == len(own)
    assert words(figures["rope-ratios"]).count("λ = 5") == 3


def test_gaps_are_those_of_the_seeds_chosen_and_of_the_study(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["control_gaps"]
    few = result.tables["control_ratios"].query("step == 0 and tensor == 'Q'")
    assert list(gaps(few).columns) == list(table.columns)
    final = table[(table["step"] == table["step"].max()) & (table["seeds"] == "all")].set_index(["tensor", "positions"])
    row = final.loc[("K", "alibi")]
    assert f"ALiBi {row['gap']:+.2f} (95 % {row['low']:+.2f} to {row['high']:+.2f})" in readings["rope-gaps"]
    for seeds in ("all", "1"):
        own = table[table["seeds"] == seeds]
        shown = marks(figures["rope-gaps"], seeds=seeds)
        assert sorted(numbers(shown, "gap")) == pytest.approx(sorted(own["gap"]), abs=6e-4)
        assert sorted(numbers(shown, "95 % low")) == pytest.approx(sorted(own["low"]), abs=6e-4)


def test_losses_draw_one_line_a_model(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["control_losses"]
    assert len(marks(figures["rope-losses"], "line mark")) == 4 * 8  # panels, models
    shown = marks(figures["rope-losses"])
    assert len(shown) == 4 * len(table)
    wanted = sorted(table["loss"].repeat(4))
    assert sorted(numbers(shown, "held-out loss (nats a token)")) == pytest.approx(wanted, abs=6e-5)
    mean = table[table["step"] == table["step"].max()].groupby("positions")[["loss", "key_value"]].mean()
    assert f"held-out loss RoPE {mean.at['rope', 'loss']:.3f}" in readings["rope-losses"]
    assert f"key-value RoPE {100 * mean.at['rope', 'key_value']:.0f} %, learned table 0 %" in readings["rope-losses"]


def test_additivity_starts_from_random_weights(result: Result, readings: dict[str, str]) -> None:
    table = result.tables["control_additivity"].query("positions == 'rope'")
    mean = table.groupby("step")["form1__both_means_removed"].mean()
    assert f"RoPE {mean[0]:.3f} at step 0, {mean[2200]:.3f} at 2,200 (24 heads × seeds)" in readings["rope-additivity"]
    assert "ALiBi" not in readings["rope-additivity"]  # it does not rotate


def test_claims_that_only_rope_holds_are_named(figures: dict[str, report.Figure], readings: dict[str, str]) -> None:
    assert "5 claims on 8 controls: 12 holds, 2 partly, 14 fails, 12 not tested" in readings["rope-claims"]
    assert readings["rope-claims"].endswith("holds on every seed with RoPE and on none without: M1 and M2.")
    written = words(figures["rope-claims"])
    assert [written.count(symbol) for symbol in "✓◐✗○"] == [12, 2, 14, 12]


def test_disruption_says_what_was_at_chance(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    every = result.tables["control_disrupt"]
    lost = 1 - every.query("arm == 'top-1' and positions == 'rope'").groupby("task")["retention"].mean()
    assert (
        f"RoPE {100 * lost['known_values']:.0f} % of known values, {100 * lost['key_value']:.0f} % of key value"
    ) in readings["rope-disrupt"]
    # Two seeds, two contextual tasks, five arms.
    assert words(figures["rope-disrupt"]).count("clean at chance") == 2 * 2 * 5
    shown = marks(figures["rope-disrupt"])
    measured = every[(every["arm"] != "clean") & every["retention"].notna()]
    assert len(shown) == len(measured)
    (mark,) = [
        mark
        for mark in shown
        if (mark["positions"], mark["seed"], mark["arm"]) == ("ALiBi", "1", "top-2") and "passkey" in mark["task"]
    ]
    (row,) = measured.query("positions == 'alibi' and seed == 1 and arm == 'top-2' and task == 'passkey'").itertuples()
    assert numbers([mark], "loss") == pytest.approx([1 - row.retention], abs=6e-4)
    assert numbers([mark], "95 % low") == pytest.approx([1 - row.retention_high], abs=6e-4)
    assert float(mark["accuracy"]) == pytest.approx(row.accuracy, abs=6e-4)


def test_depth_follows_the_measure(figures: dict[str, report.Figure], result: Result) -> None:
    table = result.tables["control_depth"]
    for curve in ("accuracy", "dlogprob"):
        shown = marks(figures["rope-depth"], curve=curve)
        assert len(shown) == len(table)
        assert sorted(numbers(shown, "value")) == pytest.approx(sorted(table[curve]), rel=2e-3, abs=1e-6)


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


def test_a_run_without_controls_does_not_speak_of_them(tmp_path: Path) -> None:
    page = report.write(synthetic.result(), tmp_path / "report.html").read_text("utf-8")
    assert 'id="massive"' in page
    assert re.search(r'id="rope|href="#rope"', page) is None


def test_a_usual_audit_leaves_out_the_controls_own_and_keeps_its_layers(tmp_path: Path) -> None:
    small = synthetic.result(layers=2, heads=2, kv_heads=1, head_dim=8)
    small.tables |= synthetic_controls.training()
    figures = report.figures(small)
    assert [id for id in figures if id.startswith("rope")] == list(TRAINING)
    # The controls' four layers are not this model's.
    assert figures["position-heads"].chart.to_dict()["encoding"]["x"]["scale"]["domain"] == [0, 1]
    page = report.write(small, tmp_path / "report.html").read_text("utf-8")
    assert re.findall(r'<(?:figure|div class="listing") id="(rope-\w+)"', page) == list(TRAINING)
    assert 'href="#rope"' in page


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
