"""How much disorder does a model bear? Claim P5 (Han & Ji 2025, arXiv 2503.13305, section 5).

In each text one set of tokens is drawn for every share; all arms disturb that set and no other: tokens change places,
position ids are shifted as far as the tokens moved, or queries and keys are turned by as much, differently in every
layer. What is scored is the same in all arms of a share: the tokens that neither were disturbed themselves nor follow
directly, or after one token, on a disturbed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from rotoscope.engine import REFUSED, Cell
from rotoscope.interventions.shift import ShiftPositions, no_jitter, signed
from rotoscope.model.likelihood import token_nll
from rotoscope.model.lm import LM
from rotoscope.results import Claim, not_tested
from rotoscope.stats import intervals
from rotoscope.studies import distance, texts
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import Options
from rotoscope.studies.texts import Text
from rotoscope.studies.transpose import Transposition, transpose

SHARES = (0.0, 0.01, 0.02, 0.05, 0.10, 0.20, 0.50)
KINDS = ("swap-adjacent", "swap-arbitrary", "jitter-adjacent", "jitter-arbitrary", "rotate-arbitrary")
JUDGED = {"swap-arbitrary": "swaps", "jitter-arbitrary": "jitter"}
FEW, MANY = 0.05, 0.20
HARM = 0.05
"""Nats a token; more is no minor harm."""
TEXT = "perturb/text-{}"
RULES = {
    "P5": "ΔNLL on targets that are not disturbed, and whose two preceding tokens are not. Minor: upper bound ≤ .05 "
    "nats a token with 5 % of the tokens disturbed. Clear: lower bound > .05 with 20 %. Both, for swaps of arbitrary "
    "tokens and for position jitter of equal mean |shift|, holds; lower bound > .05 at 5 % for both kinds fails; else "
    "partly.",
}


@dataclass(frozen=True)
class Plan:
    """What a size runs; ``texts`` and ``tokens`` where the claim alone does with less than the study's other texts."""

    shares: tuple[float, ...] = SHARES
    kinds: tuple[str, ...] = KINDS
    texts: int | None = None
    tokens: int | None = None
    distances: bool = True


PLANS = {
    "quick": Plan((FEW, MANY), tuple(JUDGED), texts=6, tokens=256, distances=False),
    "standard": Plan(),
    "full": Plan(),
}


def cells(lm: LM, options: Options) -> list[Cell]:
    """One cell per text, and those of the controlled distance."""
    of_size, some = PLANS[options.size], _texts(lm, options)
    kinds = [kind for kind in of_size.kinds if _defined(lm, kind)]
    forwards = 1 + len(kinds) * sum(share > 0 for share in of_size.shares)
    arguments = {"shares": list(of_size.shares), "kinds": kinds}
    out = [
        Cell(
            TEXT.format(i), perturb, {"ids": list(text.ids), **arguments, "seed": options.seed + i},
            float(forwards * len(text.ids)), optional=True,
        )
        for i, text in enumerate(some)
    ]  # fmt: skip
    return out + distance.cells(lm, options, some) if of_size.distances else out


def finish(lm: LM, options: Options, done: Mapping[str, Tables]) -> tuple[dict[str, pd.DataFrame], list[Claim]]:
    """Tables ``perturb`` and ``distance``, as far as they were run, and the claim."""
    some = [done[TEXT.format(i)] for i in range(len(_texts(lm, options)))]
    refused = [str(tables[REFUSED].reason[0]) for tables in some if REFUSED in tables]
    every = [tables["perturb"].assign(text=i) for i, tables in enumerate(some) if REFUSED not in tables]
    tables = distance.table(done)
    why_not = no_jitter(lm)
    if not every:
        return tables, [not_tested("P5", why_not or (refused or ["no text was run"])[0], RULES["P5"])]
    tables["perturb"] = summary(pd.concat(every, ignore_index=True))
    return tables, [p5(tables["perturb"], why_not)]


def perturb(lm: LM, ids: Sequence[int], shares: Sequence[float], kinds: Sequence[str], seed: int) -> Tables:
    """One text under every kind and share.

    Returns
    -------
    dict
        ``perturb``: kind, share, achieved, mean_shift, targets, clean and nll (mean nats over the targets), dnll.
        Where nothing moves the text is not run again: nothing is changed then, to the last bit.
    """
    clean = _nll(lm, ids)
    rows = []
    for share in shares:
        arms = list(_arms(lm, ids, share, kinds, seed))
        assert len({arm.moved.tobytes() for arm in arms}) <= 1, "the arms of one share disturb different tokens"
        for arm in arms:
            kept = targets(arm.moved)
            nll = clean
            if arm.moved.any():
                with arm.under:
                    nll = _nll(lm, arm.ids)
            n, before, after = int(kept.sum()), _mean(clean[kept]), _mean(nll[kept])
            rows.append((arm.kind, share, arm.achieved, arm.mean_shift, n, before, after, _mean((nll - clean)[kept])))
    columns = ["kind", "share", "achieved", "mean_shift", "targets", "clean", "nll", "dnll"]
    return {"perturb": pd.DataFrame(rows, columns=columns)}


