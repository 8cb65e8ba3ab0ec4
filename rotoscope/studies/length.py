"""Past the trained length: does clamping distances carry a model on? Claim P6 (Han & Ji 2025, arXiv 2503.13305).

Texts half as long again as the trained length ``Lt`` are scored token by token: with plain rotary positions, with a
Λ-shaped mask, with a cap on distances, with both (LM-Infinite, arXiv 2308.16137), and with transformers' own dynamic
NTK and YaRN. What clamps keeps distances to those seen in training, 0 … ``Lt - 1``. Excess is measured against the
same targets given only the last ``Lt / 2`` … ``Lt`` tokens, so that the model stays within what it was trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from rotoscope.engine import REFUSED, Cell
from rotoscope.interventions import DistanceCap, LambdaMask, Together
from rotoscope.model.likelihood import token_nll
from rotoscope.model.lm import LM
from rotoscope.model.rope_scaling import rescaled
from rotoscope.model.tap import tap
from rotoscope.observers.by_position import ByPosition
from rotoscope.results import Claim, not_tested
from rotoscope.stats import intervals
from rotoscope.studies import texts
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import Options
from rotoscope.studies.texts import Text

REACH = 1.5
"""Length of the texts, as a multiple of the trained length."""
FIRST = 4
"""Tokens at the start that a Λ-shaped mask leaves in sight."""
PLAIN, CLAMPED, REFERENCE = "plain", "lambda+cap", "reference"
JUDGED = (PLAIN, CLAMPED, REFERENCE)
VARIANTS: dict[str, Callable[[LM, int], AbstractContextManager[Any]]] = {
    PLAIN: lambda lm, trained: nullcontext(),
    "lambda": lambda lm, trained: LambdaMask(trained, FIRST).on(lm),
    "cap": lambda lm, trained: DistanceCap(trained - 1).on(lm),
    CLAMPED: lambda lm, trained: Together((LambdaMask(trained, FIRST), DistanceCap(trained - 1))).on(lm),
    "dynamic-ntk": lambda lm, trained: rescaled(lm, {"rope_type": "dynamic", "factor": REACH}),
    "yarn": lambda lm, trained: rescaled(lm, {"rope_type": "yarn", "factor": REACH}),
    REFERENCE: lambda lm, trained: nullcontext(),
}
"""What is open while a text is scored, from the model and its trained length."""
TEXTS, SHOWN_TEXTS = 4, 2
"""Texts for what is judged; for what is only shown beside it."""
BUCKETS, ROWS = 32, 32
"""Buckets within the trained length; queries that attention is looked at with where each starts."""
EXCESS = 0.05
"""Nats a token."""
NAME = "length/{}/text-{}"
_QUADRATIC = 4096
RULES = {
    "P6": "Excess NLL past the trained length Lt, at positions Lt … 1.5 Lt, against the same targets given only the "
    "last Lt/2 … Lt tokens. With Λ-mask and distance cap: upper bound ≤ .05 nats a token while plain RoPE's excess "
    "has lower bound > .05 holds; below plain RoPE only (paired difference, upper bound < 0) partly; else fails; not "
    "tested where plain RoPE does not degrade (upper bound ≤ .05, or lower bound ≤ 0).",
}


def cells(lm: LM, options: Options) -> list[Cell]:
    """One cell per variant and text; none where there is nothing to measure."""
    if _why_not(lm):
        return []
    trained, some = _trained(lm), _texts(lm, options)
    out = []
    for variant in VARIANTS if lm.anatomy.rotary else (PLAIN, REFERENCE):
        for i, text in enumerate(some[: TEXTS if variant in JUDGED else SHOWN_TEXTS]):
            ids = list(text.ids)
            if variant == REFERENCE:
                ids = ids[: _front(lm, text)] + ids[len(ids) - trained + _front(lm, text) :]
            arguments = {"ids": ids, "variant": variant, "trained": trained, "watched": i == 0 and variant != REFERENCE}
            cost = len(ids) * (1 + len(ids) / _QUADRATIC)
            out.append(Cell(NAME.format(variant, i), score, arguments, cost, optional=True))
    return out


def finish(lm: LM, options: Options, done: Mapping[str, Tables]) -> tuple[dict[str, pd.DataFrame], list[Claim]]:
    """Tables ``length`` and ``length_attention``, as far as they were run, and the claim."""
    found = {variant: _of(done, variant) for variant in VARIANTS}
    if not found[PLAIN]:
        return {}, [not_tested("P6", _why_not(lm) or _why_none(lm, done), RULES["P6"])]
    trained = _trained(lm)
    every = pd.concat(
        [of["nll"].assign(variant=variant, text=i) for variant, texts_ in found.items() for i, of in texts_.items()],
        ignore_index=True,
    )
    tables = {"length": by_position(every, trained)}
    watched = [of["attention"] for texts_ in found.values() for of in texts_.values() if "attention" in of]
    if watched:
        tables["length_attention"] = pd.concat(watched, ignore_index=True)
    why_not = "" if found[CLAMPED] else _no_clamp(lm, done)
    return tables, [p6(excess(every, trained), trained, why_not)]


def score(lm: LM, ids: Sequence[int], variant: str, trained: int, watched: bool) -> Tables:
    """One text under one variant.

    Returns
    -------
    dict
        ``nll``: position (that a token is predicted at, in the whole text) and nll of the token, nats. Where
        ``watched``, ``attention``: variant, layer, position, entropy, sink_mass, largest_logit of some queries there.
    """
    places = np.unique(_bucket(np.arange(len(ids)), trained))
    seen = ByPosition(places.tolist(), ROWS)
    with VARIANTS[variant](lm, trained), tap(lm, seen) if watched else nullcontext():
        nll = token_nll(lm, torch.tensor([list(ids)]))[0].numpy()
    start = _length(trained) - len(ids) if variant == REFERENCE else 0
    tables = {"nll": pd.DataFrame({"position": start + np.arange(len(nll)), "nll": nll})}
    if watched:
        frames = [
            pd.DataFrame({"variant": variant, "layer": layer, "position": seen.starts, **vars(of)})
            for layer, of in sorted(seen.layers.items())
        ]
        tables["attention"] = pd.concat(frames, ignore_index=True)
    return tables


def by_position(every: pd.DataFrame, trained: int) -> pd.DataFrame:
    """NLL by variant and bucket of positions: means of per-text means, with intervals over texts (t).

    The reference counts past the trained length only, where it has half of it to go by at least.
    """
    kept = every[(every.variant != REFERENCE) | (every.position >= trained)]
    per_text = (
        kept.assign(position=_bucket(kept.position.to_numpy(), trained))
        .groupby(["variant", "position", "text"], sort=False, as_index=False)
        .nll.mean()
    )
    rows = [
        (variant, position, of.nll.mean(), *intervals.mean_t(of.nll), len(of))
        for (variant, position), of in per_text.groupby(["variant", "position"], sort=False)
    ]
    return pd.DataFrame(rows, columns=["variant", "position", "nll", "low", "high", "n"])


def excess(every: pd.DataFrame, trained: int) -> pd.DataFrame:
    """Mean excess over the reference at positions past the trained length ``[texts, variants]``, nats a token."""
    past = every[every.position >= trained].pivot(index=["text", "position"], columns="variant", values="nll")
    over = past.drop(columns=REFERENCE).sub(past[REFERENCE], axis=0)
    return over.groupby("text").mean()


def p6(over: pd.DataFrame, trained: int, why_not: str = "") -> Claim:
    """The verdict from each text's excess; ``why_not``: why nothing is clamped, where nothing is."""
    plain = _mean(over[PLAIN])
    n = f"{len(over)} texts, trained length {trained:,}"
    if why_not:
        value, (low, high) = plain
        return not_tested("P6", f"{why_not}; plain excess {value:.3g} [{low:.3g}, {high:.3g}] ({n})", RULES["P6"])
    clamped, less = _mean(over[CLAMPED]), _mean(over[CLAMPED] - over[PLAIN])
    degrades = Condition("plain RoPE's excess", *plain, ">", EXCESS)
    if degrades.missed or plain[1].low <= 0:
        return not_tested("P6", f"plain RoPE does not degrade: {degrades} ({n})", RULES["P6"])

    def decide(factor: float) -> Ruling:
        keeps = Condition("excess with Λ-mask and cap", *clamped, "<=", scaled(EXCESS, factor))
        worse = Condition("plain RoPE's excess", *plain, ">", scaled(EXCESS, factor))
        beats = Condition("clamped − plain", *less, "<", 0.0)
        why = reasons(keeps, worse, beats)
        if keeps.met and worse.met:
            return "holds", why
        return ("partly" if beats.met else "fails"), why

    return claim(
        "P6", RULES["P6"], decide, value=clamped[0], interval=clamped[1], null=plain[0],
        null_name="plain RoPE's excess", n=n,
    )  # fmt: skip


