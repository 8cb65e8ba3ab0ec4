"""Is the additive form what a model uses? Claim P4 (Han & Ji 2025, arXiv 2503.13305, as a causal test).

A text is scored with the fit of its logits in their place, and with a control that has the fit's residual hit the
wrong keys: :class:`rotoscope.interventions.ReplaceLogits`. What the fit needs is measured on other texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import torch

from rotoscope.engine import REFUSED, Cell
from rotoscope.interventions import LogitMeans, ReplaceLogits
from rotoscope.model.likelihood import token_nll
from rotoscope.model.lm import LM
from rotoscope.model.twin import random_twin
from rotoscope.results import Claim, not_tested
from rotoscope.stats import intervals, paired
from rotoscope.stats.ratio import ratio_t
from rotoscope.studies import texts
from rotoscope.studies.items import asked, slug
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import BATCH_TOKENS, Options
from rotoscope.studies.texts import Text
from rotoscope.tasks import evaluate

CLEAN, FIT, CONTROL = "clean", "form1", "permuted"
JUDGED = (FIT, CONTROL, "f", "g")
SHOWN = ("form1-centred", "form2", "form2-causal")
TWIN = "form1-random-means"
"""Form 1 with the means of a model of random weights."""
ALL = "all"
TWIN_TEXTS = 3
"""Texts that a twin's means are measured on, at most; a model's own are measured on all but the one that is scored."""
HALF, ENOUGH = 0.5, 0.02
ITEMS = 60
EACH = "each-layer"
TEXT, TASK = "replace/{}/text-{}", "replace/tasks/{}/{}"
RULES = {
    "P4": "ΔNLL(form 1) / ΔNLL(control), all layers, of means over texts; interval by Fieller's theorem. Control: the "
    "same residual permuted over each query's permitted keys, centred. Upper bound ≤ .5, and below f alone and g alone "
    "(paired differences over texts by t, upper bounds < 0) holds; only the paired difference to the control below 0 "
    "partly; it is not, fails; not tested where the control costs < .02 nats a token.",
}


@dataclass(frozen=True)
class Plan:
    """What a size runs: texts and tokens of each, arms, whether on thirds of the layers and each layer too, tasks."""

    texts: int
    tokens: int
    arms: tuple[str, ...] = (*JUDGED, *SHOWN)
    twin: bool = True
    thirds: bool = True
    single: tuple[str, ...] = ()
    tasks: Mapping[str, int] = field(default_factory=dict)


_TASKS = {"capitals": ITEMS, "capitals_in_context": ITEMS}
PLANS = {
    "quick": Plan(4, 256, JUDGED, twin=False, thirds=False),
    "standard": Plan(8, 512, tasks=_TASKS),
    "full": Plan(8, 512, single=(FIT, CONTROL), tasks=_TASKS),
}


def cells(lm: LM, options: Options) -> list[Cell]:
    """Per text a cell for the arms on all layers, and some for parts of them and a twin's means; tasks by arm."""
    rotary = [layer.layer for layer in lm.anatomy.rotary]
    some, of_size = _texts(lm, options), PLANS[options.size]
    if not rotary or len(some) < 2:
        return []
    parts = {ALL: ({ALL: rotary}, (CLEAN, *of_size.arms))}
    if of_size.thirds and len(rotary) >= 3:
        parts["thirds"] = (thirds(rotary), of_size.arms)
    if of_size.single:
        parts[EACH] = ({str(layer): [layer] for layer in rotary}, of_size.single)
    out = []
    for i, text in enumerate(some):
        others, tokens = _others(some, i), len(text.ids)
        given = {"ids": list(text.ids), "others": others, "seed": options.seed + i}
        for name, (layers, arms) in parts.items():
            arguments = {**given, "layers": layers, "arms": list(arms)}
            cost = float((1 + len(layers) * len(arms)) * tokens)  # each text is measured once
            out.append(Cell(TEXT.format(name, i), score, arguments, cost, optional=True))
        if of_size.twin:
            arguments = {**given, "others": others[:TWIN_TEXTS]}
            cost = float(tokens + sum(map(len, others[:TWIN_TEXTS])))
            out.append(Cell(TEXT.format(TWIN, i), score_twin, arguments, cost, optional=True))
    return [*out, *_task_cells(lm, options, some)]


def finish(lm: LM, options: Options, done: Mapping[str, Tables]) -> tuple[dict[str, pd.DataFrame], list[Claim]]:
    """Tables ``replace`` and ``replace_tasks``, as far as they were run, and the claim."""
    tables = {"replace_tasks": tasks(done, options.seed)}
    every = _per_text(done)
    if len(every):
        tables["replace"] = summary(every)
    tables = {name: table for name, table in tables.items() if len(table)}
    return tables, [_refusal(lm, done) if every.empty else p4(every)]


