"""Quantization methods as figures show them: in words, in line, each with its own look; and the table of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from rotoscope.report.figure import Cell, Grid, Listing
from rotoscope.report.labels import METHODS, QUANTIZED, named, worded
from rotoscope.report.series import Look, Series
from rotoscope.report.style import SHAPES
from rotoscope.report.text import NOTHING, fixed, layers, percent
from rotoscope.results import Result

REFERENCE = "reference"
LOSS = 0.05
"""Nats a token up to which harm is called minor here, as in claim P5."""

_COLOURS = {"weights": "#0072b2", "activations": "#d55e00", "cache": "#009e73"}
_OTHER = "#5b6675"
_GRID_BITS = 4
_MEGABYTE = 1e6


def having(result: Result, name: str, needed: Sequence[str], more: Sequence[str] = ()) -> pd.DataFrame:
    """These columns of a table, in rows that have all that is needed; no rows where one of them is absent.

    Parameters
    ----------
    needed
        Columns without a value in which a row is left out.
    more
        Columns that are NaN where the table has none; `variant` is empty there.
    """
    table = result.tables.get(name, pd.DataFrame())
    if not set(needed) <= set(table):
        return pd.DataFrame(columns=[*needed, *more])
    found = table.dropna(subset=list(needed)).reindex(columns=[*needed, *more])
    return found if "variant" in table else found.assign(**dict.fromkeys({"variant"} & {*more}, ""))


def in_line(table: pd.DataFrame, kinds: pd.Series) -> pd.DataFrame:
    """The table with its methods in words (`words`) and their place in line (`rank`): by kind, then known ones first.

    Parameters
    ----------
    kinds
        What each method quantizes, by its name.
    """
    known, order = list(METHODS), list(QUANTIZED)

    def place(name: str) -> tuple[int, int]:
        # A width that only something was protected from has no row that says its kind.
        kind = kinds.get(name, ("cache" if name.startswith("kv-") else "weights") if name in known else "")
        return order.index(kind) if kind in order else len(order), known.index(name) if name in known else len(known)

    names = sorted(dict.fromkeys(table["method"].astype(str)), key=place)
    return worded(table, "method", {name: METHODS.get(name, name) for name in names})


def measured_methods(result: Result, needed: Sequence[str], more: Sequence[str] = ()) -> pd.DataFrame:
    """Rows of `quantization` but those of the model as it is, in words and in line."""
    table = having(result, "quantization", ["method", *needed], ["kind", *more])
    return in_line(table[table["method"] != REFERENCE], kinds(result))


def kinds(result: Result) -> pd.Series:
    """What each method quantizes, by its name; empty where the run does not say."""
    table = having(result, "quantization", ["method", "kind"])
    return table.drop_duplicates("method").set_index("method")["kind"]


def series(table: pd.DataFrame, of: pd.Series) -> Series:
    """A look for each method: the colour says what it quantizes, the shape tells it from others of its kind.

    Parameters
    ----------
    of
        What each method quantizes, by its name.
    """
    looks = {}
    each = table.drop_duplicates("words")
    for kind, own in each.groupby([str(of.get(name, "")) for name in each["method"]], sort=False):
        for i, words in enumerate(own["words"]):
            looks[words] = Look(_COLOURS.get(kind, _OTHER), SHAPES[i % len(SHAPES)])
    return Series.of(table, looks)


def span(low: float, high: float, form: str) -> str:
    """A 95 % interval for hovering, or a dash where there is none."""
    if pd.isna(low) or pd.isna(high):
        return NOTHING
    return f"{low:{form}} to {high:{form}}".replace("-", "−").replace("%", " %")


def caution(result: Result) -> str:
    """What must be said of 4-bit methods on a model whose weights lie on a grid of that width already."""
    table = having(result, "quantization_grid", ["layer"], ["bits"])
    share = float((_bits(table) <= _GRID_BITS).mean()) if len(table) else 0.0
    if share <= 0.5:
        return ""
    return (
        f" Mind: {percent(share)} of the linear layers lie on a grid of {_GRID_BITS} bits or fewer already, so how "
        f"{_GRID_BITS}-bit weights rank here says how two grids fit, and no more."
    )


def grid(result: Result) -> Grid | None:
    """One row a method: what it is, what it costs and what it keeps."""
    columns = ["bits", "share_changed", "bytes", "dnll", "dnll_low", "dnll_high", "kl", "kl_low", "kl_high", "note"]
    tasks = ["task", "variant", "knowledge", "accuracy", "retention", "low", "high", "items"]
    table = having(result, "quantization", ["method"], ["kind", *columns, *tasks])
    if table.empty:
        return None
    table = in_line(table, kinds(result))
    table["rank"] = table["rank"].where(table["method"] != REFERENCE, -1)
    asked = table[table["task"].notna() & (table["task"] != "")]
    asked = named(asked) if len(asked) else asked.assign(label="", place=0)
    labels = asked.sort_values("place")["label"].drop_duplicates().tolist()
    rows = []
    for rank, own in table.sort_values("rank", kind="stable").groupby("rank"):
        row = own.iloc[0]
        reference = row["method"] == REFERENCE
        answers = asked[asked["method"] == row["method"]].drop_duplicates("label").set_index("label")
        rows.append(
            [
                Cell("the model as it is" if reference else str(row["words"]), float(rank)),
                Cell(NOTHING if reference else QUANTIZED.get(str(row["kind"]), str(row["kind"]))),
                _cell(row["bits"], fixed(row["bits"], 2)),
                _cell(row["share_changed"], percent(row["share_changed"])),
                _cell(row["bytes"], fixed(row["bytes"] / _MEGABYTE, 1)),
                _cell(row["dnll"], fixed(row["dnll"], 4), (row["dnll_low"], row["dnll_high"]), 4),
                _cell(row["kl"], fixed(row["kl"], 4), (row["kl_low"], row["kl_high"]), 4),
                *(_kept(answers.loc[label]) if label in answers.index else Cell("") for label in labels),
                Cell(str(row["note"]) if pd.notna(row["note"]) else ""),
            ]
        )
    names = ["method", "quantizes", "bits", "changed", "MB", "ΔNLL", "KL", *labels, "note"]
    return Grid(names, rows, [False, False, *[True] * (len(names) - 3), False])


def low_bit(result: Result) -> Grid | None:
    """One row a kind of linear layer: how few values occur in its blocks."""
    table = having(result, "quantization_grid", ["layer", "name", "distinct"], ["bits"])
    if table.empty:
        return None
    table = table.assign(shape=[re.sub(r"\.\d+\.", ".*.", str(name)) for name in table["name"]], bits=_bits(table))
    rows = []
    for shape, own in table.groupby("shape", sort=False):
        most, least = int(own["distinct"].max()), int(own["distinct"].min())
        bits = float("nan") if own["bits"].isna().any() else float(own["bits"].max())
        rows.append(
            [
                Cell(str(shape)),
                Cell(layers(int(own["layer"].min()), int(own["layer"].max())), float(own["layer"].min())),
                Cell(f"{most}" if most == least else f"{least}-{most}", float(most)),
                Cell("none" if pd.isna(bits) else f"{bits:.0f} bits", 99.0 if pd.isna(bits) else bits),
            ]
        )
    return Grid(["linear layer", "layers", "most values in a block", "grid"], rows, [False, False, True, True])


def _bits(table: pd.DataFrame) -> pd.Series:
    """The width of grids as floats; NaN where there is none."""
    return pd.to_numeric(table["bits"]).astype("Float64").astype(float)


def _cell(value: float, text: str, ends: tuple[float, float] | None = None, digits: int = 2) -> Cell:
    # A blank sorts last.
    if pd.isna(value):
        return Cell("")
    below = ""
    if ends and not any(map(pd.isna, ends)):
        # Adding 0 leaves no negative zero.
        below = f"[{', '.join(fixed(round(end, digits) + 0.0, digits) for end in ends)}]"
    return Cell(text, float(value), below)


def _kept(row: pd.Series) -> Cell:
    if pd.isna(row["retention"]):
        return Cell("" if pd.isna(row["accuracy"]) else f"accuracy {percent(row['accuracy'])}")
    ends = span(row["low"], row["high"], ".0%")
    return Cell(percent(row["retention"]), float(row["retention"]), "" if ends == NOTHING else ends)


TABLE = Listing(
    "quantization-table",
    "All methods in numbers",
    "Bits: stored for a weight, or for a value in the cache, scales and zero points included. Changed: the share of "
    "the decoder’s parameters that really are other numbers. MB: size of the whole model. "
    "ΔNLL: more negative log-likelihood than the model as it is, nats a token. KL: of next-token distributions from "
    "those of the model as it is, nats. Tasks: share of the accuracy above chance that is kept; “accuracy” in its "
    "place where the model itself is at chance, so that nothing can be lost. Small: 95 % intervals.",
    ("quantization",),
    grid,
)
GRID = Listing(
    "quantization-grid",
    "Do the weights lie on a low-bit grid already?",
    "How many different values occur in a block of 32 neighbours along a linear layer’s input, at most. Up to 16 "
    "everywhere: the model was stored in 4 bits before, and 4-bit methods on it are not comparable. About 32: it was "
    "not.",
    ("quantization_grid",),
    low_bit,
)
