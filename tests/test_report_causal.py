"""The report on disruption and depth: its sentences, cells and marks are those of the tables, and nothing more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
import synthetic_causal
import vl_convert
from browser import chromium, console, open_report, requests
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select

from rotoscope import report
from rotoscope.report import labels
from rotoscope.report.topics import TOPICS, depth, depth_swap
from rotoscope.results import Result

MAIN = "Q + K: largest dim → token mean, all but position 0"
TABLES = {  # figure or listing, and the tables without which it is left out
    "disrupt-matrix": {"disrupt"},
    "disrupt-selectivity": {"disrupt"},
    "disrupt-dose": {"dose"},
    "disrupt-layers": {"disrupt_layers"},
    "disrupt-attention": {"disrupt_attention"},
    "disrupt-additivity": {"disrupt_additivity"},
    "depth-curves": {"depth"},
    "depth-swap": {"swap"},
    "depth-cost": {"depth_cost"},
}


@pytest.fixture(scope="module")
def result() -> Result:
    return Result(synthetic_causal.tables())


@pytest.fixture(scope="module")
def page(result: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(result, tmp_path_factory.mktemp("causal") / "report.html")


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def readings(result: Result) -> dict[str, str]:
    return {name: figure.reading for name, figure in report.figures(result).items()}


@pytest.fixture(scope="module")
def opened(driver: WebDriver, page: Path) -> WebDriver:
    open_report(driver, page)
    return driver


def causal() -> list[str]:
    return [part.id for topic in TOPICS if topic.id in ("disrupt", "depth") for part in topic.parts]


def marks(driver: WebDriver, figure: str, group: str) -> list[str]:
    """Accessible labels of the marks of one kind: `rect`, `symbol`, `line`."""
    found = driver.find_elements(By.CSS_SELECTOR, f"#{figure} .mark-{group} path[aria-label]")
    return [mark.get_attribute("aria-label") or "" for mark in found]


def cell(table: pd.DataFrame, **wanted: object) -> pd.Series:
    """The one row with these values."""
    (index,) = np.flatnonzero(np.logical_and.reduce([table[name] == value for name, value in wanted.items()]))
    return table.iloc[index]


def test_every_figure_is_drawn_without_a_word_or_a_request(opened: WebDriver, result: Result) -> None:
    assert console(opened) == []
    assert requests(opened) == []
    assert [id for id in report.figures(result) if id.startswith(("disrupt", "depth"))] == list(TABLES)
    for figure in TABLES:
        drawn = opened.find_elements(By.CSS_SELECTOR, f"#{figure} svg.marks path[aria-label]")
        assert len(drawn) > 20, figure
    for listing in set(causal()) - set(TABLES):
        assert opened.find_elements(By.CSS_SELECTOR, f"#{listing} tbody tr"), listing


def test_one_cell_for_every_arm_and_task(opened: WebDriver, result: Result) -> None:
    disrupt = result.tables["disrupt"]
    shown = marks(opened, "disrupt-matrix", "rect")
    at_chance = [label for label in shown if label.startswith("label: cities;")]
    kept = [label for label in shown if not label.startswith("label: cities;")]
    assert len(kept) == len(disrupt) - 10  # ten arms
    assert len(at_chance) == 10
    text = opened.find_element(By.ID, "disrupt-matrix").text
    assert text.count("at chance") == 10 + 2  # and in the reading and in how to read it
    row = cell(disrupt, arm="top-1", task="passkey", variant="tokens=512")
    assert any(f"{MAIN}; " in label and "passkey, tokens 512" in label for label in kept)
    assert f"{row['accuracy']:.2f}".lstrip("0") in text
    assert f"{row['low']:.2f} – {row['high']:.2f}".replace("0.", ".") in text


def test_arms_are_in_words_with_controls_last_and_marked(result: Result) -> None:
    words = labels.arms(result.tables["disrupt"])
    assert list(words) == [
        "clean",
        "top-1",
        "top-1 all",
        "only 0",
        "top-2 pooled",
        "V",
        "mine",
        "change",
        "energy",
        "smallest",
    ]
    assert words["top-1"] == MAIN
    assert words["V"] == "V: largest dim → token mean, all positions"
    assert words["mine"] == "K: dims above λ = 4 → zero, all positions"
    assert words["change"] == "◆ Q + K: random dims, equal change → token mean, all but position 0"
    assert words["energy"][0] == words["smallest"][0] == "◇"


def test_arms_that_only_their_name_tells_apart_keep_it(result: Result) -> None:
    disrupt = result.tables["disrupt"]
    twin = disrupt[disrupt["arm"] == "top-1"].assign(arm="top-1 prefill")
    words = labels.arms(pd.concat([disrupt, twin]))
    assert {words["top-1"], words["top-1 prefill"]} == {f"{MAIN} (top-1)", f"{MAIN} (top-1 prefill)"}


def test_tasks_stand_by_knowledge_then_filler(result: Result) -> None:
    table = labels.named(result.tables["disrupt"]).sort_values("place")
    assert list(dict.fromkeys(table["label"])) == [
        "capitals, filler 0",
        "capitals, filler 48",
        "capitals, filler 144",
        "cities",
        "capitals in context, filler 0",
        "capitals in context, filler 48",
        "capitals in context, filler 144",
        "counterfactual capitals",
        "passkey, tokens 128",
        "passkey, tokens 512",
        "arithmetic",
    ]


def test_matrix_says_what_the_table_holds(result: Result, readings: dict[str, str]) -> None:
    disrupt = result.tables["disrupt"]
    main = disrupt[(disrupt["arm"] == "top-1") & (disrupt["task"] != "cities")]
    least = main.sort_values("retention").iloc[0]
    assert (least["task"], least["variant"]) == ("passkey", "tokens=512")
    said = readings["disrupt-matrix"]
    assert f"“{MAIN}” keeps least on passkey, tokens 512 ({100 * least['retention']:.0f} %" in said
    assert f"and most on capitals, filler 0 ({100 * main['retention'].max():.0f} %)" in said
    tested = disrupt[(disrupt["arm"] != "clean") & (disrupt["task"] != "cities")]
    assert f"{(tested['p_holm'] < 0.05).sum()} of {len(tested)} arm × task cells" in said
    assert "at chance even when clean, so not judged: cities; 60 items a task." in said


def test_selectivity_compares_both_kinds_at_the_longest_filler(
    opened: WebDriver, result: Result, readings: dict[str, str]
) -> None:
    items = result.tables["items"].query("variant == 'filler=144'")
    right = items.groupby(["arm", "task"])["correct"].sum().unstack()
    lost = 1 - right / right.loc["clean"]
    said = readings["disrupt-selectivity"]
    for arm, words in (("top-1", f"Behind 144 tokens of filler “{MAIN}”"), ("change", "the control of equal change")):
        rest = said[said.index(words) :]
        inside, recalled = (100 * lost.at[arm, task] for task in ("capitals_in_context", "capitals"))
        assert re.match(rf".*? loses {recalled:.0f} % \(.*?\) of .* weights and {inside:.0f} % \(", rest)
    points = marks(opened, "disrupt-selectivity", "symbol")
    assert len([label for label in points if "filler" in label]) == 6 * 2 * 3  # judged arms of the grid, kinds, fillers
    assert "λ = 4" not in opened.find_element(By.CSS_SELECTOR, "#disrupt-selectivity svg").text  # an own arm


def test_dose_and_layers_say_what_the_tables_hold(result: Result, readings: dict[str, str]) -> None:
    dose = result.tables["dose"].query("kind == 'top' and task == 'capitals'").set_index("dose")["accuracy"]
    assert f"capitals {dose[1]:.2f} at k = 1, {dose[8]:.2f} at k = 8;" in readings["disrupt-dose"]
    layers = result.tables["disrupt_layers"].query("task == 'passkey'")
    worst = layers.sort_values("dlogprob").iloc[0]
    assert (
        f"passkey, tokens 128: layer {worst['layer']} (−{-worst['dlogprob']:.2f} nats, accuracy "
        f"{worst['accuracy']:.2f}, median over layers {layers['accuracy'].median():.2f}, n = 60)"
    ) in readings["disrupt-layers"]


def test_doses_begin_and_end_with_the_clean_model(result: Result) -> None:
    def clean(figure: report.Figure) -> dict[str, set[float]]:
        rows = pd.concat([pd.DataFrame(rows) for rows in figure.chart.to_dict()["datasets"].values()])
        return rows[rows["shown"] == "clean"].groupby("label")["accuracy"].agg(set).to_dict()

    items = result.tables["items"].query("arm == 'clean' and variant == 'tokens=128'")
    shown = clean(report.figures(result)["disrupt-dose"])
    assert len(shown) == 3
    assert shown["passkey, tokens 128"] == {items["correct"].mean()}
    assert clean(report.figures(Result({"dose": result.tables["dose"]}))["disrupt-dose"]) == {}


def test_attention_and_additivity_compare_the_arm_with_clean_and_control(
    result: Result, readings: dict[str, str]
) -> None:
    means = result.tables["disrupt_attention"].groupby("arm")[["kl", "entropy", "sink_mass"]].mean()
    clean, main = means.loc["clean"], means.loc["top-1"]
    assert (
        f"“{MAIN}” moves attention by {main['kl']:.3f} nats, takes entropy from {clean['entropy']:.2f} to "
        f"{main['entropy']:.2f} and takes the weight on position 0 from {clean['sink_mass']:.2f} to "
        f"{main['sink_mass']:.2f}"
    ) in readings["disrupt-attention"]
    r = result.tables["disrupt_additivity"].groupby("arm")["form1_within"].mean()
    said = readings["disrupt-additivity"]
    assert f"clean {r['clean']:.3f}, “{MAIN}” {r['top-1']:.3f} and “◆" in said
    assert said.endswith(f"{r['change']:.3f}.")


def test_disrupt_table_sorts_by_value(opened: WebDriver, result: Result) -> None:
    opened.find_element(By.XPATH, "//*[@id='disrupt-table']//th/button[.='change']").click()
    first, last = (
        opened.find_element(By.CSS_SELECTOR, f"#disrupt-table tbody tr:nth-child({i}) td").text for i in (1, 99)
    )
    assert "smallest dims" in first
    assert "equal energy" in last  # and the clean model, which changes nothing, after it
    opened.find_element(By.XPATH, "//*[@id='disrupt-table']//th/button[.='retention']").click()
    row = opened.find_elements(By.CSS_SELECTOR, "#disrupt-table tbody tr:first-child td")
    assert float(row[6].text.split("\n")[0]) == pytest.approx(result.tables["disrupt"]["retention"].min(), abs=0.005)


def test_outputs_mark_right_and_wrong(opened: WebDriver, result: Result) -> None:
    outputs = result.tables["outputs"]
    heads = [head.text for head in opened.find_elements(By.CSS_SELECTOR, "#disrupt-outputs th")]
    assert heads[:5] == ["task", "end of the prompt", "gold", "clean", MAIN]
    rows = opened.find_elements(By.CSS_SELECTOR, "#disrupt-outputs tbody tr")
    assert len(rows) == 11 * 2
    clean = opened.execute_script(
        "return [...document.querySelectorAll('#disrupt-outputs tbody tr')].map((r) => r.cells[3].textContent)"
    )
    assert sum(text.startswith("✓ right") for text in clean) == outputs.query("arm == 'clean'")["correct"].sum()
    assert any(text.startswith("✗ wrong ↵ ") for text in clean)


def test_depth_curves_follow_the_measure(opened: WebDriver, result: Result) -> None:
    depth = result.tables["depth"]
    assert len(marks(opened, "depth-curves", "symbol")) == len(depth)
    row = cell(depth, task="arithmetic", manipulation="freeze", k=17)

    def values() -> list[float]:
        found = re.findall(
            r"k: first layer disturbed: 17; value: (−?[\d.]+)", "\n".join(marks(opened, "depth-curves", "symbol"))
        )
        return [float(text.replace("−", "-")) for text in found]

    assert any(value == pytest.approx(row["accuracy"], rel=1e-3) for value in values())
    switch = Select(opened.find_element(By.CSS_SELECTOR, "#depth-curves select"))
    switch.select_by_visible_text("log-likelihood of the gold answer")
    assert any(value == pytest.approx(row["dlogprob"], rel=1e-3) for value in values())
    assert console(opened) == []


def test_safe_depths_are_those_of_the_table(opened: WebDriver, result: Result, readings: dict[str, str]) -> None:
    safe = result.tables["safe_depth"]
    row = cell(safe, task="capitals", manipulation="freeze")
    assert f"freeze: capitals from k = {row['k']:.0f} ({100 * row['k'] / 30:.0f} %)" in readings["depth-curves"]
    assert "none below 30 for passkey, tokens 256" in readings["depth-curves"]
    # A safe depth of all layers says nothing, so it has no line.
    lines = opened.find_elements(By.CSS_SELECTOR, "#depth-curves .mark-rule line[stroke='#d55e00']")
    assert len(lines) == (safe["k"] < 30).sum()
    text = [row.text for row in opened.find_elements(By.CSS_SELECTOR, "#depth-safe tbody tr")]
    assert len(text) == len(safe)
    assert text[2].startswith(f"capitals freeze {row['k']:.0f} {100 * row['share']:.0f} %")
    assert "none" in text[-1]
    assert text[-1].endswith("only 20 items")


@pytest.mark.parametrize(
    ("donor", "original", "wanted"),
    [
        ([0.9, 0.8, 0.2, 0.0], [0.0, 0.2, 0.8, 0.9], (10, 20, 15.0)),
        ([0.9, 0.1, 0.6, 0.0], [0.0, 0.5, 0.4, 0.6], (20, 30, 22.5)),  # the last change of lead counts
        ([0.9, 0.9, 0.9, 0.9], [0.1, 0.1, 0.1, 0.1], None),
        ([0.1, 0.1, 0.1, 0.1], [0.9, 0.9, 0.9, 0.9], None),
    ],
)
def test_crossing(donor: list[float], original: list[float], wanted: tuple[int, int, float] | None) -> None:
    table = pd.DataFrame({"k": [0, 10, 20, 30], "donor": donor, "original": original})
    found = depth_swap.crossing(table.sample(frac=1, random_state=0))
    assert found == (None if wanted is None else pytest.approx(wanted))


def test_swap_says_where_the_lead_changes(opened: WebDriver, result: Result, readings: dict[str, str]) -> None:
    table = result.tables["swap"].query("set == 'months'").set_index("k")
    last = max(k for k in table.index if table.at[k, "donor"] > table.at[k, "original"])
    following = min(k for k in table.index if k > last)
    said = f"months (n = 60 pairs): the donor's answer leads up to k = {last}, the original's from k = {following} on"
    assert said in readings["depth-swap"]
    assert (
        "numbers (n = 60 pairs): the donor's answer still leads at the deepest k tested (30)" in readings["depth-swap"]
    )
    assert len(opened.find_elements(By.CSS_SELECTOR, "#depth-swap .mark-rule line[stroke-dasharray='5,4']")) == 2


def test_cost_stands_beside_the_largest_loss(result: Result, readings: dict[str, str]) -> None:
    cost = result.tables["depth_cost"].set_index("k")
    freeze = result.tables["depth"].query("manipulation == 'freeze' and k == 15").sort_values("loss").iloc[-1]
    assert (freeze["task"], freeze["variant"]) == ("passkey", "tokens=256")
    assert (
        f"k = 15: measured {cost.at[15, 'speedup']:.2f} × as fast on 1,024 tokens, largest loss "
        f"{100 * freeze['loss']:.0f} points (passkey, tokens 256)"
    ) in readings["depth-cost"]
    safe = int(result.tables["safe_depth"].query("manipulation == 'freeze'")["k"].max())
    assert f"At k = {safe}" in readings["depth-cost"]
    assert f"a prefill needs {100 * cost.at[safe, 'flops']:.0f} % of its FLOPs" in readings["depth-cost"]


def test_a_loss_is_the_largest_only_where_every_task_was_tested(result: Result) -> None:
    depth = result.tables["depth"]
    sparse = depth[~((depth["task"] == "passkey") & (depth["k"] % 2 == 1))]
    cost = report.figures(replace(result, tables=result.tables | {"depth": sparse}))["depth-cost"]
    assert "k = 8: measured 2.50 × as fast on 1,024 tokens, largest loss" in cost.reading
    assert re.search(r"k = 15: measured 1.69 × as fast on 1,024 tokens;", cost.reading)


@pytest.mark.parametrize("name", sorted(set().union(*TABLES.values())))
@pytest.mark.parametrize("kept", ["absent", "empty"])
def test_without_its_table_a_figure_is_left_out(result: Result, name: str, kept: str) -> None:
    tables = {key: table for key, table in result.tables.items() if key != name}
    if kept == "empty":
        tables[name] = result.tables[name].head(0)
    left = set(report.figures(replace(result, tables=tables)))
    assert set(TABLES) - left == {figure for figure, needed in TABLES.items() if name in needed}


@pytest.mark.parametrize("only", sorted({"disrupt", "safe_depth", "outputs"} | set().union(*TABLES.values())))
def test_each_table_can_be_shown_alone(result: Result, only: str) -> None:
    figures = report.figures(Result({only: result.tables[only]}))
    assert set(figures) == {figure for figure, needed in TABLES.items() if needed == {only}}
    for figure in figures.values():
        assert vl_convert.vegalite_to_svg(figure.chart.to_dict()).count("<path") > 5


def test_a_run_without_them_says_so(driver: WebDriver, tmp_path: Path) -> None:
    open_report(driver, report.write(synthetic.result(), tmp_path / "report.html"))
    for part in causal():
        assert re.search(r"Not shown: this run has no table “\w+”\.", driver.find_element(By.ID, part).text)
    assert console(driver) == []


def test_nothing_measured_draws_nothing(result: Result) -> None:
    tables = dict(result.tables)
    for name in set().union(*TABLES.values()):
        table = tables[name].copy()
        measured = table.select_dtypes("float").columns
        table[measured] = float("nan")
        tables[name] = table
    assert set(report.figures(replace(result, tables=tables))) & set(TABLES) == set()


def test_everything_at_chance_and_a_single_arm_still_draw(driver: WebDriver, result: Result, tmp_path: Path) -> None:
    disrupt = result.tables["disrupt"]
    gone = ["retention", "retention_low", "retention_high"]
    few = disrupt[disrupt["arm"].isin(["clean", "smallest"])].assign(**dict.fromkeys(gone, float("nan")))
    unusual = replace(result, tables={"disrupt": few, "depth": result.tables["depth"].query("k == 30")})
    figures = report.figures(unusual)
    assert set(figures) & set(TABLES) == {"disrupt-matrix", "depth-curves"}
    assert "at chance even when clean" in figures["disrupt-matrix"].reading
    open_report(driver, report.write(unusual, tmp_path / "report.html"))
    assert len(marks(driver, "disrupt-matrix", "rect")) == len(few)
    assert console(driver) == []


def test_hostile_names_are_only_text(driver: WebDriver, result: Result, tmp_path: Path) -> None:
    tables = dict(result.tables)
    for name in ("disrupt", "dose", "disrupt_layers", "outputs", "depth", "safe_depth"):
        tables[name] = tables[name].replace({"task": {"passkey": synthetic.HOSTILE, "arithmetic": "it's \"\\"}})
    tables["disrupt"] = tables["disrupt"].assign(replacement=synthetic.HOSTILE)
    tables["swap"] = tables["swap"].replace({"set": {"months": synthetic.HOSTILE}})
    open_report(driver, report.write(replace(result, tables=tables), tmp_path / "report.html"))
    assert driver.execute_script("return window.pwned") is None
    assert driver.find_elements(By.TAG_NAME, "img") == []
    assert len(driver.find_elements(By.CSS_SELECTOR, "[data-figure] svg.marks")) == len(report.figures(result))
    assert console(driver) == []


def test_fits_a_phone(driver: WebDriver, page: Path) -> None:
    screen = {"width": 420, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        open_report(driver, page)
        assert driver.execute_script("return document.documentElement.scrollWidth") == 420
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_curve_is_drawn_in_its_own_panel() -> None:
    """Charts place panels by counting rows of data: a task without one manipulation must not shift the others."""
    table = pd.DataFrame(
        [("a", 0, "x", 0, 1, True), ("a", 0, "y", 1, 2, True), ("b", 1, "y", 1, 3, True)],
        columns=["label", "place", "words", "column", "k", "once"],
    )
    drawn = depth._every_panel(table)
    assert set(zip(drawn.label, drawn.words, strict=True)) == {("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")}
    added = drawn[(drawn.label == "b") & (drawn.words == "x")].iloc[0]
    assert (added.place, added.column, added.once) == (1, 0, False)
    assert pd.isna(added.k)
    assert len(drawn) == 4
