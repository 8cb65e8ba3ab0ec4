"""What observers share: results per layer, and an error where nothing was seen."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from rotoscope.errors import NeverFired
from rotoscope.model.call import AttentionCall

Seen = TypeVar("Seen")


class Keep:
    """Copies what an observer keeps into large blocks of its own, on the CPU.

    Small tensors that outlive a layer, scattered between a forward's activations, keep the heap from being reused and
    cost several times their size in peak memory. Pages of a block cost nothing until they are written.
    """

    def __init__(self, numbers: int = 2**23):
        self._numbers = numbers
        self._free = torch.empty(0, dtype=torch.float64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The same values, float64 or complex128 as they came, in a place that does not move."""
        if x.device.type != "cpu":
            return x
        flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
        if len(flat) > len(self._free):
            self._free = torch.empty(max(self._numbers, len(flat)), dtype=torch.float64)
        mine, self._free = self._free[: len(flat)].copy_(flat), self._free[len(flat) :]
        return torch.view_as_complex(mine.view(*x.shape, 2)) if x.is_complex() else mine.view(x.shape)


class PerLayer(Generic[Seen]):
    """Keeps one reduced value per layer; reading it before any call was seen raises."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}
        self._keep = Keep()

    @property
    def layers(self) -> dict[int, Seen]:
        """What was reduced, by layer.

        Raises
        ------
        NeverFired
            If no attention call was seen.
        """
        if not self._seen:
            raise NeverFired(f"{type(self).__name__} saw no attention call: run the model inside the tap's block")
        return self._seen


def new_keys(x: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """The keys or values that belong to this call's own tokens; a cache puts older ones in front."""
    return x[:, :, -call.q.shape[2] :]
