"""Freeze: previous tokens stay at one layer's input in all layers above (Ben-Artzy & Schwartz 2024, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from rotoscope.interventions.base import Run
from rotoscope.interventions.boundary import Act, AtLayer
from rotoscope.model.forwards import Forward


@dataclass(frozen=True)
class Freeze(AtLayer):
    """``h[l] ← h[k]`` of the previous tokens for every layer ``l ≥ k``.

    The last token runs normally and attends to the keys and values that each upper layer makes of the frozen states.
    The parameters are those of :class:`rotoscope.interventions.boundary.AtLayer`.

    Notes
    -----
    Padding among the previous tokens is frozen with them: recurrent layers may see it. Logits at previous tokens mean
    nothing. At ``k = L - 1`` the last token sees no change, since the input of the last
    layer is all that is read of previous tokens.
    """

    name: ClassVar[str] = "freeze"

    def acts(self, run: Run, layers: int) -> Mapping[int, Act]:
        def where() -> Tensor:
            previous, forward = self.previous(run), cast(Forward, run.forward)
            if not bool(previous.any()):
                return previous
            run.fired += 1
            return previous | (~forward.real & (forward.real.flip(-1).cumsum(-1).flip(-1) > 0))

        return holding(self.layer, layers, where)


def holding(k: int, layers: int, where: Callable[[], Tensor]) -> Mapping[int, Act]:
    """What to do at boundaries ``k`` to ``layers - 1`` so that the states at ``where()`` stay what they were at ``k``.

    ``where()`` is asked once a forward for ``[batch, tokens]``.
    """
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(h: Tensor) -> None:
        # a copy: the layer may go on to write into its own
        kept[:] = [(where(), h.clone())]

    def hold(h: Tensor) -> Tensor | None:
        held, state = (x.to(h.device) for x in kept[0])
        if not bool(held.any()):
            return None
        behind = h.ndim - 2 if h.shape[:2] == held.shape else 1  # axes that a token's state has
        return torch.where(held[(..., *[None] * behind)], state, h)

    def release(h: Tensor) -> Tensor | None:
        out = hold(h)
        kept.clear()
        return out

    acts: dict[int, Act] = {k: keep, **dict.fromkeys(range(k + 1, layers), hold)}
    if k + 1 < layers:
        acts[layers - 1] = release
    return acts
