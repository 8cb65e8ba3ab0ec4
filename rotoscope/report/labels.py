"""Tasks and disruption arms in words, and the order in which they are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pandas as pd

from rotoscope.report.text import percent

KNOWLEDGE = {"parametric": "parametric", "contextual": "contextual", "reasoning": "reasoning"}
"""Where a task's answer is, in the order shown."""

MANIPULATIONS = {
    "noise": "noise",
    "noise-but-0": "noise, position 0 exempt",
    "shuffle": "shuffle",
    "freeze": "freeze",
    "skip": "skip attention",
}
"""What is done to the previous tokens, in the order shown."""

VARIANTS = {"rope": "RoPE", "learned": "learned table", "alibi": "ALiBi", "none": "no positions"}
"""How positions enter the matched controls, in the order shown."""

PERTURBATIONS = {
    "swap-adjacent": "swap neighbours",
    "swap-arbitrary": "swap any tokens",
    "jitter-adjacent": "jitter position ids, by 1",
    "jitter-arbitrary": "jitter position ids, as far as swaps",
    "rotate-arbitrary": "turn Q and K as far, layer by layer",
}
"""What is done to a share of the tokens, in the order shown."""

REPLACEMENTS = {
    "clean": "the model as it is",
    "full": "real logits (check)",
    "form1": "form 1: f + g",
    "form1-centred": "form 1, centred by query",
    "form2": "form 2: a + b + c",
    "form2-causal": "◇ form 2, fitted to the text itself",
    "permuted": "◆ form-1 residual permuted",
    "f": "f alone (position)",
    "g": "g alone (content)",
    "form1-random-means": "form 1, means of random weights",
}
"""What stands in place of the logits, in the order shown."""

EXTENSIONS = {
    "plain": "plain RoPE",
    "lambda": "Λ-mask",
    "cap": "distance cap",
    "lambda+cap": "Λ-mask + distance cap",
    "dynamic-ntk": "dynamic NTK",
    "yarn": "YaRN",
    "reference": "reference: the last tokens alone",
}
"""What is done about lengths past the trained one, in the order shown."""

QUANTITIES = {
    "form1_within": "form 1 r, within query",
    "residual": "form 1 residual",
    "massive_energy_q": "massive energy share, Q",
    "massive_energy_k": "massive energy share, K",
    "entropy": "attention entropy (nats)",
    "sink_mass": "attention to position 0",
    "freeze_damage": "freeze damage",
    "skip_damage": "skip damage",
    "freeze_step": "freeze damage, this layer’s part",
    "skip_step": "skip damage, this layer’s part",
}
"""What is compared over layers, in the order shown."""

METHODS = {
    "rtn-int8": "RTN int8",
    "rtn-int4": "RTN int4",
    "rtn-int3": "RTN int3",
    "nf4": "nf4",
    "packed-int4": "RTN int4, packed",
    "awq": "AWQ int4",
    "w8a8": "W8A8",
    "smoothquant": "SmoothQuant W8A8",
    "kv-fp8": "KV fp8",
    "kv-int8": "KV int8",
    "kv-int4": "KV int4",
    "kv-int3": "KV int3",
    "kv-int2": "KV int2",
    "kv-int2-channel": "KV int2, keys per channel",
}
"""Quantization methods, in the order shown; others stand by their own names."""

QUANTIZED = {"weights": "weights", "activations": "weights and activations", "cache": "KV cache"}
"""What a method quantizes, in the order shown."""

PROTECTED = {
    "plain": "nothing kept",
    "massive": "massive channels kept",
    "random": "◆ random channels kept",
    "layers": "massive layers at 8 bits",
    "random-layers": "◆ random layers at 8 bits",
}
"""What is kept in higher precision, in the order shown."""

EFFECTS = {
    "massive_q": "heads with massive Q",
    "massive_k": "heads with massive K",
    "massive_v": "heads with massive V",
    "form1_within": "form 1 r, within query",
}
"""What is measured again under quantization, in the order shown."""

CONTROL, SHOWN = "◆", "◇"
"""Marks of the change-matched control, and of arms that are shown but decide no verdict."""

_SELECTIONS = {
    "second": "second-largest dim",
    "smallest": "smallest dims",
    "random": "random dims",
    "change-matched": "random dims, equal change",
    "energy-matched": "random dims, equal energy",
}
_POSITIONS = {"all": "all positions", "all-but-0": "all but position 0", "only-0": "only position 0"}


def broken(field: str) -> str:
    """A Vega expression that shows an arm's words in `field` on two lines, broken before the arrow."""
    return f"indexof({field}, ' → ') < 0 ? {field} : [split({field}, ' → ')[0], '→ ' + split({field}, ' → ')[1]]"


def within(low: float, high: float) -> str:
    """A 95 % interval of a share, in words: `95 % −2 % to 18 %`."""
    return f"95 % {percent(low)} to {percent(high)}".replace("-", "−")


def signed(value: float, low: float, high: float, digits: int = 2) -> str:
    """A difference with its 95 % interval, in words: `+1.60 (95 % +0.90 to +2.30)`."""
    # Adding 0 leaves no negative zero.
    shown = [f"{round(number, digits) + 0.0:+.{digits}f}" for number in (value, low, high)]
    return f"{shown[0]} (95 % {shown[1]} to {shown[2]})".replace("-", "−")


