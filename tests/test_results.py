"""Results on disk: what is saved is read back, what is half-written never counts, what contradicts is refused."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest

from rotoscope.errors import BadInput
from rotoscope.results import CATALOGUE, Claim, Result, merge, not_tested, provenance, read, write_atomic

CLAIMS = ["P1", "P2", "P3", "P4", "P5", "P6", "M1", "M2", "M3", "M4", "M5", "M6", "D1", "D2", "D3", "D4"]


def claim(claim_id: str, **changes: object) -> Claim:
    paper, statement = CATALOGUE[claim_id]
    return Claim(claim_id, paper, statement, **({"verdict": "holds"} | changes))  # type: ignore[arg-type]


@pytest.fixture
def result() -> Result:
    heads = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 0], "form1": [0.5, math.nan, 0.25], "position": "rotary"})
    return Result(
        tables={"heads": heads, "texts": pd.DataFrame({"text": ["a"], "start": ["<script>\u4e2d"]})},
        claims=[
            claim("M1", verdict="fails", value=np.float32(0.5), interval=(0.25, 0.75), null=math.inf, detectable=0.1),
            claim("P1", value=math.nan, interval=(math.nan, math.nan), n="3 heads"),
        ],
        headline={"mean r": np.float64(0.9), "heads": np.int64(3), "nothing": math.nan, "counts": np.arange(2)},
        provenance=provenance(seed=3, command="rotoscope audit", model="demo \ud800", first_token_ids=[1, 2]),
        decisions=[{"what": "position 0", "choice": "dropped"}],
    )


def test_a_saved_result_is_read_back_whole(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "new" / "run")
    again = read(tmp_path / "new" / "run")
    assert set(again.tables) == {"heads", "texts"}
    for name, table in result.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table)
    assert [c.id for c in again.claims] == CLAIMS
    m1 = again.claims[CLAIMS.index("M1")]
    assert m1 == claim("M1", verdict="fails", value=0.5, interval=(0.25, 0.75), detectable=0.1)
    assert isinstance(m1.interval, tuple)
    assert again.claims[0] == claim("P1", n="3 heads")
    assert again.headline == {"mean r": 0.9, "heads": 3, "nothing": None, "counts": [0, 1]}
    assert again.decisions == result.decisions
    assert again.provenance["seed"] == 3
    assert again.provenance["first_token_ids"] == [1, 2]


def test_summary_satisfies_the_published_schema(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    schema = json.loads((files("rotoscope") / "schema" / "summary-1.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)

    def no_constants(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"), parse_constant=no_constants)
    validator.validate(summary)
    # The schema says something: each of these is refused, and it names every key that a claim has.
    assert set(schema["$defs"]["claim"]["properties"]) == set(summary["claims"][0])
    for key, value in {"verdict": "maybe", "interval": [0.1], "value": "0.5", "id": "X1"}.items():
        broken = json.loads(json.dumps(summary))
        broken["claims"][0][key] = value
        assert not validator.is_valid(broken), key


def test_scorecard_lists_every_claim_in_order(result: Result) -> None:
    card = result.scorecard()
    assert [c.id for c in card] == CLAIMS
    assert [c.id for c in card if c.verdict != "not tested"] == ["P1", "M1"]
    assert {c.reason for c in card if c.verdict == "not tested"} == {"not run"}
    assert [CATALOGUE[i][0] for i in ("P1", "M1", "D1")] == [
        "Han & Ji 2025",
        "Jin et al. 2025",
        "Ben-Artzy & Schwartz 2024",
    ]


@pytest.mark.parametrize("content", [None, "", "[]", '{"schema": 1}', '{"schema": 99}', '{"schema": 1, "claims": [1]}'])
def test_what_is_no_run_is_refused_in_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(BadInput) as refusal:
        read(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_damaged_table_is_refused_in_one_line(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    table = tmp_path / "tables" / "heads.parquet"
    table.write_bytes(table.read_bytes()[:100])
    with pytest.raises(BadInput, match="run it again"):
        read(tmp_path)


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]
    with path.open() as reader:
        write_atomic(path, b"newer")
        assert reader.read() == "old"
    assert path.read_bytes() == b"newer"


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_an_unwritable_place_is_bad_input(result: Result, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"cannot write .*--out"):
        result.save(tmp_path / "file")


def test_merge_joins_what_studies_say_about_the_same_layers() -> None:
    keys = {"layer": [0, 1], "position": ["rotary", "none"]}
    texts = pd.DataFrame({"text": [0], "sha256": ["x"]})
    position = Result(
        {"layers": pd.DataFrame({**keys, "form1": [0.5, math.nan]}), "texts": texts, "items": pd.DataFrame({"n": [1]})},
        [claim("P1"), not_tested("M1", "not run")],
        {"r": 1.0},
        {"seed": 0, "time": "first"},
        [{"a": "b"}],
    )
    massive = Result(
        {
            "layers": pd.DataFrame({**keys, "ratio": [7.0, 8.0]}),
            "texts": texts.copy(),
            "items": pd.DataFrame({"n": [1, 2]}),
        },
        [claim("M1", value=0.5), not_tested("P1", "not run")],
        {"share": 2.0},
        {"seed": 0, "time": "second"},
        [{"a": "b"}, {"c": "d"}],
    )
    both = merge([position, massive])
    expected = pd.DataFrame({**keys, "form1": [0.5, math.nan], "ratio": [7.0, 8.0]})
    pd.testing.assert_frame_equal(both.tables["layers"], expected)
    pd.testing.assert_frame_equal(both.tables["texts"], texts)
    assert both.tables["items"]["n"].tolist() == [1, 1, 2]
    assert both.claims == [claim("P1"), claim("M1", value=0.5)]
    assert both.headline == {"r": 1.0, "share": 2.0}
    assert both.provenance == {"seed": 0, "time": "first"}
    assert both.decisions == [{"a": "b"}, {"c": "d"}]


def test_merge_refuses_contradictions() -> None:
    one = Result({"layers": pd.DataFrame({"layer": [0], "position": ["rotary"], "a": [1]})})
    two = Result({"layers": pd.DataFrame({"layer": [0], "position": ["none"], "b": [1]})})
    with pytest.raises(ValueError, match="layers"):
        merge([one, two])
    with pytest.raises(ValueError, match="P1"):
        merge([Result(claims=[claim("P1", value=0.1)]), Result(claims=[claim("P1", value=0.2)])])


def test_results_wait_for_no_torch() -> None:
    code = (
        "import sys; from rotoscope.results import provenance; from rotoscope.stats import intervals; "
        "import rotoscope.engine; made = provenance(seed=1); assert 'torch' not in sys.modules; "
        "print(made['versions']['torch'], made['command'])"
    )
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", code, "x y"], capture_output=True, text=True, cwd=root, check=True)
    import torch

    assert ran.stdout.split(maxsplit=1) == [torch.__version__, "-c 'x y'\n"]
