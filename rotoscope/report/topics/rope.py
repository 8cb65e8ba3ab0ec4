"""With and without RoPE: what was measured of the matched controls while they were trained."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.controls.sets import upper_half
from rotoscope.report.figure import Drawn, Plot, Topic
from rotoscope.report.labels import signed
from rotoscope.report.series import Measure, Series, rule, spread
from rotoscope.report.style import INK, choice, tensors, tip
from rotoscope.report.text import KINDS, fixed, joined, percent
from rotoscope.report.topics import controls
from rotoscope.report.topics.variants import LAMBDA, LOOKS, controlled, seeded
from rotoscope.results import Result

PARTS = {"upper": "upper half", "all": "all"}
_TASKS = {
    "key_value": "key-value accuracy (in the prompt)",
    "known_values": "known-value accuracy (in the weights)",
    "passkey": "passkey accuracy (in the prompt)",
}
_MEASURES = {
    "form1__both_means_removed": "form 1, means removed",
    "form1_within": KINDS["form1_within"],
    "form2_within": KINDS["form2_within"],
    "form1__no_means_equal_energies": "form 1, no means, equal energies",
    "causal_within": KINDS["causal_within"],
}
_TENSOR_WIDTH = 268


def ratios(result: Result) -> Drawn | None:
    """Mean of each head's largest ratio against training step, one panel a tensor."""
    every = controlled(result, "control_ratios", "max_ratio")
    if every.empty:
        return None
    table = pd.concat([_by_step(some).assign(part=part) for part, some in _parts(every).items()])
    top = max(LAMBDA, float(table["high"].max()))
    tooltip = [
        tip("words", "positions"),
        tip("tensor", "tensor"),
        tip("step", "training step", ",d"),
        tip("value", "largest ratio, mean over heads", ".3f"),
        tip("low", "lowest layer of a seed", ".3f"),
        tip("high", "highest layer of a seed", ".3f"),
        tip("massive", f"heads with a dim above {LAMBDA:g}", ".1%"),
        tip("n", "heads × seeds"),
        tip("seeds", "seeds"),
    ]
    part = choice("part", "layers", PARTS)
    panels: list[alt.LayerChart | alt.FacetChart] = []
    for tensor in tensors(table):
        own = table[table["tensor"] == tensor]
        first = not panels
        scale = alt.Scale(domain=[1, 1.04 * top], nice=False, zero=False)
        axis = Measure("largest dim / mean of its head" if first else None, scale)
        limit = rule(own, y=alt.datum(LAMBDA))
        name = limit.mark_text(text=f"λ = {LAMBDA:g}", align="left", dx=4, dy=-6, color=INK).encode(x=alt.value(0))
        marks = Series.of(table, LOOKS).lines(steps(table), "value", axis, tooltip, ("low", "high"))
        marks = [mark.transform_filter("datum.part == part") for mark in marks]
        panels.append(
            alt.layer(limit, name, *marks, data=own).properties(width=_TENSOR_WIDTH, height=230, title=tensor)
        )
    return Drawn(_concentrated(every), alt.hconcat(*panels, spacing=24).add_params(part))


def gaps(result: Result) -> Drawn | None:
    """By how much RoPE's ratio exceeds each other variant's, with intervals."""
    table = controlled(result, "control_gaps", "gap")
    if table.empty:
        return None
    table = table.assign(seeds=table["seeds"].astype(str))
    which = {seeds: "all" if seeds == "all" else f"only {seeds}" for seeds in dict.fromkeys(table["seeds"])}
    tooltip = [
        tip("words", "RoPE less"),
        tip("tensor", "tensor"),
        tip("step", "training step", ",d"),
        tip("gap", "gap", "+.3f"),
        tip("low", "95 % low", "+.3f"),
        tip("high", "95 % high", "+.3f"),
        tip("rope", "ratio with RoPE", ".3f"),
        tip("other", "ratio without", ".3f"),
        tip("massive_rope", f"heads above {LAMBDA:g} with RoPE", ".1%"),
        tip("massive_other", f"heads above {LAMBDA:g} without", ".1%"),
        tip("heads", "RoPE heads"),
    ]
    seeds = choice("seeds", "seeds", which)
    # What one layer of one seed leaves unknown would hide everything else.
    domain = [min(-0.5, float(table["gap"].min()) - 0.5), max(0.5, float(table["gap"].max()) + 1)]
    panels: list[alt.LayerChart | alt.FacetChart] = []
    for tensor in tensors(table):
        own = table[table["tensor"] == tensor]
        title = ["ratio with RoPE", "− ratio without"] if not panels else None
        axis = Measure(title, alt.Scale(domain=domain, clamp=True))
        series = Series.of(table, LOOKS, "RoPE less")
        marks = series.lines(steps(table), "gap", axis, tooltip, ("low", "high"))
        marks = [mark.transform_filter("datum.seeds == seeds") for mark in marks]
        panels.append(
            alt.layer(rule(own, y=alt.datum(0)), *marks, data=own).properties(
                width=_TENSOR_WIDTH, height=200, title=tensor
            )
        )
    return Drawn(_ahead(table), alt.hconcat(*panels, spacing=24).add_params(seeds))


