"""Claim M4: does breaking massive values cost contextual tasks more than parametric ones? (Jin et al. 2025)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from rotoscope.model.lm import LM
from rotoscope.results import Claim, not_tested
from rotoscope.stats import intervals, paired
from rotoscope.stats.intervals import Interval
from rotoscope.studies import disruption_tables
from rotoscope.studies.arms import CLEAN, CONTROL, EVERYWHERE, MASSIVE, PAIRS, SHORTER, TAUGHT, grid
from rotoscope.studies.disruption_tables import same_items
from rotoscope.studies.items import asked
from rotoscope.studies.judge import Condition, Ruling, claim, reasons, scaled
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import Options
from rotoscope.tasks import find

FEWEST = {"quick": 60}
FEWEST_OTHERWISE = 100
FEWEST_BESIDE = 20
RULE = (
    "Contextual − parametric loss on pairs of tasks that differ only in where the fact is (144 tokens of filler), "
    "top-1 dims of Q and K replaced by their token mean, position 0 exempt, n ≥ 100 (60 quick). Loss = (clean − "
    "changed) / (clean − chance). (a) lower bound > .20; (b) contextual loss beyond the change-matched control's, "
    "lower bound > 0; (c) (a) also with all positions. All holds; (a) and one of (b), (c), or lower bound in (0, "
    ".20] with (b), partly; else fails. Not tested where a clean accuracy is not above chance."
)


@dataclass(frozen=True)
class Pair:
    """Correctness by arm of two tasks of one kind, the same items in every arm, and their chance levels."""

    names: tuple[str, str]
    parametric: Mapping[str, np.ndarray]
    contextual: Mapping[str, np.ndarray]
    chance: tuple[float, float]

    def difference(self, arm: str, seed: int) -> tuple[float, Interval]:
        """Contextual minus parametric loss under an arm; the two tasks' items are drawn apart."""
        groups = [(of[CLEAN], of[arm]) for of in (self.parametric, self.contextual)]

        def statistic(p: Any, p1: Any, c: Any, c1: Any) -> Any:
            return (c - c1) / (c - self.chance[1]) - (p - p1) / (p - self.chance[0])

        means = [np.mean(x) for group in groups for x in group]
        return float(statistic(*map(np.asarray, means))), intervals.means_bootstrap(
            *groups, statistic=statistic, seed=seed
        )

    def beyond_control(self, seed: int) -> tuple[float, Interval]:
        """Contextual loss under the massive arm minus that under its control, on the same items."""
        group = tuple(self.contextual[arm] for arm in (CLEAN, MASSIVE, CONTROL))

        def statistic(c: Any, massive: Any, control: Any) -> Any:
            return (control - massive) / (c - self.chance[1])

        means = map(np.asarray, map(np.mean, group))
        return float(statistic(*means)), intervals.means_bootstrap(group, statistic=statistic, seed=seed)


def finish(
    lm: LM, options: Options, done: Mapping[str, Tables]
) -> tuple[dict[str, pd.DataFrame], Claim, dict[str, float]]:
    """Tables, the claim, and its numbers for the headline, from the finished cells."""
    of_size = grid(options)
    if of_size is None:
        return {}, not_tested("M4", "the disruption grid was left out (--disrupt none)", RULE), {}
    _, unasked = asked(lm, of_size.tasks, options.seed)
    found = disruption_tables.tables(lm, of_size, done, options.seed)
    return found, *m4(found.get("items"), options.size, options.seed, unasked)