def sizes(table: pd.DataFrame) -> str:
    """How many items a table's rows rest on: `60 items a task`, or the range where tasks differ."""
    low, high = int(table["n"].min()), int(table["n"].max())
    return f"{low} items a task" if low == high else f"{low} to {high} items a task"


def worded(table: pd.DataFrame, column: str, words: Mapping[str, str]) -> pd.DataFrame:
    """The table with `column` in words (`words`) and its place in line (`rank`), sorted by it.

    The order is that of the words, then of the names that have none, which stand as they are.
    """
    known = {**words, **{str(name): str(name) for name in table[column] if name not in words}}
    order = list(known)
    names = table[column].astype(str)
    return table.assign(words=names.map(known), rank=names.map(order.index)).sort_values("rank", kind="stable")


def task_words(task: str, variant: str, *, filled: bool = False) -> str:
    """`capitals`, `filler=48` as `capitals, filler 48`; `filled` says that no variant means no filler."""
    said = [part.replace("=", " ", 1) for part in variant.split(":") if part]
    if filled and filler(variant) == 0 and "filler" not in variant:
        said.insert(0, "filler 0")
    return ", ".join([re.sub(r"[-_]", " ", task), *said])


def filler(variant: str) -> int:
    """Tokens of filler that a variant has."""
    found = re.search(r"\bfiller=(\d+)", variant)
    return int(found.group(1)) if found else 0


def named(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its tasks in words (`label`) and their place in line (`place`).

    The order is that of the kinds of knowledge where the table knows them, then of the tasks as they come, then of
    the numbers in their variants: filler 0, 48, 144.
    """
    table = table.assign(variant=table["variant"].fillna("").astype(str))
    tasks = table[["task", "variant"]].drop_duplicates()
    behind = set(tasks.loc[tasks["variant"].str.contains(r"\bfiller="), "task"])
    first = {task: place for place, task in enumerate(dict.fromkeys(table["task"]))}
    kinds = list(KNOWLEDGE)
    knowledge = table.get("knowledge", pd.Series("", index=table.index))
    keys = [
        (kinds.index(kind) if kind in kinds else len(kinds), first[task], _numbers(variant), variant)
        for kind, task, variant in zip(knowledge, table["task"], table["variant"], strict=True)
    ]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    pairs = zip(table["task"], table["variant"], strict=True)
    labels = [task_words(str(task), variant, filled=task in behind) for task, variant in pairs]
    return table.assign(label=labels, place=[places[key] for key in keys])


def arms(disrupt: pd.DataFrame) -> dict[str, str]:
    """Arm to words, in the order of the table, controls and unjudged arms marked and last.

    Parameters
    ----------
    disrupt
        Rows with `arm`, `targets`, `selection`, `replacement`, `positions` and `judged`.
    """
    rows = disrupt.drop_duplicates("arm").set_index("arm")
    words = {str(arm): "clean" if arm == "clean" else _words(row) for arm, row in rows.iterrows()}
    counts = pd.Series(list(words.values())).value_counts()
    # Axes that the words leave out (layers, phase, seed) are in the arm's own name.
    unique = {arm: text if counts[text] == 1 else f"{text} ({arm})" for arm, text in words.items()}
    return dict(sorted(unique.items(), key=lambda item: _rank(item[1])))


def main_arm(disrupt: pd.DataFrame) -> str | None:
    """The arm that claim M4 is about: top-1 of Q and K, token mean, position 0 exempt; else the first one judged."""
    rows = disrupt[(disrupt["arm"] != "clean") & disrupt["judged"].astype(bool)]
    named = {"targets": "QK", "selection": "top-1", "replacement": "token-mean", "positions": "all-but-0"}
    meant = rows[(rows[list(named)] == pd.Series(named)).all(axis=1)]
    chosen = meant if not meant.empty else rows
    return None if chosen.empty else str(chosen["arm"].iloc[0])


def control_arm(disrupt: pd.DataFrame) -> str | None:
    """The change-matched control, the one with position 0 exempt where there are several."""
    rows = disrupt[disrupt["selection"] == "change-matched"]
    meant = rows[rows["positions"] == "all-but-0"]
    chosen = meant if not meant.empty else rows
    return None if chosen.empty else str(chosen["arm"].iloc[0])


def _words(row: pd.Series) -> str:
    selection = str(row["selection"])
    if selection.startswith("top-"):
        count = selection.removeprefix("top-")
        what = "largest dim" if count == "1" else f"{count} largest dims"
    elif selection.startswith("lambda-"):
        what = f"dims above λ = {selection.removeprefix('lambda-')}"
    else:
        what = _SELECTIONS.get(selection, selection)
    where = _POSITIONS.get(str(row["positions"]), str(row["positions"]))
    replacement = str(row["replacement"]).replace("-", " ")
    text = f"{' + '.join(str(row['targets']))}: {what} → {replacement}, {where}"
    if selection == "change-matched":
        return f"{CONTROL} {text}"
    return text if bool(row["judged"]) else f"{SHOWN} {text}"


def _rank(words: str) -> int:
    marks = {CONTROL: 2, SHOWN: 3}
    return 0 if words == "clean" else marks.get(words[0], 1)


def _numbers(variant: str) -> tuple[float, ...]:
    numbers = tuple(float(text) for text in re.findall(r"\d+(?:\.\d+)?", variant))
    return numbers or (-math.inf,)
