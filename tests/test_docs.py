"""The guides' examples run as they stand, and a run has the tables and columns that the schema page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small import characters
from tiny import tiny

import rotoscope as rs
from rotoscope.studies import Options, conduct, depth, massive

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = [
    pytest.param(name, example, id=f"{name}-{i}")
    for name in ("tasks", "interventions", "controls", "quantization")
    for i, example in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text("utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_examples_run(name: str, example: str, demo: rs.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rs, "load", lambda source: demo)
    fewer = re.sub(r"\b(n|limit)=20\b", r"\1=4", example)
    names: dict[str, object] = {"__name__": name}  # which dataclasses ask for
    exec(compile(fewer, f"docs/{name}.md", "exec", dont_inherit=True), names)
    assert names["rs"] is rs


def documented() -> dict[str, list[str]]:
    """Columns by table, from the schema page's lists of them."""
    found = {}
    for line in (DOCS / "schema.md").read_text("utf-8").split("## Tables")[1].splitlines():
        if row := re.fullmatch(r"\| `(\w+)` \| [^|]+ \| ([^|]+) \|", line):
            found[row[1]] = [name.strip() for name in re.sub(r"\([^()]*\)", "", row[2]).split(",")]
    return found


def test_a_full_run_has_the_columns_that_the_schema_page_says() -> None:
    lm = rs.wrap(tiny("llama", max_position_embeddings=512), characters())
    few = Options("full", texts=1, tokens=60, limit=3, tasks=("key_value:pairs=2",), disrupt=("top-2",))
    tables = conduct([massive, depth], lm, few).tables
    told = documented()
    for name in (
        "disrupt", "items", "outputs", "disrupt_attention", "disrupt_layers", "dose", "disrupt_additivity", "depth",
        "safe_depth", "swap_counts", "depth_cost",
    ):  # fmt: skip
        assert sorted(tables[name].columns) == sorted(told[name]), name
    assert set(tables) <= set(told)