def losses(result: Result) -> Drawn | None:
    """Held-out loss and accuracies against training step, one line a model."""
    table = controlled(result, "control_losses", "loss")
    if table.empty:
        return None
    tasks = [name for name in _TASKS if name in table and table[name].notna().any()]
    tooltip = [
        tip("words", "positions"),
        tip("seed", "seed"),
        tip("step", "training step", ",d"),
        tip("loss", "held-out loss (nats a token)", ".4f"),
        *(tip(name, _TASKS[name], ".3f") for name in tasks),
        tip("cpu_seconds", "CPU seconds so far", ",.0f"),
    ]
    panels = []
    for name in ["loss", *tasks]:
        scale = alt.Scale(zero=False) if name == "loss" else alt.Scale(domain=[0, 1])
        axis = Measure(None, scale, alt.Axis(format=".1f" if name == "loss" else "%", tickCount=5))
        marks = Series.of(table, LOOKS).lines(steps(table), name, axis, tooltip, detail=["seed:N"])
        title = "held-out loss (nats a token)" if name == "loss" else _TASKS[name]
        panels.append(alt.layer(*marks, data=table).properties(width=415, height=170, title=title))
    return Drawn(_learned(table, tasks), alt.concat(*panels, columns=2, spacing=24))


def additivity(result: Result) -> Drawn | None:
    """Mean r of heads against training step, for each kind of r that some variant has."""
    table = result.tables["control_additivity"]
    measures = {name: words for name, words in _MEASURES.items() if name in table and table[name].notna().any()}
    if not measures:
        return None
    parts = []
    for name in measures:
        own = controlled(result, "control_additivity", name)
        found = spread(own, ["words", "rank", "step"], name, ["seed", "layer"])
        parts.append(found.assign(measure=name))
    long = pd.concat(parts).sort_values(["rank", "step"], kind="stable")
    measure = choice("measure", "r of", measures)
    tooltip = [
        tip("words", "positions"),
        tip("step", "training step", ",d"),
        tip("value", "r, mean over heads", ".4f"),
        tip("low", "lowest layer of a seed", ".4f"),
        tip("high", "highest layer of a seed", ".4f"),
        tip("n", "heads × seeds"),
    ]
    axis = Measure("r", alt.Scale(zero=False))
    marks = Series.of(long, LOOKS).lines(steps(long), "value", axis, tooltip, ("low", "high"))
    chart = alt.layer(*marks, data=long).transform_filter("datum.measure == measure")
    return Drawn(_additive(long, measures), chart.properties(width=860, height=240).add_params(measure))


def steps(table: pd.DataFrame) -> alt.X:
    """Training steps as an axis."""
    scale = alt.Scale(domain=[0, int(table["step"].max())], nice=False)
    return alt.X("step:Q", title="training step", scale=scale, axis=alt.Axis(format=",d", tickCount=5))