def m4(items: pd.DataFrame | None, size: str, seed: int, unasked: Mapping[str, str]) -> tuple[Claim, dict[str, float]]:
    """The verdict, and its numbers for the headline.

    Parameters
    ----------
    items : pandas.DataFrame or None
        The table of that name; None if nothing was run.
    unasked : mapping
        Why tasks were left out, by spec.
    """
    if items is None:
        return not_tested("M4", next(iter(unasked.values()), "no task was run"), RULE), {}
    pairs, said = [], []
    for names in PAIRS:
        if names == TAUGHT and find(TAUGHT[0]).name not in set(items.task):
            continue  # only the controls were taught it
        pair, reason = _pair(items, names, FEWEST.get(size, FEWEST_OTHERWISE), unasked)
        if pair is not None:
            pairs.append(pair)
        said.append(reason)
    if not pairs:
        return not_tested("M4", "; ".join(filter(None, said)), RULE), {}
    beside, _ = _pair(items, SHORTER, FEWEST_BESIDE, unasked)
    others = [*pairs[1:], *([] if beside is None else [beside])]
    return _judge(pairs[0], others, [reason for reason in said if reason], seed)


def _judge(pair: Pair, others: list[Pair], said: list[str], seed: int) -> tuple[Claim, dict[str, float]]:
    """The verdict on the first pair that could be tested; another pair's numbers stand beside it."""
    value, interval = pair.difference(MASSIVE, seed)
    everywhere, control = pair.difference(EVERYWHERE, seed), pair.difference(CONTROL, seed)
    beyond = pair.beyond_control(seed)
    beside = [_in_words(other, seed) for other in others]

    def decide(factor: float) -> Ruling:
        a = Condition("(a) contextual − parametric loss", value, interval, ">", scaled(0.20, factor))
        b = Condition("(b) contextual loss beyond the change-matched control", *beyond, ">", 0.0)
        c = Condition("(c) the same with all positions", *everywhere, ">", scaled(0.20, factor))
        why = "; ".join([reasons(a, b, c), *beside, *said])
        if a.met and b.met and c.met:
            return "holds", why
        if (a.met and (b.met or c.met)) or (interval.low > 0 and b.met):
            return "partly", why
        return "fails", why

    tasks = zip(pair.names, (pair.parametric, pair.contextual), pair.chance, strict=True)
    losses = {name: 1 - paired.retention(of[CLEAN], of[MASSIVE], chance, seed)[0] for name, of, chance in tasks}
    n = min(len(pair.parametric[CLEAN]), len(pair.contextual[CLEAN]))
    found = claim(
        "M4", RULE, decide, value=value, interval=interval, null=control[0],
        null_name="the same under the change-matched control", n=f"{n} items each of {' and '.join(pair.names)}",
    )  # fmt: skip
    return found, {f"loss of {name} without top-1 dims": loss for name, loss in losses.items()}


def _in_words(pair: Pair, seed: int) -> str:
    value, (low, high) = pair.difference(MASSIVE, seed)
    return f"{' / '.join(pair.names)}: {value:.2f} [{low:.2f}, {high:.2f}]"


def _pair(
    items: pd.DataFrame, names: tuple[str, str], fewest: int, unasked: Mapping[str, str]
) -> tuple[Pair | None, str]:
    """A pair of tasks that can be judged, or why it cannot."""
    by_task, chances = [], []
    for spec in names:
        if spec in unasked:
            return None, unasked[spec]
        name, _, variant = spec.partition(":")
        of_task = items[(items.task == name) & (items.variant == variant)]
        arms = dict(list(of_task.groupby("arm")))
        if missing := [arm for arm in (CLEAN, MASSIVE, CONTROL, EVERYWHERE) if arm not in arms]:
            return None, f"{spec} was not run" + ("" if CLEAN in missing else f" under {missing[0]}")
        clean = arms[CLEAN]
        if len(clean) < fewest:
            return None, f"{spec} has {len(clean)} items, fewer than {fewest}"
        chance = float(clean.chance.mean())
        accuracy, (low, _) = paired.accuracy(clean.correct)
        if low <= chance:
            return None, f"{spec}: clean accuracy {accuracy:.2f} is not above chance ({chance:.2f})"
        by_task.append({arm: same_items(clean, rows)[1].correct.to_numpy(float) for arm, rows in arms.items()})
        chances.append(chance)
    return Pair(names, by_task[0], by_task[1], (chances[0], chances[1])), ""
