"""What interventions at the input of one layer share: which tokens they change, and in which forwards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput
from rotoscope.interventions.base import Intervention, Run
from rotoscope.interventions.manipulate import Keys, prefix_keys
from rotoscope.interventions.redo import Redo
from rotoscope.model.forwards import Forward, around
from rotoscope.model.layers import at_boundary, decoder_layers

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

SCOPES = ("prompt", "all-previous")

Act = Callable[[Tensor], Tensor | None]
"""Sees a boundary ``h[k]`` and may return another in its place."""


@dataclass(frozen=True)
class AtLayer(Intervention):
    """A change of the previous tokens' states at the input of layer ``layer``, 0 … L; at L nothing changes.

    Parameters
    ----------
    layer : int
        The layer, counted from 0.
    scope : str
        Which tokens count as previous. ``prompt``: all of the prompt's but its last; what is generated runs normally.
        Where there is no cache, so that a forward does not tell where its prompt ends, ``on(lm, prompt=P)`` has to.
        ``all-previous``: in every forward, also one with a cache, all tokens but the last.
    exempt_first : bool
        Leave position 0 as it is.
    """

    layer: int
    scope: str = "prompt"
    exempt_first: bool = False

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise BadInput(f"scope is one of {', '.join(SCOPES)}, not {self.scope!r}")

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        layers = decoder_layers(lm.model)
        if at_end(layers, self.layer, run, stack):
            return
        if self.scope == "all-previous":
            stack.enter_context(around(lm.model, Redo(stack)))
        for k, act in self.acts(run, len(layers)).items():
            stack.enter_context(at_boundary(layers, k, act))

    @abstractmethod
    def acts(self, run: Run, layers: int) -> Mapping[int, Act]:
        """What to do at which boundaries of a model of so many layers."""

    def previous(self, run: Run) -> Tensor:
        """Which tokens of the forward in progress are to be changed, boolean ``[batch, tokens]``."""
        forward: Any = run.forward
        real: Tensor = forward.real
        where: Tensor = real & ~forward.last
        if self.scope == "prompt":
            end = run.prompt if run.prompt is not None else (real.shape[1] if forward.past == 0 else 0)
            here = max(0, end - forward.past)  # how many of the forward's columns are prompt
            prompt = real & (torch.arange(real.shape[1], device=real.device) < here)
            last = prompt & (prompt.flip(-1).cumsum(-1).flip(-1) == 1)
            where = prompt & ~last if here <= real.shape[1] else prompt
        return where & ~forward.first if self.exempt_first else where


@dataclass(frozen=True)
class Redrawn(AtLayer):
    """A change that draws new states for single tokens.

    Parameters
    ----------
    seed : int
        What is drawn for a token depends on this, on the layer, and on the ids of its row up to that token: not on
        what stands beside or after it, nor on whether there is a cache.
    """

    seed: int = 0

    @abstractmethod
    def change(self, h: Tensor, where: Tensor, keys: Keys, *salt: object) -> Tensor:
        """States ``[batch, tokens, width]``, changed at ``where``."""

    def acts(self, run: Run, layers: int) -> Mapping[int, Act]:
        tokens = TokenKeys()

        def act(h: Tensor) -> Tensor | None:
            forward: Any = run.forward
            keys, where = tokens.of(forward), self.previous(run).to(h.device)
            if not bool(where.any()):
                return None
            run.fired += 1
            if h.ndim == 3:
                return self.change(h, where, keys, self.seed, self.layer)
            streams = side_by_side(h, where)
            changed = [self.change(x, where, keys, self.seed, self.layer, i) for i, x in enumerate(streams)]
            return as_it_was(torch.stack(changed), h, where)

        return {self.layer: act}


def side_by_side(h: Tensor, where: Tensor) -> Tensor:
    """A boundary as ``[batch, tokens, width]``, or ``[streams, …]`` of a model that carries several streams.

    Models hold them in front of ``[batch, tokens]``, the shape of ``where``, or behind.
    """
    return h.movedim(2, 0) if h.ndim > 3 and h.shape[:2] == where.shape else h


def as_it_was(streams: Tensor, h: Tensor, where: Tensor) -> Tensor:
    """Streams in the order in which ``h`` has them."""
    return streams.movedim(0, 2) if h.ndim > 3 and h.shape[:2] == where.shape else streams


class TokenKeys:
    """The keys of all tokens so far, row by row; tokens that are brought again replace those that they were."""

    def __init__(self) -> None:
        self._rows: Keys = []

    def of(self, forward: Forward) -> Keys:
        """The keys of a forward's own tokens."""
        if forward.ids is None:
            raise BadInput("noise and shuffling depend on token ids: give the model input_ids, not inputs_embeds")
        past, batch = forward.past, len(forward.ids)
        known = len(self._rows) == batch and all(len(row) >= past for row in self._rows)
        earlier = [row[:past] for row in self._rows] if known else [[0] * past for _ in range(batch)]
        keys = prefix_keys(forward.ids, forward.real, [row[-1] if row else 0 for row in earlier])
        self._rows = [row + own for row, own in zip(earlier, keys, strict=True)]
        return keys


def check_layer(k: int, layers: int) -> None:
    """Raise `BadInput` where a model of so many layers has no boundary ``k``."""
    if not isinstance(k, Integral):
        raise BadInput(f"a layer is a whole number from 0 to {layers}, not {k!r}")
    if not 0 <= k <= layers:
        raise BadInput(f"there is no layer {k}: choose 0 to {layers}, where {layers} changes nothing")


def at_end(layers: nn.ModuleList, k: int, run: Run, stack: ExitStack) -> bool:
    """Whether ``k`` is L, where nothing is to change; then every forward counts as a change by nothing.

    Raises
    ------
    BadInput
        If there is no such ``k``.
    """
    check_layer(k, len(layers))
    if k == len(layers):
        stack.enter_context(at_boundary(layers, k, counting(run)))
    return k == len(layers)


def counting(run: Run) -> Act:
    """Changes nothing and counts."""

    def act(h: Tensor) -> None:
        run.fired += 1

    return act