def last(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of each variant's last step."""
    return table[table["step"] == table.groupby("words")["step"].transform("max")]


def _parts(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {"upper": upper_half(table), "all": table}


def _by_step(table: pd.DataFrame) -> pd.DataFrame:
    by = ["words", "rank", "tensor", "step"]
    found = spread(table, by, "max_ratio", ["seed", "layer"])
    more = table.assign(has=table["count"] > 0).groupby(by).agg(massive=("has", "mean"), seeds=("seed", "nunique"))
    return found.merge(more.reset_index(), on=by)


def _concentrated(every: pd.DataFrame) -> str:
    table = _by_step(_parts(every)["upper"])
    final = last(table)
    said = []
    for tensor in tensors(final):
        own = final[final["tensor"] == tensor]
        said.append(f"{tensor} {joined([f'{row.words} {fixed(row.value, 2)}' for row in own.itertuples()])}")
    reached = final[final["massive"] > 0].sort_values("tensor", key=lambda names: names.map("QKV".index))
    each = [f"{percent(row.massive)} of {row.words}’s {row.tensor} heads" for row in reached.itertuples()]
    above = f"above {LAMBDA:g}: {joined(each)}" if each else f"no head has a dim above {LAMBDA:g}"
    n, seeds = int(final["n"].min()), int(final["seeds"].min())
    return (
        f"Largest ratio after {final['step'].max():,} steps, mean over heads of the upper half of layers: "
        f"{'; '.join(said)}; {above} ({n} heads a variant and tensor over {seeded(seeds)})."
    )


def _ahead(table: pd.DataFrame) -> str:
    final = last(table[table["seeds"] == "all"])
    said = []
    for tensor in tensors(final):
        own = final[final["tensor"] == tensor]
        each = [f"{row.words} {signed(row.gap, row.low, row.high)}" for row in own.itertuples()]
        said.append(f"{tensor}: {joined(each)}")
    return f"Ratio with RoPE less that of each other variant after {final['step'].max():,} steps: {'; '.join(said)}."


def _learned(table: pd.DataFrame, tasks: list[str]) -> str:
    mean = last(table).groupby("words", sort=False)[["loss", *tasks]].mean()
    said = [f"held-out loss {joined([f'{name} {fixed(loss, 3)}' for name, loss in mean['loss'].items()])}"]
    for task in tasks:
        each = joined([f"{name} {percent(value)}" for name, value in mean[task].items()])
        said.append(f"{task.replace('_', '-')} {each}")
    seeds = seeded(table["seed"].nunique())
    return f"After {table['step'].max():,} steps, mean over {seeds}: {'; '.join(said)}."


def _additive(long: pd.DataFrame, measures: dict[str, str]) -> str:
    measure = next(iter(measures))
    own = long[long["measure"] == measure]
    said = []
    for name, rows in own.groupby("words", sort=False):
        rows = rows.sort_values("step")
        first, final = rows.iloc[0], rows.iloc[-1]
        said.append(
            f"{name} {fixed(first['value'])} at step {first['step']:,}, {fixed(final['value'])} at {final['step']:,} "
            f"({final['n']} heads × seeds)"
        )
    return f"r of {measures[measure]}: {'; '.join(said)}."


_BAND = "Band: from the lowest to the highest layer of any seed."
TOPIC = Topic(
    "rope",
    "With and without RoPE: one small decoder, trained in four ways",
    "The same decoder trained from the same seeds on the same rows with rotary positions, a learned table, ALiBi and "
    "no positions; nothing else differs. What is shown belongs to these controls, whichever model the rest of a report "
    "is about.",
    (
        Plot(
            "rope-ratios",
            "Do massive values grow only with RoPE?",
            f"Largest dim of a head over the mean of its dims, mean over heads and seeds. {_BAND} Dashed: λ = 5, above "
            "which a dim counts as massive. Orange and thick: RoPE. If RoPE is the cause, its lines rise in Q and K, "
            "not in V, and the others stay low.",
            ("control_ratios",),
            ratios,
        ),
        Plot(
            "rope-gaps",
            "How far RoPE is ahead",
            "The ratio with RoPE less that of each other variant, upper half of layers. Above the dashed line RoPE is "
            "ahead. Band: 95 % interval (t) over layers of each seed; it may leave the panel "
            "where a single seed has few layers.",
            ("control_gaps",),
            gaps,
        ),
        Plot(
            "rope-losses",
            "What the controls have learned",
            "One line a seed. Loss on text that was not trained on, and accuracy on facts stated in the prompt "
            "(60 key-value items, 30 passkeys) and on facts seen in training (60 known values). Variants that learn "
            "equally well can be compared; where accuracy is near 0 there is nothing that disruption could break.",
            ("control_losses",),
            losses,
        ),
        Plot(
            "rope-additivity",
            "Is additivity learned?",
            f"r of the additive fit, mean over heads and seeds. {_BAND} Step 0 is the null: random weights of the same "
            "architecture. With means removed, only what training did to covariances is left. Forms 1 and 2 are "
            "defined where positions rotate; the causal fit everywhere.",
            ("control_additivity",),
            additivity,
        ),
        *controls.PARTS,
    ),
    optional=True,
)
