"""What each size of the depth study runs: tasks, depths of each manipulation, swap pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rotoscope.studies.options import Options
from rotoscope.tasks import find

EPSILON = 0.05
"""A loss of this share of items, at its upper bound, is the largest that counts as none."""
NATS = 0.1
"""The same for the gold answer's log-likelihood, where there are too few items for accuracy to tell."""
ENOUGH = 100
FEWEST, FEWEST_QUICK = 100, 64
NOISE_BUT_0 = "noise-but-0"


@dataclass(frozen=True)
class Plan:
    """Items of each task, pairs of each swap set, whether noise and swap take 10 depths or all, and what else is tried:
    shuffling, and noise with position 0 exempt."""

    tasks: Mapping[str, int]
    pairs: int
    some: int | None = 10
    shuffle: bool = False
    exempt: bool = True


PLANS = {
    "quick": Plan({"capitals": 64}, pairs=40, exempt=False),
    "standard": Plan(
        {"capitals": 100, "arithmetic:shots=1": 40, "counterfactual_capitals": 40, "passkey:tokens=256": 20}, pairs=60
    ),
    "full": Plan(
        {
            "capitals": 100,
            "arithmetic:shots=1": 100,
            "counterfactual_capitals": 100,
            "key_value": 100,
            "passkey:tokens=256": 40,
        },
        pairs=120,
        some=None,
        shuffle=True,
    ),
}


def plan(options: Options) -> Plan:
    """The size's plan with the user's own tasks and limit."""
    of_size = PLANS[options.size]
    n = FEWEST_QUICK if options.size == "quick" else FEWEST
    tasks = {find(text).spec: n for text in options.tasks} if options.tasks else of_size.tasks
    limit = options.limit or 10**9
    bounded = {spec: min(n, limit) for spec, n in tasks.items()}
    return Plan(bounded, min(of_size.pairs, limit), of_size.some, of_size.shuffle, of_size.exempt)


def depths(layers: int, some: int | None) -> list[int]:
    """Depths below ``layers``: all, or so many spread evenly over them, 0 and the deepest among them."""
    if some is None or some >= layers:
        return list(range(layers))
    return sorted({round(i * (layers - 1) / (some - 1)) for i in range(some)})


def manipulations(of_size: Plan, layers: int, spec: str) -> dict[str, Sequence[int]]:
    """Depths of each manipulation that a task is swept with."""
    every, few = depths(layers, None), depths(layers, of_size.some)
    out: dict[str, Sequence[int]] = {"freeze": every, "skip": every, "noise": few}
    if of_size.shuffle:
        out["shuffle"] = few
    if of_size.exempt and spec == "capitals":
        out[NOISE_BUT_0] = few
    return out