def thirds(layers: Sequence[int]) -> dict[str, list[int]]:
    """Each third of three or more layers, in order, by its first and last."""
    parts = [part.tolist() for part in np.array_split(np.array(layers), 3)]
    return {f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]): part for part in parts}


def score(
    lm: LM, ids: Sequence[int], others: Sequence[Sequence[int]], seed: int, layers: Mapping[str, Sequence[int]],
    arms: Sequence[str],
) -> Tables:  # fmt: skip
    """One text under some arms, each on some sets of layers.

    Returns
    -------
    dict
        ``replace``: arm, layers (a set's name), nll (mean over the text's tokens but the first, nats).
    """
    means = pooled(lm, others)
    rows = []
    for name, some in layers.items():
        for arm in arms:
            with nullcontext() if arm == CLEAN else ReplaceLogits(means, arm, tuple(some), seed).on(lm):
                rows.append((arm, name, _nll(lm, ids)))
    return {"replace": pd.DataFrame(rows, columns=["arm", "layers", "nll"])}


def score_twin(lm: LM, ids: Sequence[int], others: Sequence[Sequence[int]], seed: int) -> Tables:
    """The same for form 1 with the means of a model of random weights."""
    means = LogitMeans.measure(random_twin(lm, seed), others)
    with ReplaceLogits(means, FIT).on(lm):
        return {"replace": pd.DataFrame({"arm": [TWIN], "layers": [ALL], "nll": [_nll(lm, ids)]})}


def answer(lm: LM, spec: str, n: int, others: Sequence[Sequence[int]], seed: int, arm: str, at_once: int) -> Tables:
    """A task's items under an arm on all layers."""
    under = None if arm == CLEAN else ReplaceLogits(pooled(lm, others), arm, seed=seed)
    rows = evaluate(lm, spec, n=n, seed=seed, under=under, batch_tokens=at_once)
    return {"items": rows[["task", "variant", "id", "correct", "logprob", "chance"]].assign(arm=arm)}


def pooled(lm: LM, some: Sequence[Sequence[int]]) -> LogitMeans:
    """What the fits need, over some texts; each text is run once, however often it is asked for."""
    known = _MEASURED.setdefault(lm.model, {})
    for ids in some:
        if tuple(ids) not in known:
            known[tuple(ids)] = LogitMeans.measure(lm, [ids])
    parts = [known[tuple(ids)] for ids in some]
    share = [(len(ids) - 1) / sum(len(ids) - 1 for ids in some) for ids in some]  # position 0 does not count

    def mean(name: str) -> dict[int, torch.Tensor]:
        of: list[dict[int, torch.Tensor]] = [getattr(part, name) for part in parts]
        return {layer: sum((w * x[layer] for w, x in zip(share, of, strict=True)), start=_NONE) for layer in of[0]}

    return LogitMeans(mean("query"), mean("key"), parts[0].turn)


_MEASURED: WeakKeyDictionary[Any, dict[tuple[int, ...], LogitMeans]] = WeakKeyDictionary()
_NONE = torch.zeros(())


def summary(every: pd.DataFrame) -> pd.DataFrame:
    """Means over texts with t intervals, and their ratio to the control on the same layers.

    Parameters
    ----------
    every : pandas.DataFrame
        arm, layers, text, dnll.
    """
    by_text = every.pivot(index="text", columns=["layers", "arm"], values="dnll")
    rows = []
    for layers, arm in by_text.columns:
        dnll = by_text[(layers, arm)].dropna()
        ratio, of_ratio = np.nan, intervals.UNDEFINED
        if (layers, CONTROL) in by_text and arm != CONTROL:
            both = by_text[[(layers, arm), (layers, CONTROL)]].dropna()
            means = both.mean()
            ratio = means.iloc[0] / means.iloc[1] if means.iloc[1] else np.nan
            of_ratio = ratio_t(both.iloc[:, 0], both.iloc[:, 1])
        rows.append((arm, layers, dnll.mean(), *intervals.mean_t(dnll), len(dnll), ratio, *of_ratio))
    columns = ["arm", "layers", "dnll", "low", "high", "n", "ratio", "ratio_low", "ratio_high"]
    return pd.DataFrame(rows, columns=columns)


