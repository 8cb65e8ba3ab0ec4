"""What disruption does to attention itself: how far it moves, its entropy and sink, its additivity."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot, present
from rotoscope.report.labels import CONTROL, SHOWN, arms, control_arm, main_arm
from rotoscope.report.style import INK, MISSING, MUTED, layer_axis, tip
from rotoscope.report.text import KINDS, fixed, joined
from rotoscope.results import Result

_MEASURES = {
    "kl": ("divergence from clean attention (KL, nats)", ".3f"),
    "entropy": ("attention entropy (nats)", ".2f"),
    "sink_mass": ("attention to position 0", ".3f"),
}
_ADDITIVE = {name: (f"{KINDS[name]}: r", ".4f") for name in ("form1", "form1_within", "form2_within")}
_MAP = 620


def attention(result: Result) -> Drawn | None:
    """Divergence, entropy and sink mass by layer under each arm."""
    table = _named(result, "disrupt_attention")
    chart = _maps(result, table, _MEASURES)
    return None if chart is None else Drawn(_moved(result, table), chart)


def additivity(result: Result) -> Drawn | None:
    """r of the additive fit by layer under each arm."""
    table = _named(result, "disrupt_additivity")
    chart = _maps(result, table, _ADDITIVE)
    return None if chart is None else Drawn(_kept(result, table), chart)


def _maps(result: Result, table: pd.DataFrame, measures: dict[str, tuple[str, str]]) -> alt.VConcatChart | None:
    there = {name: entry for name, entry in measures.items() if name in table and table[name].notna().any()}
    if not there:
        return None
    panels = []
    for name, (title, form) in there.items():
        # Clean attention does not diverge from itself.
        own = table[table[name].notna() & ~((name == "kl") & (table["arm"] == "clean"))]
        order = list(dict.fromkeys(own.sort_values("rank")["words"]))
        last = name == list(there)[-1]
        panels.append(
            alt.Chart(own[["words", "layer", name]], title=title, width=_MAP, height=18 * len(order))
            .mark_rect()
            .encode(
                x=layer_axis(result, _MAP, "layer" if last else None),
                y=alt.Y(
                    "words:N",
                    title=None,
                    scale=alt.Scale(domain=order),
                    axis=alt.Axis(labelLimit=400, labelOverlap=False, labelColor=_label_colour()),
                ),
                color=alt.Color(
                    f"{name}:Q",
                    title=None,
                    scale=alt.Scale(scheme="viridis", zero=False),
                    legend=alt.Legend(tickCount=4, format="~r", gradientLength=min(110, 18 * len(order))),
                ),
                tooltip=[tip("words", "arm"), tip("layer", "layer"), tip(name, title, form)],
            )
            .properties(view=alt.ViewBackground(fill=MISSING))
        )
    chart: alt.VConcatChart = alt.vconcat(*panels, spacing=16).resolve_scale(color="independent")
    return chart


def _label_colour() -> dict[str, object]:
    return {
        "condition": {"test": f"substring(datum.label, 0, 1) == '{SHOWN}'", "value": MUTED},
        "value": INK,
    }


def _named(result: Result, name: str) -> pd.DataFrame:
    """The table with its arms in the words of the matrix; by their own names where there is no matrix."""
    table = result.tables[name]
    known = arms(result.tables["disrupt"]) if present(result, "disrupt") else {}
    words = {arm: known.get(arm, arm) for arm in [*(a for a in known if a in set(table["arm"])), *table["arm"]]}
    return table.assign(words=table["arm"].map(words), rank=table["arm"].map(list(words).index))


def _moved(result: Result, table: pd.DataFrame) -> str:
    means = table.groupby("arm")[["kl", "entropy", "sink_mass"]].mean()
    said = []
    for arm in _pair(result, table):
        words = table.loc[table["arm"] == arm, "words"].iloc[0]
        changes = [f"moves attention by {fixed(means.at[arm, 'kl'])} nats"]
        if "clean" in means.index:
            changes += [
                f"takes {what} from {fixed(means.at['clean', column], 2)} to {fixed(means.at[arm, column], 2)}"
                for column, what in (("entropy", "entropy"), ("sink_mass", "the weight on position 0"))
            ]
        said.append(f"“{words}” {joined(changes)}")
    return f"Means over layers: {'; '.join(said)}." if said else f"{len(means)} arms."


def _kept(result: Result, table: pd.DataFrame) -> str:
    means = table.groupby("arm")["form1_within"].mean()
    said = [f"clean {fixed(means['clean'])}"] if "clean" in means else []
    said += [f"“{table.loc[table['arm'] == arm, 'words'].iloc[0]}” {fixed(means[arm])}" for arm in _pair(result, table)]
    return f"r of form 1, within query, mean over layers: {joined(said)}." if said else f"{len(means)} arms."


def _pair(result: Result, table: pd.DataFrame) -> list[str]:
    """The main arm and its control, as far as this table has them; without the matrix all arms."""
    there = list(dict.fromkeys(table["arm"]))
    if not present(result, "disrupt"):
        return [arm for arm in there if arm != "clean"]
    disrupt = result.tables["disrupt"]
    return [arm for arm in (main_arm(disrupt), control_arm(disrupt)) if arm is not None and arm in there]


ATTENTION = Plot(
    "disrupt-attention",
    "What happens to attention itself",
    "One row an arm, one column a layer; each map has its own colour scale, bright is more. Divergence: KL of clean "
    "attention to the disrupted one, mean over heads and queries (0: unchanged). Entropy: how widely a query spreads "
    "its attention. Position 0: the sink; an arm that empties it disturbs every task. "
    f"{CONTROL} is the control whose values change as much, {SHOWN} arms are shown only.",
    ("disrupt_attention",),
    attention,
)
ADDITIVITY = Plot(
    "disrupt-additivity",
    "Are the logits still position + semantics?",
    "r of the additive fit (see Position), mean over the layer's heads, measured again while the arm is on; each map "
    f"has its own colour scale. An arm that lowers r more than the control ({CONTROL}) takes away what made the "
    "logits additive.",
    ("disrupt_additivity",),
    additivity,
)
