"""The report: what it shows equals what was measured, nothing leaves the page, nothing hostile runs in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import synthetic
import vl_convert
from browser import chromium, console, open_report, requests
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select, WebDriverWait

from rotoscope import report
from rotoscope.report.data import columns, inert
from rotoscope.report.text import number
from rotoscope.report.topics import TOPICS
from rotoscope.results import CATALOGUE, Result, read

FIGURES = 11


@pytest.fixture(scope="module")
def result() -> Result:
    return synthetic.result()


@pytest.fixture(scope="module")
def page(result: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    result.save(out)
    return report.write(result, out / "report.html")


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def opened(driver: WebDriver, page: Path) -> Iterator[WebDriver]:
    """The report of a usual model, opened afresh; whatever a test does there must stay without noise or traffic."""
    open_report(driver, page)
    yield driver
    assert_quiet(driver)


def assert_quiet(driver: WebDriver) -> None:
    assert console(driver) == []
    assert requests(driver) == []
    assert driver.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)") == []


def drawn(driver: WebDriver) -> int:
    return len(driver.find_elements(By.CSS_SELECTOR, "[data-figure] svg.marks"))


def hover(driver: WebDriver, figure: str, label: str) -> dict[str, str]:
    """Move the mouse onto the mark whose accessible label begins like this, and read the lines that appear."""
    mark = driver.find_element(By.CSS_SELECTOR, f"#{figure} path[aria-label^='{label};']")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    # Leave whatever lay under the mouse after scrolling, or its lines are read instead.
    ActionChains(driver).move_to_element(driver.find_element(By.CSS_SELECTOR, f"#{figure} h3")).perform()
    WebDriverWait(driver, 5).until_not(lambda d: d.find_elements(By.CSS_SELECTOR, "#vg-tooltip-element.visible"))
    ActionChains(driver).move_to_element(mark).perform()
    rows = WebDriverWait(driver, 5).until(
        lambda d: d.find_elements(By.CSS_SELECTOR, "#vg-tooltip-element.visible tr"), f"nothing appeared on {label}"
    )
    return {row.find_element(By.CLASS_NAME, "key").text: row.find_element(By.CLASS_NAME, "value").text for row in rows}


def test_opens_without_a_word_and_without_a_request(opened: WebDriver, result: Result) -> None:
    assert drawn(opened) == len(report.figures(result)) == FIGURES
    # `opened` goes on to look at console and network.


def test_a_request_or_an_error_would_be_noticed(driver: WebDriver, tmp_path: Path) -> None:
    noisy = tmp_path / "noisy.html"
    noisy.write_text("<html data-drawn=all><script src='nothing.js'></script><script>console.error('heard')</script>")
    open_report(driver, noisy)
    assert requests(driver) == [(tmp_path / "nothing.js").as_uri()]
    assert any("heard" in line for line in console(driver))


def test_scorecard_equals_summary(opened: WebDriver, page: Path) -> None:
    claims = json.loads((page.parent / "summary.json").read_text())["claims"]
    shown = {
        (cell.get_attribute("data-claim"), cell.get_attribute("data-field")): cell
        for cell in opened.find_elements(By.CSS_SELECTOR, "[data-claim]")
    }
    fields = ("value", "interval", "null", "detectable")
    assert set(shown) == {(claim_id, field) for claim_id in CATALOGUE for field in fields}
    for claim in claims:
        for field in fields:
            assert json.loads(shown[claim["id"], field].get_attribute("data-value") or "") == claim[field]
        row = opened.find_element(By.ID, f"claim-{claim['id']}").text
        assert claim["verdict"] in row
        assert claim["n"] in " ".join(row.split())
    assert shown["P1", "value"].text == "0.970"
    assert shown["P1", "interval"].text == "[0.967, 0.973]"
    assert shown["M1", "interval"].text == ""  # an end of it is not finite
    assert "thresholds halved: holds" in opened.find_element(By.ID, "claim-P1").text


def test_rules_open(opened: WebDriver) -> None:
    rule = opened.find_element(By.CSS_SELECTOR, "#claim-P1 details")
    sentence = rule.find_element(By.TAG_NAME, "p")
    assert not sentence.is_displayed()
    rule.find_element(By.TAG_NAME, "summary").click()
    assert sentence.is_displayed()
    assert "≥ .95" in sentence.text
    opened.find_element(By.ID, "all-rules").click()
    assert opened.find_element(By.CSS_SELECTOR, "#claim-P2 details p").is_displayed()


def test_hover_shows_the_r_of_the_kind_and_arm_chosen(opened: WebDriver, result: Result) -> None:
    head = result.tables["heads"].set_index(["layer", "head"]).loc[(9, 5)]
    assert hover(opened, "position-heads", "layer: 9; query head: 5")["r"] == f"{head['form1_within']:.4f}"
    kind, arm = (Select(e) for e in opened.find_elements(By.CSS_SELECTOR, "#position-heads select"))
    kind.select_by_visible_text("form 2")
    arm.select_by_visible_text("random weights, as they are")
    shown = hover(opened, "position-heads", "layer: 9; query head: 5")
    assert shown["r"] == f"{head['form2__random']:.4f}"
    assert shown["form 1, as it is"] == f"{head['form1']:.4f}"
    assert shown["measured on"] == "4 texts, 4,096 tokens"


def test_magnitude_map_shows_the_layer_of_the_slider(opened: WebDriver, result: Result) -> None:
    slider = opened.find_element(By.CSS_SELECTOR, "#massive-surfaces input[type=range]")
    opened.execute_script("arguments[0].value = 3; arguments[0].dispatchEvent(new Event('input'))", slider)
    table = result.tables["magnitudes"].set_index(["tensor", "layer", "head", "dim"])
    for tensor, axis, head, dim in (("Q", "head", 7, 41), ("K", "kv head", 2, 33)):
        shown = hover(opened, "massive-surfaces", f"dim: {dim}; {axis}: {head}")
        own = table.loc[(tensor, 3, head, dim)]
        assert (shown["tensor"], shown["layer"]) == (tensor, "3")
        assert float(shown["RMS"]) == pytest.approx(own["rms"], rel=5e-3)
        assert float(shown["ratio to the head's mean"]) == pytest.approx(own["ratio"], abs=6e-3)
        assert float(shown["ratio, un-rotated"]) == pytest.approx(own["ratio_pre"], abs=6e-3)
        assert shown["pair (−1: none)"] == str(int(own["pair"]))


def test_layer_table_sorts(opened: WebDriver, result: Result) -> None:
    entropy = result.tables["layers"].set_index("layer")["entropy"]
    head = opened.find_element(By.XPATH, "//*[@id='layers-table']//th/button[.='entropy (nats)']")
    for wanted in (entropy.idxmin(), entropy.idxmax()):
        head.click()
        assert opened.find_element(By.CSS_SELECTOR, "#layers-table tbody td").text == str(wanted)


def test_provenance_is_complete(opened: WebDriver, page: Path) -> None:
    opened.find_element(By.CSS_SELECTOR, "#provenance summary").click()
    shown = json.loads(opened.find_element(By.CSS_SELECTOR, "#provenance pre").get_attribute("textContent"))
    assert shown == json.loads((page.parent / "summary.json").read_text())["provenance"]


def test_fits_a_phone(driver: WebDriver, page: Path) -> None:
    screen = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        open_report(driver, page)
        assert driver.execute_script("return document.documentElement.scrollWidth") == 390
        assert driver.find_element(By.CSS_SELECTOR, "#claim-P1 [data-field=value]").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_text_is_only_text(driver: WebDriver, result: Result, tmp_path: Path) -> None:
    tables = dict(result.tables)
    tables["heads"] = tables["heads"].assign(position=synthetic.HOSTILE)
    tables["stability"] = tables["stability"].assign(text_a=synthetic.HOSTILE)
    tables["explanation"] = tables["explanation"].replace({"arm": {"random": synthetic.HOSTILE}})
    open_report(driver, report.write(replace(result, tables=tables), tmp_path / "hostile.html"))
    shown = hover(driver, "position-heads", "layer: 0; query head: 0")
    assert "<img src=x" in shown["position encoding"]
    assert driver.execute_script("return window.pwned") is None
    assert driver.find_elements(By.TAG_NAME, "img") == []
    assert "{{ 7 * 7 }}" in driver.find_element(By.TAG_NAME, "h1").text
    assert "<script>window.pwned = 1</script>" in driver.find_element(By.ID, "texts").text
    assert drawn(driver) == FIGURES
    assert_quiet(driver)


@pytest.mark.parametrize(
    ("shape", "missing"),
    [
        ({"layers": 12, "bare": (0, 1, 5, 11)}, set()),
        (
            {"layers": 2, "heads": 1, "kv_heads": 1, "head_dim": 8, "massive": False},
            {"massive-wavelengths", "massive-offsets", "massive-signs"},
        ),
    ],
)
def test_unusual_models(driver: WebDriver, tmp_path: Path, shape: dict, missing: set[str]) -> None:
    unusual = synthetic.result(**shape)
    assert {*report.figures(synthetic.result())} - {*report.figures(unusual)} == missing
    open_report(driver, report.write(unusual, tmp_path / "report.html"))
    for figure in missing:
        assert "an empty table “massive”" in driver.find_element(By.ID, figure).text
    assert drawn(driver) == FIGURES - len(missing)
    assert_quiet(driver)


def test_nan_is_a_gap(driver: WebDriver, result: Result, tmp_path: Path) -> None:
    tables = {name: table.copy() for name, table in result.tables.items()}
    for name, table in tables.items():
        if "layer" in table:
            numbers = table.select_dtypes("float").columns
            tables[name].loc[table["layer"] == 4, numbers] = float("nan")
    open_report(driver, report.write(replace(result, tables=tables), tmp_path / "report.html"))
    assert drawn(driver) == FIGURES
    assert driver.find_elements(By.CSS_SELECTOR, "#position-heads path[aria-label^='layer: 4;']") == []
    assert driver.find_elements(By.CSS_SELECTOR, "#position-heads path[aria-label^='layer: 5;']") != []
    assert_quiet(driver)


@pytest.mark.parametrize("kept", ["nothing", "columns"])
def test_without_tables_every_section_says_so(driver: WebDriver, result: Result, tmp_path: Path, kept: str) -> None:
    tables = {} if kept == "nothing" else {name: table.head(0) for name, table in result.tables.items()}
    bare = replace(result, tables=tables)
    assert report.figures(bare) == {}
    open_report(driver, report.write(bare, tmp_path / "report.html"))
    sentences = driver.find_elements(By.CLASS_NAME, "missing")
    assert len(sentences) == sum(len(topic.parts) for topic in TOPICS if not topic.optional) + 2  # texts and anatomy
    assert all(re.fullmatch(r"Not shown: this run has (no|an empty) table “\w+”\.", s.text) for s in sentences)
    assert_quiet(driver)


def test_one_study_alone_can_be_shown(result: Result) -> None:
    layers = result.tables["layers"]
    massive = {k: result.tables[k] for k in ("magnitudes", "massive", "massive_heads", "stability")}
    alone = Result(massive | {"layers": layers.drop(columns=["form1", "form1_within", "form2_within", "predicted"])})
    assert {*report.figures(alone)} == {id for id in report.figures(result) if not id.startswith("position")}
    assert "form 1" not in report.figures(alone)["layers-multiples"].reading


def test_what_was_read_from_disk_gives_the_same_page(result: Result, page: Path, tmp_path: Path) -> None:
    again = report.write(read(page.parent), tmp_path / "report.html")
    assert again.read_bytes() == page.read_bytes()


def test_page_is_small_and_carries_vega_once(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(text.encode()) < 2_000_000
    (vega,) = re.findall(r"<script>([^<].{500000,}?)</script>", text, re.DOTALL)
    assert vega.count("window.vegaEmbed=") == 1
    assert len(re.findall(r"<script\b", text.replace(vega, ""))) == 3


def test_readings_say_what_the_tables_hold(result: Result) -> None:
    readings = {name: figure.reading for name, figure in report.figures(result).items()}
    heads = result.tables["heads"]
    lowest = heads.sort_values("form1_within").iloc[0]
    where = f"layer {lowest['layer']}, head {lowest['head']} (r = {lowest['form1_within']:.3f})"
    assert f"lowest in {where}" in readings["position-heads"]
    queries = result.tables["massive_heads"].query("tensor == 'Q'")
    assert f"Q {100 * (queries['max_ratio'] > 5).sum() / len(queries):.0f} % of 270" in readings["massive-heads"]
    ranks = heads[["predicted", "form1_within"]].rank().corr().iloc[0, 1]
    assert f"ρ = {ranks:.2f} and" in readings["position-predicted"]


def test_figures_stand_alone() -> None:
    small = synthetic.result(layers=3, heads=2, kv_heads=1, head_dim=32)
    for figure in report.figures(small).values():
        svg = vl_convert.vegalite_to_svg(figure.chart.to_dict())
        assert svg.startswith("<svg")
        assert svg.count("<path") > 5


def test_no_model_library_is_imported() -> None:
    code = "import sys, rotoscope.report; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_embedded_json_keeps_its_meaning() -> None:
    value = {"<a>&": ["</script>", "\u2028\u2029", 'quote " and \\', None, 1.5]}
    text = inert(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_columns_are_rounded_and_missing_is_null() -> None:
    rows = [{"a": 0.123456, "b": float("nan"), "c": [1.00004, 2]}, {"a": 98765.4, "b": float("inf")}]
    assert columns(rows) == {"a": [0.1235, 98770], "b": [None, None], "c": [[1, 2], None]}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (pd.NA, "–"),
        (0, "0"),
        (0.9698765, "0.970"),
        (-0.5, "−0.500"),
        (12.3456, "12.35"),
        (151.37, "151.4"),
        (2412, "2,412"),
        (1.2e-7, "1.20 × 10⁻⁷"),
        (float("inf"), "∞"),
    ],
)
def test_numbers_for_readers(value: float | None, text: str) -> None:
    assert number(value) == text
