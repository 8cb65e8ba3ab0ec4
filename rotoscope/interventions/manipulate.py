"""What noise and shuffling do to a state, with randomness that belongs to a token and a layer.

A token's key depends on the ids of its row up to and including it, padding left out: the same token gets the same noise
in a batch or alone, with a cache or without, and whatever follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rotoscope.interventions.base import seed_of

Keys = list[list[int]]
"""One number per row and token."""


def prefix_keys(ids: Tensor, real: Tensor, before: Sequence[int] | None = None) -> Keys:
    """A key per token of ``ids`` ``[batch, tokens]`` from all real ids of its row so far.

    ``before`` gives each row's key of the last token that came earlier, for tokens that follow a cache.
    """
    keys: Keys = []
    for row, there, key in zip(ids.tolist(), real.tolist(), before or [0] * len(ids), strict=True):
        own = []
        for token, is_real in zip(row, there, strict=True):
            key = seed_of(key, token) if is_real else key
            own.append(key)
        keys.append(own)
    return keys


def noised(h: Tensor, where: Tensor, keys: Keys, *salt: object) -> Tensor:
    """``v / ‖v‖ · ‖h‖`` with ``v ~ N(0, I)`` in place of the states ``h`` ``[batch, tokens, width]`` at ``where``.

    ``salt`` (seed, layer) tells apart what is drawn for the same token. Ben-Artzy & Schwartz 2024, section 3.
    """

    def draw(state: Tensor, generator: torch.Generator) -> Tensor:
        exact = state if state.dtype == torch.float64 else state.float()  # squares of half precision overflow
        v = torch.randn(state.shape, generator=generator, dtype=torch.float32).to(exact)
        scaled: Tensor = v / v.norm() * exact.norm()
        return scaled.to(state.dtype)

    return _each(h, where, keys, salt, draw)


def shuffled(h: Tensor, where: Tensor, keys: Keys, *salt: object) -> Tensor:
    """The states with each one's own coordinates permuted at ``where``."""

    def permute(state: Tensor, generator: torch.Generator) -> Tensor:
        return state[torch.randperm(len(state), generator=generator).to(state.device)]

    return _each(h, where, keys, salt, permute)


def _each(
    h: Tensor, where: Tensor, keys: Keys, salt: tuple[object, ...], act: Callable[[Tensor, torch.Generator], Tensor]
) -> Tensor:
    out = h.clone()
    for row, token in where.nonzero().tolist():
        generator = torch.Generator().manual_seed(seed_of(keys[row][token], *salt))
        out[row, token] = act(h[row, token], generator)
    return out
