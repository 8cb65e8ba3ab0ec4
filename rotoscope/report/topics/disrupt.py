"""The causal half of massive: what is lost when massive values are disrupted."""

from __future__ import annotations

import pandas as pd

from rotoscope.report.figure import Cell, Grid, Listing, Topic, present
from rotoscope.report.labels import arms, named
from rotoscope.report.text import NOTHING
from rotoscope.report.topics import disrupt_attention, disrupt_curves, disrupt_matrix
from rotoscope.results import Result

_RIGHT, _WRONG = "✓", "✗"


def outputs(result: Result) -> Grid | None:
    """One row an item: the prompt's end, the gold answer, and what each arm answered."""
    table = named(result.tables["outputs"])
    words = arms(result.tables["disrupt"]) if present(result, "disrupt") else {}
    there = set(table["arm"])
    order = [arm for arm in words if arm in there]
    order += [arm for arm in dict.fromkeys(table["arm"]) if arm not in words]
    order.sort(key=lambda arm: arm != "clean")
    rows = []
    for (place, _), own in table.groupby(["place", "id"], sort=True):
        first = own.iloc[0]
        answers = own.drop_duplicates("arm").set_index("arm")
        cells = [Cell(first["label"], float(place)), Cell(f"…{_line(first['prompt'])}"), Cell(_line(first["gold"]))]
        cells += [_answer(answers.loc[arm]) if arm in answers.index else Cell(NOTHING) for arm in order]
        rows.append(cells)
    names = ["task", "end of the prompt", "gold", *(words.get(arm, arm) for arm in order)]
    return Grid(names, rows, [False] * len(names)) if rows else None


def _answer(row: pd.Series) -> Cell:
    right = float(row["correct"]) >= 0.5
    return Cell(f"{_RIGHT if right else _WRONG} {_line(row['answer'])}", float(row["correct"]))


def _line(text: object) -> str:
    """A text on one line, its line breaks visible."""
    return str(text).strip().lstrip("…").replace("\n", " ↵ ")


TOPIC = Topic(
    "disrupt",
    "Disrupt: what breaks without massive values",
    "The same items are answered by the untouched model (clean) and with some Q, K or V dims replaced in every head "
    "and layer, beside controls: random dims that change the values as much, and position 0 exempt or alone, since "
    "disturbing the attention sink hurts everything.",
    (
        disrupt_matrix.CHART,
        disrupt_matrix.TABLE,
        disrupt_curves.SELECTIVITY,
        disrupt_curves.DOSE,
        disrupt_curves.LAYERS,
        disrupt_attention.ATTENTION,
        disrupt_attention.ADDITIVITY,
        Listing(
            "disrupt-outputs",
            "Answers, clean against disrupted",
            f"Greedy answers to the same prompts, whatever the task is scored by. {_RIGHT} begins with an accepted "
            f"answer, {_WRONG} does not; ↵ is a line break. Click an arm to sort its wrong answers to the top.",
            ("outputs",),
            outputs,
        ),
    ),
)
