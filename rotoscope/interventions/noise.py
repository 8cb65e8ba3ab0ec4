"""Noise: random states of the same length in place of the previous tokens' (Ben-Artzy & Schwartz 2024, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rotoscope.interventions.boundary import Redrawn
from rotoscope.interventions.manipulate import Keys, noised


@dataclass(frozen=True)
class Noise(Redrawn):
    """``h[k] ← v / ‖v‖ · ‖h[k]‖`` with ``v ~ N(0, I)`` for the previous tokens, once; later layers run normally.

    The parameters are those of :class:`rotoscope.interventions.boundary.Redrawn`.
    """

    name: ClassVar[str] = "noise"

    def change(self, h: Tensor, where: Tensor, keys: Keys, *salt: object) -> Tensor:
        return noised(h, where, keys, *salt)
