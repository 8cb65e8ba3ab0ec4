"""The report's section on quantization: what it says is in the tables, and what a run lacks it leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
import synthetic_quantization
from browser import all_drawn, chromium, console, open_report
from drawn import marks, numbers, words
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from rotoscope import report
from rotoscope.report.labels import EFFECTS, METHODS, PROTECTED
from rotoscope.report.topics import quantization, quantization_methods, quantization_tasks
from rotoscope.results import Result

FIGURES = {
    "quantization-tasks": "quantization",
    "quantization-kept": "quantization",
    "quantization-bits": "quantization",
    "quantization-protected": "protected",
    "quantization-layers": "quantization_layers",
    "quantization-logits": "quantization_logits",
    "quantization-effects": "quantization_effects",
}
LISTINGS = {"quantization-table": "quantization", "quantization-grid": "quantization_grid"}
TABLES = tuple(dict.fromkeys([*FIGURES.values(), *LISTINGS.values()]))
NEEDED = {
    "quantization-tasks": ("method", "task", "knowledge", "retention"),
    "quantization-kept": ("method", "task", "knowledge", "retention"),
    "quantization-bits": ("method", "bits", "dnll"),
    "quantization-protected": ("width", "arm", "knowledge", "task", "dnll"),
    "quantization-layers": ("layer", "method", "dnll"),
    "quantization-logits": ("method", "layer", "massive", "other", "total", "signal"),
    "quantization-effects": ("method", "measure", "value", "clean"),
}
"""Columns without which a figure is left out; all others may be absent."""

NAMES = {words: name for name, words in METHODS.items()} | {"gptq": "gptq"}


@pytest.fixture(scope="module")
def result() -> Result:
    return Result(synthetic_quantization.tables())


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
    assert len(driver.find_elements(By.CSS_SELECTOR, "#quantization-table tbody tr")) == 16  # reference, int3 not run
    assert len(driver.find_elements(By.CSS_SELECTOR, "#quantization-grid tbody tr")) == 3


def test_the_tables_are_those_that_the_study_writes(result: Result) -> None:
    from rotoscope.studies import quantization_tables

    assert list(result.tables["quantization"]) == quantization_tables.COLUMNS
    nothing = pd.DataFrame(columns=["method", "arm", "draw", "spec"])
    assert {*quantization_tables.protected(nothing, nothing, nothing)} == {*result.tables["protected"]}
    assert {*quantization_tables.layers({}, "", ())} == {*result.tables["quantization_layers"]}


def test_a_task_meets_the_partner_of_its_name(figures: dict[str, report.Figure], result: Result) -> None:
    table = result.tables["quantization"]
    shown = marks(figures["quantization-tasks"])
    # Cities are at chance, and capitals are no partner of cities in context.
    assert len(shown) == len(synthetic_quantization.METHODS)
    kept = table.set_index(["method", "task"])
    for mark in shown:
        name = NAMES[mark["method"]]
        for place, task in (("prompt", "capitals_in_context"), ("weights", "capitals")):
            row = kept.loc[(name, task)]
            assert numbers([mark], f"kept, answer in the {place}") == pytest.approx([row["retention"]], abs=6e-4)
            low, high = (round(100 * row[end]) for end in ("low", "high"))
            assert mark[f"95 % ({place})"] == f"{low} % to {high} %"
            assert mark[f"items ({place})"] == "60"
    gaps = kept["retention"].unstack().drop("reference")
    gaps = (gaps["capitals_in_context"] - gaps["capitals"]).dropna()
    assert (
        f"context suffers more under {(gaps < 0).sum()} of {len(gaps)} methods" in figures["quantization-tasks"].reading
    )
    assert f"most under {METHODS[gaps.idxmin()]} (keeps" in figures["quantization-tasks"].reading


@pytest.mark.parametrize(
    ("asked", "pairs"),
    [
        ({"capitals": "filler=48", "capitals_in_context": "filler=48"}, [("capitals", "capitals_in_context")]),
        ({"known_values": "", "key_value": ""}, [("known_values", "key_value")]),
        ({"passkey": ""}, []),
        ({"capitals": "", "capitals_in_context": "", "passkey": ""}, [("capitals", "capitals_in_context")]),
    ],
)
def test_partners(asked: dict[str, str], pairs: list[tuple[str, str]]) -> None:
    weights = ("capitals", "known_values")
    rows = [
        ("rtn-int4", "weights", task, variant, "parametric" if task in weights else "contextual", kept)
        for kept, (task, variant) in zip((0.2, 0.5, 0.9), asked.items(), strict=False)
    ]
    table = pd.DataFrame(rows, columns=["method", "kind", "task", "variant", "knowledge", "retention"])
    found = quantization_tasks.pairs(quantization_tasks.answered(Result({"quantization": table})))
    kept = table.set_index("task")["retention"]
    assert [(*one["x"], *one["y"]) for one in found] == [(kept[x], kept[y]) for x, y in pairs]


def test_bits_are_told_as_they_are_wherever_a_point_is_drawn(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["quantization"].query("method != 'reference'").dropna(subset=["dnll"])
    table = table.drop_duplicates("method").set_index("method")
    shown = marks(figures["quantization-bits"])
    assert {NAMES[mark["method"]] for mark in shown} == set(table.index)
    for mark in shown:
        row = table.loc[NAMES[mark["method"]]]
        assert numbers([mark], "bits, scales included") == pytest.approx([row["bits"]], abs=6e-4)
        assert numbers([mark], "ΔNLL (nats a token)") == pytest.approx([row["dnll"]], abs=6e-5)
        assert mark["95 %"] == f"{row['dnll_low']:+.4f} to {row['dnll_high']:+.4f}"
    sure = table[table["dnll_high"] <= 0.05]
    for what, some in (("weights", sure[sure["kind"] != "cache"]), ("the cache", sure[sure["kind"] == "cache"])):
        best = some["bits"].idxmin()
        said = (
            f"fewest bits of {what} that lose at most 0.05 nats a token are {some['bits'].min():.2f} ({METHODS[best]}"
        )
        assert said in readings["quantization-bits"]
    assert words(figures["quantization-bits"]).count("0.05 nats") == 2


def test_points_of_equal_bits_stand_side_by_side(figures: dict[str, report.Figure]) -> None:
    panel = figures["quantization-bits"].chart.to_dict()
    data = [row for rows in panel["datasets"].values() for row in rows if row.get("at") is not None]
    at = {row["method"]: row["at"] for row in data}
    fours = sorted(at[name] for name in ("rtn-int4", "nf4", "packed-int4", "awq", "gptq"))
    assert np.diff(fours) == pytest.approx([0.12] * 4)
    assert np.mean(fours) == pytest.approx(4.502)
    assert at["rtn-int3"] == 3.5


def test_only_a_low_bit_model_is_warned_of(readings: dict[str, str]) -> None:
    warned = {name for name, said in readings.items() if "Mind: 100 % of the linear layers" in said}
    assert warned == {"quantization-tasks", "quantization-bits"}
    other = report.figures(Result(synthetic_quantization.tables(low_bit=False)))
    assert not any("Mind" in figure.reading for figure in other.values())


def test_layers_say_which_costs_most(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["quantization_layers"]
    shown = marks(figures["quantization-layers"])
    assert sorted(numbers(shown, "ΔNLL (nats a token)")) == pytest.approx(sorted(table["dnll"]), abs=6e-6)
    for method, own in table.groupby("method"):
        worst = own.loc[own["dnll"].idxmax()]
        said = f"{METHODS[str(method)]} costs most in layer {worst['layer']} ({worst['dnll']:.4f}"
        assert said in readings["quantization-layers"]


def test_each_draw_has_its_point_and_stands_beside_massive(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["protected"]
    shown = marks(figures["quantization-protected"])
    assert sorted(numbers(shown, "nats lost, an item")) == pytest.approx(sorted(table["dnll"]), abs=6e-5)
    assert sum(mark["arm"] == PROTECTED["random"] for mark in shown) == 2 * 2 * 5  # widths, tasks, seeds
    assert {mark["seed"] for mark in shown if mark["arm"] == PROTECTED["massive"]} == {"–"}
    assert "massive channels kept (2.95 bits)" in words(figures["quantization-protected"])
    own = table.query("width == 'kv-int2' and task == 'capitals_in_context'")
    massive, random = own[own["arm"] == "massive"]["dnll"].item(), own[own["arm"] == "random"]["dnll"]
    said = readings["quantization-protected"].split("capitals in context, filler 144: ")[1]
    better = f"better than {(random > massive).sum()} of 5 draws"
    assert f"; KV int2 {massive:+.3f} against {random.mean():+.3f}, {better}." in said


def test_widths_stand_in_line_without_rows_of_their_own(result: Result) -> None:
    table = result.tables["protected"].replace({"width": {"rtn-int4": "kv-int3", "kv-int2": "rtn-int3"}})
    written = words(report.figures(Result({"protected": table}))["quantization-protected"])
    titles = [text for text in written if "·" in text]
    assert [title.split(" ·")[0] for title in titles] == ["RTN int3", "RTN int3", "KV int3", "KV int3"]


def test_errors_of_logits_are_root_mean_squares_over_layers(
    figures: dict[str, report.Figure], result: Result, readings: dict[str, str]
) -> None:
    table = result.tables["quantization_logits"]
    shown = [mark for mark in marks(figures["quantization-logits"]) if "method" in mark]
    assert len(shown) == 3 * len(synthetic_quantization.METHODS)
    parts = {"massive channels": "massive", "all other channels": "other", "all together": "total"}
    for mark in shown:
        own = table[table["method"] == NAMES[mark["method"]]]
        part = np.sqrt((own[parts[mark["error made by"]]] ** 2).sum() / (own["signal"] ** 2).sum())
        assert numbers([mark], "error / logits") == pytest.approx([part], rel=6e-3)
    assert "under 0 of 14 methods" in readings["quantization-logits"]
    for method in ("RTN int4", "KV int2"):
        below = [mark for mark in marks(figures["quantization-logits"], method=method) if "layer" in mark]
        own = table[table["method"] == NAMES[method]]
        wanted = sorted((own["total"] / own["signal"]).tolist())
        got = sorted(numbers([mark for mark in below if mark["error made by"] == "all together"], "error / logits"))
        assert got == pytest.approx(wanted, rel=6e-3)


def test_what_is_measured_again_stands_beside_what_it_was(figures: dict[str, report.Figure], result: Result) -> None:
    table = result.tables["quantization_effects"].query("method != 'reference'")
    shown = marks(figures["quantization-effects"])
    for title, column in (("under this method", "value"), ("the model as it is", "clean")):
        assert sorted(numbers(shown, title)) == pytest.approx(sorted(table[column]), abs=6e-4)
    assert set(EFFECTS.values()) <= set(words(figures["quantization-effects"]))


def test_the_list_says_what_each_method_is(result: Result) -> None:
    grid = quantization_methods.grid(result)
    assert grid is not None
    rows = {row[0].text: dict(zip(grid.columns, row, strict=True)) for row in grid.rows}
    assert next(iter(rows)) == "the model as it is"
    # The checkpoint stands with its like, before what quantizes activations.
    assert list(rows).index("gptq") == list(rows).index("W8A8") - 1
    assert rows["RTN int4"]["changed"].text == "99.8 %"
    assert rows["RTN int4"]["MB"].text == "172.8"
    assert rows["RTN int4"]["cities"].text == "accuracy 50 %"
    assert rows["KV int4"]["changed"].text == ""
    assert rows["KV int3"]["note"].text == "not reached"
    own = result.tables["quantization"].query("method == 'kv-int2' and task == 'capitals_in_context'").iloc[0]
    cell = rows["KV int2"]["capitals in context, filler 144"]
    assert (cell.sort, cell.below) == (own["retention"], f"{own['low']:.0%} to {own['high']:.0%}".replace("%", " %"))


@pytest.mark.parametrize("only", TABLES)
def test_each_table_can_be_shown_alone(result: Result, only: str) -> None:
    alone = Result({only: result.tables[only]})
    assert list(report.figures(alone)) == [name for name, table in FIGURES.items() if table == only]
    shown = [part.id for part in quantization.TOPIC.shown(alone)]
    assert sorted(shown) == sorted(name for name, table in (FIGURES | LISTINGS).items() if table == only)
    for listing in (quantization_methods.TABLE, quantization_methods.GRID):
        if only in listing.tables:
            assert listing.build(alone) is not None


@pytest.mark.parametrize(("table", "column"), [(n, c) for n, t in synthetic_quantization.tables().items() for c in t])
def test_a_column_that_is_absent_takes_only_its_figures_along(result: Result, table: str, column: str) -> None:
    without = Result({table: result.tables[table].drop(columns=column)})
    kept = [name for name, of in FIGURES.items() if of == table and column not in NEEDED[name]]
    assert list(report.figures(without)) == kept
    for listing in (quantization_methods.TABLE, quantization_methods.GRID):
        if table in listing.tables:
            listing.build(without)


@pytest.mark.parametrize("only", TABLES)
def test_nothing_measured_draws_nothing(result: Result, only: str) -> None:
    table = result.tables[only].copy()
    table[table.select_dtypes("float").columns] = float("nan")
    assert report.figures(Result({only: table})) == {}
    for listing in (quantization_methods.TABLE, quantization_methods.GRID):
        if only in listing.tables:
            listing.build(Result({only: table}))


def test_numbers_without_intervals_are_drawn_without(result: Result) -> None:
    tables = {name: table.copy() for name, table in result.tables.items()}
    for table in tables.values():
        ends = [name for name in table if re.fullmatch(r"(\w+_)?(low|high)", name)]
        table[ends] = float("nan")
    figures = report.figures(Result(tables))
    assert list(figures) == list(FIGURES)
    assert not any("nan" in figure.reading for figure in figures.values())
    for name in ("quantization-tasks", "quantization-kept", "quantization-bits", "quantization-layers"):
        assert marks(figures[name])
        assert not [mark for mark in marks(figures[name], "rule mark") if "method" in mark]
    assert {mark["95 %"] for mark in marks(figures["quantization-bits"])} == {"–"}


def test_nothing_lost_and_nothing_moved_is_said_so(result: Result) -> None:
    tables = dict(result.tables)
    tables["quantization"] = tables["quantization"].assign(retention=1.0)
    tables["quantization_effects"] = tables["quantization_effects"].assign(
        value=tables["quantization_effects"]["clean"]
    )
    figures = report.figures(Result(tables))
    assert figures["quantization-kept"].reading == "No method answers fewer items than the model as it is."
    assert "under none of 14 methods" in figures["quantization-tasks"].reading
    assert figures["quantization-effects"].reading.startswith("Nothing moved")


def test_a_run_without_quantization_does_not_speak_of_it(tmp_path: Path) -> None:
    page = report.write(synthetic.result(), tmp_path / "report.html").read_text("utf-8")
    assert 'id="massive"' in page
    assert re.search(r'id="quantization|href="#quantization"', page) is None


def test_hostile_names_are_only_text(driver: WebDriver, result: Result, tmp_path: Path) -> None:
    names = {"gptq": synthetic.HOSTILE, "nf4": "it's \"\\"}
    tables = {name: table.replace({"method": names}) for name, table in result.tables.items()}
    tables["protected"] = tables["protected"].replace({"arm": {"massive": synthetic.HOSTILE}})
    open_report(driver, report.write(Result(tables), tmp_path / "report.html"))
    assert driver.execute_script("return window.pwned") is None
    assert len(driver.find_elements(By.CSS_SELECTOR, "[data-figure] svg.marks")) == len(FIGURES)
    assert console(driver) == []