def targets(moved: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which tokens are scored: those that have two tokens in front, where none of the three is disturbed."""
    kept = ~moved
    kept[1:] &= ~moved[:-1]
    kept[2:] &= ~moved[:-2]
    kept[:2] = False
    return kept


def summary(every: pd.DataFrame) -> pd.DataFrame:
    """Means of per-text means, with intervals over texts (t), one row per kind and share."""
    rows = []
    for (kind, share), of in every.groupby(["kind", "share"], sort=False):
        scored = of[of.targets > 0]
        low, high = intervals.mean_t(scored.dnll) if len(scored) else intervals.UNDEFINED
        means = of.achieved.mean(), of.mean_shift.mean(), len(scored), int(of.targets.sum()), scored.dnll.mean()
        rows.append((kind, share, *means, low, high))
    columns = ["kind", "share", "achieved", "mean_shift", "n", "targets", "dnll", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def p5(table: pd.DataFrame, why_not: str = "") -> Claim:
    """The verdict from the table ``perturb``; ``why_not``: why there is no jitter, where there is none."""
    if why_not:
        return not_tested("P5", f"{why_not}; only swaps of the text were run", RULES["P5"])
    of = table.set_index(["kind", "share"])
    judged = [(kind, share) for share in (FEW, MANY) for kind in JUDGED]
    if missing := [(kind, share) for kind, share in judged if (kind, share) not in of.index]:
        return not_tested("P5", f"{missing[0][0]} at {missing[0][1]:.0%} was not run", RULES["P5"])
    if not all(of.loc[key].achieved > 0 and of.loc[key].targets > 0 for key in judged):
        return not_tested("P5", "the texts are too short to disturb 5 % of them and leave targets", RULES["P5"])

    def condition(kind: str, share: float, op: str, factor: float) -> Condition:
        row = of.loc[(kind, share)]
        label = f"{JUDGED[kind]} at {share:.0%}"
        return Condition(label, float(row.dnll), (float(row.low), float(row.high)), op, scaled(HARM, factor))

    def decide(factor: float) -> Ruling:
        minor = [condition(kind, FEW, "<=", factor) for kind in JUDGED]
        clear = [condition(kind, MANY, ">", factor) for kind in JUDGED]
        why = reasons(*minor, *clear)
        if all(c.met for c in (*minor, *clear)):
            return "holds", why
        return ("fails" if all(c.missed for c in minor) else "partly"), why

    swaps, jitter = (of.loc[(kind, FEW)] for kind in JUDGED)
    few, many = (int(of.loc[("swap-arbitrary", share)].targets) for share in (FEW, MANY))
    return claim(
        "P5", RULES["P5"], decide, value=float(swaps.dnll), interval=(float(swaps.low), float(swaps.high)),
        null=float(jitter.dnll), null_name="position jitter of 5 % with the same mean |shift|",
        n=f"{int(swaps.n)} texts, {few} targets at {FEW:.0%}, {many} at {MANY:.0%}",
    )  # fmt: skip


@dataclass(frozen=True)
class _Arm:
    """One way to disturb a text: the ids that are run, what is open meanwhile, and which tokens that disturbs."""

    kind: str
    ids: Sequence[int]
    under: AbstractContextManager[Any]
    moved: NDArray[np.bool_]
    achieved: float
    mean_shift: float


def _arms(lm: LM, ids: Sequence[int], share: float, kinds: Sequence[str], seed: int) -> Iterator[_Arm]:
    """Every kind at one share; the arms are compared, so their sets, shares and shifts are made sure of."""
    draw = [seed, round(1e6 * share)]
    for kind in kinds:
        action, _, how = kind.partition("-")
        swap = transpose(len(ids), share, how, seed=draw)
        moved, mean_shift = swap.moved, swap.mean_shift
        assert not moved[0], "position 0 moved"
        assert abs(swap.share - share) * len(ids) <= 1 + 1e-9, "the share asked for was missed"
        if action == "swap":
            yield _Arm(kind, swap.apply(ids), nullcontext(), moved, swap.share, mean_shift)
            continue
        under, shifts = _shifted(lm, action, swap, draw)
        for of_layer in shifts:
            assert np.array_equal(of_layer != 0, moved), "other tokens are shifted than change places"
            assert np.abs(of_layer).sum() == np.abs(swap.displacement).sum(), "the mean |shift| is another"
        yield _Arm(kind, ids, under.on(lm), moved, swap.share, mean_shift)


def _shifted(
    lm: LM, action: str, swap: Transposition, draw: Sequence[int]
) -> tuple[ShiftPositions, list[NDArray[np.int64]]]:
    """Tokens shifted as far as they moved in ``swap``, to either side: once, or in every layer anew."""
    sizes = np.abs(swap.displacement)
    if action == "jitter":
        shifts = signed(sizes, [*draw, 1])
        return ShiftPositions("jitter", shifts=shifts.tolist()), [shifts]
    by_layer = {layer.layer: signed(sizes, [*draw, 2, layer.layer]) for layer in lm.anatomy.rotary}
    given = {layer: shifts.tolist() for layer, shifts in by_layer.items()}
    return ShiftPositions("rotate", shifts=given), list(by_layer.values())


def _defined(lm: LM, kind: str) -> bool:
    if kind.startswith("jitter"):
        return not no_jitter(lm)
    return bool(lm.anatomy.rotary) or not kind.startswith("rotate")


def _texts(lm: LM, options: Options) -> list[Text]:
    of_size = PLANS[options.size]
    tokens = min(options.n_tokens, of_size.tokens or options.n_tokens)
    return texts.texts(lm, replace(options, texts=options.texts or of_size.texts, tokens=tokens))


def _nll(lm: LM, ids: Sequence[int]) -> NDArray[np.float64]:
    """Nats of every token ``[tokens]``; the first has none."""
    of_text: NDArray[np.float64] = token_nll(lm, torch.tensor([list(ids)]))[0].numpy()
    return np.concatenate([[np.nan], of_text])


def _mean(x: NDArray[np.float64]) -> float:
    return float(x.mean()) if len(x) else float("nan")
