"""What interventions share: they open on a user's own model, count what they changed, and leave nothing behind."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rotoscope.errors import BadInput, NeverFired
from rotoscope.model.forwards import Forward, around

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

Layers = int | range | Collection[int] | None
"""Some layers: one, several, or None for all."""


@dataclass
class Run:
    """One open block of an intervention.

    Attributes
    ----------
    fired
        How many times something was changed: once per attention call, boundary or forward, whatever is changed.
    prompt
        Leading columns of every batch, padding included, that count as the prompt; None where all that a forward with
        an empty cache brings does.
    forward
        The forward in progress.
    measured
        Sums that an intervention keeps of what it did; see its own documentation.
    """

    prompt: int | None = None
    fired: int = 0
    forward: Forward | None = None
    measured: dict[str, float] = field(default_factory=dict)
    _keys: list[int] = field(default_factory=list, repr=False)

    def follow(self, forward: Forward, proceed: Callable[..., Any]) -> Any:
        """Remember a forward while it runs."""
        self.forward = forward
        if forward.past == 0:
            self._keys = []
        return proceed(**forward.arguments)

    def measure(self, **sums: float) -> None:
        """Add to what was measured."""
        for name, value in sums.items():
            self.measured[name] = self.measured.get(name, 0.0) + value

    def seeds(self, batch: int, *parts: object) -> list[int]:
        """One seed per row of a batch: it depends on the row's prompt and on ``parts``, not on the rows beside it."""
        forward = self.forward
        if not self._keys and forward is not None and forward.ids is not None:
            ids, real = (x[:, : self.prompt].tolist() for x in (forward.ids, forward.real))
            self._keys = [
                seed_of([i for i, there in zip(*row, strict=True) if there]) for row in zip(ids, real, strict=True)
            ]
        return [seed_of(key, *parts) for key in self._keys or [0] * batch]


def seed_of(*parts: object) -> int:
    """A seed that depends on each of some values."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True)
class Intervention(ABC):
    """A change of what a model computes, open on it for the length of a block.

    ``with SomeIntervention(…).on(lm) as run: lm.model.generate(…)``. Interventions are immutable and keep nothing
    between blocks; blocks nest, and the outer one's change comes first.
    """

    name: ClassVar[str]

    @contextmanager
    def on(self, lm: LM, prompt: int | None = None) -> Iterator[Run]:
        """Open the intervention on a model.

        Parameters
        ----------
        lm : LM
            The model; it is left as found on any exit.
        prompt : int, optional
            Leading columns of every batch, padding included, that count as the prompt. By default all tokens that a
            forward with an empty cache brings; give it where a prompt and an answer go through the model at once, or
            where ``generate`` runs without a cache.

        Yields
        ------
        Run
            ``run.fired`` counts the changes.

        Raises
        ------
        BadInput
            If the model has no such layers.
        NeverFired
            If the block ends, without an exception, before anything was changed.
        """
        run = Run(prompt)
        with ExitStack() as stack:
            stack.enter_context(around(lm.model, run.follow))
            self.attach(lm, run, stack)
            yield run
        if not run.fired:
            raise NeverFired(f"{type(self).__name__} changed nothing: run the model inside the block ({self})")

    @abstractmethod
    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        """Put on the model what makes the change; ``stack`` takes it off."""


@dataclass(frozen=True)
class Together(Intervention):
    """Several interventions as one, opened in the order given.

    Parameters
    ----------
    parts
        The interventions. Each must fire by itself.
    """

    name: ClassVar[str] = "together"
    parts: tuple[Intervention, ...]

    @contextmanager
    def on(self, lm: LM, prompt: int | None = None) -> Iterator[Run]:
        run = Run(prompt)
        runs = []
        with ExitStack() as stack:
            for part in self.parts:
                runs.append(stack.enter_context(part.on(lm, prompt)))
            yield run
            run.fired = sum(r.fired for r in runs)
            for own in runs:
                run.measure(**own.measured)

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        for part in self.parts:
            part.attach(lm, run, stack)


def chosen_layers(layers: Layers, there: Collection[int], what: str) -> frozenset[int]:
    """The layers meant by ``layers`` among those that ``there`` are.

    Raises
    ------
    BadInput
        If one of them is not there, or none is meant.
    """
    if layers is None:
        return frozenset(there)
    some = list(layers) if isinstance(layers, Collection) else [layers]
    missing = [layer for layer in some if layer not in there]
    if missing or not some:
        said = f"layer {missing[0]} is none" if missing else "no layer was named"
        raise BadInput(f"{said}: {what} are {_ranges(sorted(there))} on this model")
    return frozenset(some)


def _ranges(numbers: list[int]) -> str:
    """``0-5, 7`` for 0, 1, 2, 3, 4, 5, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"


def uniform(seeds: list[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uniform numbers ``[len(seeds), *shape]``, each row from its own seed; the global random state is not touched."""
    rows = [torch.rand(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows).to(device)