def _mean(x: pd.Series) -> tuple[float, intervals.Interval]:
    return float(x.mean()), intervals.mean_t(x)


def _of(done: Mapping[str, Tables], variant: str) -> dict[int, Tables]:
    """The finished texts of a variant."""
    found = {i: done.get(NAME.format(variant, i), {}) for i in range(TEXTS)}
    return {i: tables for i, tables in found.items() if "nll" in tables}


def _why_not(lm: LM) -> str:
    """Why there is nothing to measure past the trained length, whatever is asked for, or nothing."""
    if lm.trained_length is None:
        return "the trained length is not known; give it with --trained-length"
    if any(layer.position == "learned" for layer in lm.anatomy.attention):
        return "positions are learned one by one, and there are none past the trained length"
    return ""


def _why_none(lm: LM, done: Mapping[str, Tables]) -> str:
    none = f"the text has no stretch of {_length(_trained(lm)):,} tokens, {REACH} times the trained length"
    return _refused(done, PLAIN) or none


def _no_clamp(lm: LM, done: Mapping[str, Tables]) -> str:
    if not lm.anatomy.rotary:
        return "no layer rotates its queries and keys, so that there are no distances to clamp"
    return _refused(done, CLAMPED) or "clamped distances were not run"


def _refused(done: Mapping[str, Tables], variant: str) -> str:
    of = done.get(NAME.format(variant, 0), {})
    return str(of[REFUSED].reason[0]) if REFUSED in of else ""


def _trained(lm: LM) -> int:
    assert lm.trained_length is not None
    return lm.trained_length


def _length(trained: int) -> int:
    """Tokens of a text."""
    return int(REACH * trained)


def _bucket(position: NDArray[np.int64], trained: int) -> NDArray[np.int64]:
    """Where the bucket of each position starts; none holds positions on both sides of the trained length."""
    step = max(1, trained // BUCKETS)
    start: NDArray[np.int64] = trained + (position - trained) // step * step
    return start.clip(0)


def _texts(lm: LM, options: Options) -> list[Text]:
    """Those stretches of the text that are long enough."""
    length = _length(_trained(lm))
    longer = dataclasses.replace(options, texts=min(options.texts or TEXTS, TEXTS), tokens=length)
    found = texts.texts(dataclasses.replace(lm, trained_length=None), longer)
    return [text for text in found if len(text.ids) == length]


def _front(lm: LM, text: Text) -> int:
    """Special tokens that the tokenizer puts in front of a text: a shorter context begins with them, too."""
    return int(text.ids[0] in getattr(lm.tokenizer, "all_special_ids", ()))
