"""Claim M6: do quantizers that spare massive values keep contextual ability best? (Jin et al. 2025)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from rotoscope.results import Claim, Verdict, not_tested
from rotoscope.stats import intervals, paired
from rotoscope.stats.intervals import Interval
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled
from rotoscope.studies.quantization_plan import SMOOTHED
from rotoscope.tasks import find

LOSES = 0.05
"""Nats an answer; where plain rounding loses no more there is nothing to protect."""
FEWEST_SEEDS, FEWEST_ITEMS = 5, 20
RULE = (
    "At widths where plain RTN loses > .05 nats on the right answers of the contextual task: −log-probability with "
    "random channels left exact − with massive ones, equal bits, ≥ 5 seeds, mean over seeds and these widths per item; "
    "interval over items. Lower bound > 0 and larger than on the parametric task (lower bound of the difference > 0) "
    "holds, as it does if the same is true of AWQ and SmoothQuant against RTN of the same grid; better but not "
    "specific to context partly; interval includes or is below 0 fails. Not tested where nothing loses, or where the "
    "weights lie on the width's grid already."
)


@dataclass(frozen=True)
class Gains:
    """What sparing massive channels gains over sparing random ones, per item.

    Attributes
    ----------
    contextual, parametric
        Nats by item, mean over widths; None where there is no such task.
    by_width
        By width, the mean on the contextual task, the least and the most of a seed, and the mean on the other task.
    """

    contextual: np.ndarray
    parametric: np.ndarray | None
    by_width: Mapping[str, tuple[float, ...]]


def m6(
    clean: pd.DataFrame, protected: pd.DataFrame, methods: pd.DataFrame, on_grid: Mapping[str, str], seed: int,
    why_not: str = "",
) -> tuple[Claim, dict[str, float]]:  # fmt: skip
    """The verdict, and its numbers for the headline.

    Parameters
    ----------
    clean : pandas.DataFrame
        Items of the model as it is: spec, id, correct, logprob, chance.
    protected : pandas.DataFrame
        The same of every width, with method, arm (plain, massive, random), draw.
    methods : pandas.DataFrame
        The same of every method, with method.
    on_grid : mapping
        Why a width or a method cannot be ranked, by its name.
    why_not : str
        Why nothing was run, where nothing was.
    """
    contextual, reason = _task(clean, "contextual")
    if contextual is None:
        return not_tested("M6", why_not or reason, RULE), {}
    parametric, beside = _task(clean, "parametric")
    tasks = (contextual, parametric)
    losses, left_out = _losses(clean, protected, contextual, on_grid)
    said = "; ".join(filter(None, (*left_out, beside)))
    if not losses:
        return not_tested("M6", "; ".join(filter(None, (why_not or "no width was run", said))), RULE), {}
    of_methods = _Methods(clean, methods, tasks, on_grid, seed)

    def decide(factor: float) -> Ruling:
        widths = [width for width, loss in losses.items() if loss > scaled(LOSES, factor)]
        if not widths:
            return "not tested", f"plain rounding loses no more than {scaled(LOSES, factor):.3g} nats ({_told(losses)})"
        verdict, why = _ruling(_gains(protected, widths, tasks), seed)
        others, also = of_methods.ruling(scaled(LOSES, factor))
        best: Verdict = "holds" if "holds" in (verdict, others) else verdict
        return best, "; ".join(filter(None, (f"plain rounding loses {_told(losses)}", why, also, said)))

    widths = [width for width, loss in losses.items() if loss > LOSES]
    if not widths:
        return not_tested("M6", "; ".join(filter(None, (decide(1.0)[1], said))), RULE), {}
    gains = _gains(protected, widths, tasks)
    value, interval = _mean(gains.contextual, seed)
    null = None if gains.parametric is None else float(gains.parametric.mean())
    found = claim(
        "M6", RULE, decide, value=value, interval=interval, null=null, null_name="the same on the parametric task",
        n=f"{len(gains.contextual)} items of {contextual}, {FEWEST_SEEDS} seeds, widths {', '.join(widths)}",
    )  # fmt: skip
    return found, {"massive-aware gain, contextual (nats)": value}


def _task(clean: pd.DataFrame, knowledge: str) -> tuple[str | None, str]:
    """The first task of a kind that the model does better than chance on, or why there is none."""
    said = []
    for spec, items in clean.groupby("spec", sort=False) if len(clean) else ():
        if find(str(spec)).knowledge != knowledge:
            continue
        chance = float(items.chance.mean())
        if len(items) < FEWEST_ITEMS:
            said.append(f"{spec} has {len(items)} items, fewer than {FEWEST_ITEMS}")
        elif not paired.above_chance(items.correct, chance):
            said.append(f"{spec}: clean accuracy {items.correct.mean():.2f} is not above chance ({chance:.2f})")
        else:
            return str(spec), ""
    return None, "; ".join(said) or f"no {knowledge} task was run"


def _losses(
    clean: pd.DataFrame, protected: pd.DataFrame, spec: str, on_grid: Mapping[str, str]
) -> tuple[dict[str, float], list[str]]:
    """What plain rounding costs a task's right answers, by width that can be judged; and why others cannot."""
    of_task = protected[protected.spec == spec]
    losses, said = {}, []
    for width, some in of_task.groupby("method", sort=False):
        if width in on_grid:
            said.append(f"{width}: {on_grid[str(width)]}")
            continue
        arms = dict(iter(some.groupby("arm")))
        if not {"plain", "massive", "random"} <= set(arms):
            said.append(f"{width} was not run with channels left exact")
        elif (held := arms["random"].draw.nunique()) < FEWEST_SEEDS:
            said.append(f"{width}: {held} seeds of random channels, fewer than {FEWEST_SEEDS}")
        else:
            plain = _by_item(arms["plain"])
            losses[str(width)] = float((_by_item(clean[clean.spec == spec]).reindex(plain.index) - plain).mean())
    return losses, said