def p4(every: pd.DataFrame) -> Claim:
    """The verdict from arm, layers, text, dnll."""
    of = every[every["layers"] == ALL].pivot(index="text", columns="arm", values="dnll")
    control = float(of[CONTROL].mean())
    n = f"{len(of)} texts"
    if control < ENOUGH:
        return not_tested("P4", f"the control costs {control:.3g} nats a token, less than {ENOUGH} ({n})", RULES["P4"])
    ratio, of_ratio = float(of[FIT].mean()) / control, ratio_t(of[FIT], of[CONTROL])

    def below(arm: str, name: str) -> Condition:
        less = of[FIT] - of[arm]
        return Condition(f"form 1 − {name}", float(less.mean()), intervals.mean_t(less), "<", 0.0)

    beside = [below("f", "f alone"), below("g", "g alone")]
    beats = below(CONTROL, "control")

    def decide(factor: float) -> Ruling:
        half = Condition("ratio to control", ratio, of_ratio, "<=", scaled(HALF, factor))
        why = f"{reasons(half, *beside, beats)}; the control costs {control:.3g} nats a token"
        if half.met and all(c.met for c in beside):
            return "holds", why
        return ("partly" if beats.met else "fails"), why

    return claim(
        "P4", RULES["P4"], decide, value=ratio, interval=of_ratio, null=1.0, null_name="the control itself", n=n
    )


def _per_text(done: Mapping[str, Tables]) -> pd.DataFrame:
    """arm, layers, text, dnll of every text that was run clean."""
    found = [
        of["replace"].assign(text=int(name.rpartition("-")[2]))
        for name, of in done.items()
        if name.startswith("replace/") and "replace" in of
    ]
    keys = ["arm", "layers", "text"]
    every = pd.concat([pd.DataFrame(columns=[*keys, "nll"]), *found], ignore_index=True)
    every = every.drop_duplicates(keys)  # of few layers, a third may be one that is replaced by itself, too
    clean = every[every.arm == CLEAN].set_index("text").nll
    every = every[(every.arm != CLEAN) & every.text.isin(clean.index)]
    dnll = every.nll.to_numpy(float) - clean.reindex(every.text).to_numpy(float)
    return every.assign(dnll=dnll).drop(columns="nll")


def _refusal(lm: LM, done: Mapping[str, Tables]) -> Claim:
    refused = [str(of[REFUSED].reason[0]) for name, of in done.items() if name.startswith("replace/") and REFUSED in of]
    why = refused[0] if refused else "one text leaves no other to take means from: use --texts 2 or more"
    if not lm.anatomy.rotary:
        why = "no layer rotates its queries and keys, so their logits have no such form"
    return not_tested("P4", why, RULES["P4"])


def _task_cells(lm: LM, options: Options, some: Sequence[Text]) -> Iterator[Cell]:
    wanted = dict.fromkeys(options.tasks, ITEMS) or PLANS[options.size].tasks
    limit = options.limit or 10**9
    others = [list(text.ids) for text in some]
    for task in asked(lm, {spec: min(n, limit) for spec, n in wanted.items()}, options.seed)[0]:
        for arm in (CLEAN, *JUDGED):
            arguments = {"spec": task.spec, "n": task.n, "others": others, "seed": options.seed, "arm": arm}
            cost = task.tokens
            yield Cell(TASK.format(slug(task.spec), arm), answer, arguments, float(cost), BATCH_TOKENS, optional=True)


def tasks(done: Mapping[str, Tables], seed: int) -> pd.DataFrame:
    """One row per task and arm: accuracy, and the change of the right answer's log-likelihood against clean."""
    found = [of["items"] for name, of in done.items() if name.startswith(TASK.format("", "")[:-1]) and "items" in of]
    rows = []
    for (task, variant), of in pd.concat(found).groupby(["task", "variant"], sort=False) if found else []:
        by_arm = dict(iter(of.groupby("arm", sort=False)))
        for arm, items in by_arm.items():
            value, bounds = paired.accuracy(items.correct)
            change, of_change = np.nan, intervals.UNDEFINED
            if CLEAN in by_arm:
                change, of_change = paired.mean_change(by_arm[CLEAN].logprob, items.logprob, seed)
            chance = items.chance.mean()
            rows.append((task, variant, arm, len(items), value, *bounds, chance, change, *of_change))
    columns = ["task", "variant", "arm", "n", "accuracy", "low", "high", "chance"]
    return pd.DataFrame(rows, columns=[*columns, "dlogprob", "dlogprob_low", "dlogprob_high"])


def _texts(lm: LM, options: Options) -> list[Text]:
    of_size = PLANS[options.size]
    tokens = min(options.n_tokens, of_size.tokens)
    return texts.texts(lm, replace(options, texts=options.texts or of_size.texts, tokens=tokens))


def _others(some: Sequence[Text], i: int) -> list[list[int]]:
    """The ids of the other texts."""
    return [list(text.ids) for j, text in enumerate(some) if j != i]


def _nll(lm: LM, ids: Sequence[int]) -> float:
    nll: torch.Tensor = token_nll(lm, torch.tensor([list(ids)]))
    return float(nll.mean())
