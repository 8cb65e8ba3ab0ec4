"""The arms of the disruption grid, and how much of it each size runs (Jin et al. 2025, with controls of our own)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rotoscope.interventions import Disrupt
from rotoscope.interventions.spec import arguments
from rotoscope.studies.options import Options
from rotoscope.tasks import find

CLEAN, MASSIVE, CONTROL, EVERYWHERE = "clean", "top-1", "change-matched", "top-1 all"
NONE = "none"


@dataclass(frozen=True)
class Arm:
    """One way of disrupting, under a short label; ``how`` holds the arguments of `Disrupt`, None for clean."""

    label: str
    how: Mapping[str, Any] | None
    judged: bool = False
    group: str = "grid"

    @property
    def disrupt(self) -> Disrupt | None:
        return None if self.how is None else Disrupt(**self.how)


JUDGED = (
    Arm(CLEAN, None, True),
    Arm(MASSIVE, {}, True),
    Arm(CONTROL, {"selection": "change-matched"}, True),
    Arm(EVERYWHERE, {"positions": "all"}, True),
)
SHOWN = (
    Arm("top-1 only-0", {"positions": "only-0"}),
    Arm("top-2", {"selection": "top-2"}),
    Arm("top-2 all", {"selection": "top-2", "positions": "all"}),
    Arm("pooled top-1 all", {"replacement": "pooled", "positions": "all"}),
    Arm("energy-matched", {"selection": "energy-matched"}),
    Arm("second", {"selection": "second"}),
    Arm("smallest", {"selection": "smallest"}),
    Arm("V top-1", {"targets": "V"}),
)
ONLY_FULL = (
    Arm("pooled top-2 all", {"selection": "top-2", "replacement": "pooled", "positions": "all"}),
    Arm("Q top-1", {"targets": "Q"}),
    Arm("K top-1", {"targets": "K"}),
)
FEW_SHOWN = tuple(arm for arm in SHOWN if arm.label in ("top-2", "V top-1"))
DOSES = (*(("top", n) for n in (1, 2, 4, 8)), *(("lambda", n) for n in range(3, 9)))

JUDGED_FILLER = 144
_IN_CONTEXT = f"capitals_in_context:filler={JUDGED_FILLER}"
_EQUAL = f"capitals:filler={JUDGED_FILLER}:facts=2"
TAUGHT = ("known_values:pairs=1", "key_value:pairs=1")
PAIRS = ((_EQUAL, _IN_CONTEXT), ("cities", "cities_in_context"), TAUGHT)
"""Tasks that differ only in where the fact is: parametric, contextual. The first pair that can be judged is. With two
facts of no use amid its filler, the parametric prompt has the form and about the length of the other."""
SHORTER = (f"capitals:filler={JUDGED_FILLER}", _IN_CONTEXT)
"""The same without those two facts: shown beside the verdict."""


def _both(filler: int, n: int) -> dict[str, int]:
    variant = f":filler={filler}" if filler else ""
    return {f"capitals{variant}": n, f"capitals_in_context{variant}": n}


@dataclass(frozen=True)
class Grid:
    """What a size runs: items of every task under the judged arms, and under the arms that are shown beside them."""

    judged: Mapping[str, int]
    shown: Mapping[str, int]
    arms: tuple[Arm, ...]
    attention_tokens: int = 256
    outputs: int = 3
    output_tasks: int = 3
    curves: Mapping[str, int] = field(default_factory=dict)
    additivity_texts: int = 0

    @property
    def tasks(self) -> dict[str, int]:
        """Every task with the most items that an arm is scored on: all arms take theirs from among them."""
        every = (self.judged, self.shown, self.curves)
        return {spec: max(of.get(spec, 0) for of in every) for spec in dict.fromkeys(s for of in every for s in of)}

    def items(self, arm: Arm) -> Mapping[str, int]:
        """Items of each task that an arm is scored on."""
        return self.judged if arm.judged else self.shown


_SHORT = {"counterfactual_capitals": 60, "cities": 60, "cities_in_context": 60, "passkey": 60}
_ALL = {**_both(0, 60), **_both(48, 60), **_both(JUDGED_FILLER, 60), **_SHORT, "passkey:tokens=512": 20}
GRIDS = {
    "quick": Grid(
        judged={**_both(0, 40), _EQUAL: 60, _IN_CONTEXT: 60, "passkey": 20},
        shown={**_both(0, 30), "passkey": 10},
        arms=FEW_SHOWN,
        attention_tokens=160,
        outputs=1,
        output_tasks=1,
    ),
    "standard": Grid(
        judged={**_both(0, 60), **_both(48, 60), _EQUAL: 100, _IN_CONTEXT: 100, **_SHORT},
        shown={**_both(0, 60), "passkey": 20},
        arms=SHOWN,
    ),
    "full": Grid(
        judged={
            **_ALL,
            _EQUAL: 100,
            _IN_CONTEXT: 100,
            **_both(512, 60),
            "passkey:tokens=1024": 20,
            "key_value": 60,
        },
        shown=_ALL,
        arms=(*SHOWN, *ONLY_FULL),
        attention_tokens=1024,
        curves=_both(48, 60),
        additivity_texts=4,
    ),
}


def grid(options: Options) -> Grid | None:
    """What is run: the size's grid, with the user's own tasks and arms in place of its own; None if nothing is."""
    if options.disrupt == (NONE,):
        return None
    of_size = GRIDS[options.size]
    arms = of_size.arms
    if options.disrupt:
        judged_already = [arm.disrupt for arm in JUDGED]
        arms = tuple(
            arm for text in dict.fromkeys(options.disrupt) if (arm := _own(text)).disrupt not in judged_already
        )
    judged, shown = of_size.judged, of_size.shown
    curves = of_size.curves
    if options.tasks:
        specs = dict.fromkeys(find(text).spec for text in options.tasks)
        n = max(60, *(judged.get(spec, 0) for spec in specs))
        judged = shown = dict.fromkeys(specs, n)
        curves = judged if curves else curves
    elif options.disrupt:
        shown = judged
    limit = options.limit or 10**9
    bounded = ({spec: min(n, limit) for spec, n in items.items()} for items in (judged, shown, curves))
    judged, shown, curves = bounded
    return Grid(
        judged, shown, arms, of_size.attention_tokens, min(of_size.outputs, limit), of_size.output_tasks, curves,
        of_size.additivity_texts,
    )  # fmt: skip


def _own(text: str) -> Arm:
    """An arm as users type it: ``top-2:positions=all``; a first word without ``=`` is the selection."""
    first, _, rest = text.partition(":")
    spec = text if "=" in first else f"selection={first}:{rest}"
    how = arguments(Disrupt, spec)
    Disrupt(**how)
    return Arm(text, how, group="own")
