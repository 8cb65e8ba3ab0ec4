"""Shuffle: each previous token's own coordinates in random order (Ben-Artzy & Schwartz 2024, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rotoscope.interventions.boundary import Redrawn
from rotoscope.interventions.manipulate import Keys, shuffled


@dataclass(frozen=True)
class Shuffle(Redrawn):
    """Permute the coordinates of ``h[k]`` of each previous token, once; later layers run normally.

    The parameters are those of :class:`rotoscope.interventions.boundary.Redrawn`.
    """

    name: ClassVar[str] = "shuffle"

    def change(self, h: Tensor, where: Tensor, keys: Keys, *salt: object) -> Tensor:
        return shuffled(h, where, keys, *salt)