def _by_item(items: pd.DataFrame) -> pd.Series:
    return items.set_index("id").logprob


def _gains(protected: pd.DataFrame, widths: Sequence[str], tasks: tuple[str, str | None]) -> Gains:
    contextual, parametric = (_by_width(protected[protected.spec == spec], widths) for spec in tasks)
    by_item = [pd.DataFrame(of).mean(axis=1).to_numpy(float) for of, _ in (contextual, parametric)]
    told = {w: (*contextual[1][w], *([parametric[1][w][0]] if w in parametric[1] else [])) for w in widths}
    return Gains(by_item[0], by_item[1] if len(by_item[1]) else None, told)


def _by_width(items: pd.DataFrame, widths: Sequence[str]) -> tuple[dict[str, pd.Series], dict[str, tuple[float, ...]]]:
    """Gains by item, mean over seeds; and their mean, the least and the most of a seed; by width."""
    gains: dict[str, pd.Series] = {}
    told: dict[str, tuple[float, ...]] = {}
    for width in widths:
        of = items[items.method == width]
        massive = _by_item(of[of.arm == "massive"])
        random = of[of.arm == "random"].pivot(index="id", columns="draw", values="logprob").reindex(massive.index)
        by_seed = -random.sub(massive, axis=0)
        if len(by_seed):
            gains[width], of_seed = by_seed.mean(axis=1), by_seed.mean()
            told[width] = tuple(float(x) for x in (of_seed.mean(), of_seed.min(), of_seed.max()))
    return gains, told


def _ruling(gains: Gains, seed: int) -> Ruling:
    verdict, why = _specific(gains.contextual, gains.parametric, seed)
    told = []
    for width, (mean, low, high, *beside) in gains.by_width.items():
        parametric = f", parametric {beside[0]:.3g}" if beside else ""
        told.append(f"{width} {mean:.3g} (seeds {low:.3g} … {high:.3g}){parametric}")
    return verdict, f"{why}; by width: {'; '.join(told)}"


def _specific(contextual: np.ndarray, parametric: np.ndarray | None, seed: int) -> Ruling:
    """Whether something is gained in context, and more than without."""
    better = Condition("contextual gain", *_mean(contextual, seed), ">", 0.0)
    if not better.met:
        return "fails", reasons(better)
    if parametric is None:
        return "partly", f"{reasons(better)}; no parametric task to compare with"
    more = Condition("contextual − parametric gain", *_difference(contextual, parametric, seed), ">", 0.0)
    low, high = _mean(parametric, seed)[1]
    why = f"{reasons(better, more)}; parametric gain {parametric.mean():.3g} [{low:.3g}, {high:.3g}]"
    return ("holds" if more.met else "partly"), why


@dataclass(frozen=True)
class _Methods:
    """AWQ and SmoothQuant against rounding to the same grid, where all of them were run."""

    clean: pd.DataFrame
    items: pd.DataFrame
    tasks: tuple[str, str | None]
    on_grid: Mapping[str, str]
    seed: int

    def ruling(self, loses: float) -> tuple[str, str]:
        """Whether what the rule asks is true of both, and the numbers; "" where they were not run."""
        verdicts, said = [], []
        for method, plain in SMOOTHED.items():
            there = {*self.items.method} if len(self.items) else set()
            if not {method, plain} <= there or method in self.on_grid:
                return "", ""
            contextual, lost = self._gain(method, plain, self.tasks[0])
            parametric = None if self.tasks[1] is None else self._gain(method, plain, self.tasks[1])[0]
            verdict, why = _specific(contextual, parametric, self.seed)
            if lost <= loses:
                verdict, why = "not tested", f"{plain} loses {lost:.3g}"
            verdicts.append(verdict)
            said.append(f"{method} against {plain}: {why}")
        return ("holds" if all(v == "holds" for v in verdicts) else ""), "; ".join(said)

    def _gain(self, method: str, plain: str, spec: str | None) -> tuple[np.ndarray, float]:
        of_task = self.items[self.items.spec == spec]
        better, worse = (_by_item(of_task[of_task.method == name]) for name in (method, plain))
        before = _by_item(self.clean[self.clean.spec == spec]).reindex(worse.index)
        return (better.reindex(worse.index) - worse).to_numpy(float), float((before - worse).mean())


def _mean(x: np.ndarray, seed: int) -> tuple[float, Interval]:
    return float(x.mean()), intervals.means_bootstrap((x,), statistic=lambda m: m, seed=seed)


def _difference(first: np.ndarray, second: np.ndarray, seed: int) -> tuple[float, Interval]:
    def statistic(a: Any, b: Any) -> Any:
        return a - b

    interval = intervals.means_bootstrap((first,), (second,), statistic=statistic, seed=seed)
    return float(first.mean() - second.mean()), interval


def _told(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{width} {loss:.3g}" for width, loss in losses.items() if not math.isnan(loss))
