"""Which channels of queries and keys have massive values, and as many random ones to compare them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rotoscope.interventions.base import seed_of
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.projections import Projection, projections, row_masks
from rotoscope.model.tap import tap
from rotoscope.observers import Moments

LAMBDA = 5.0
Masks = dict[int, dict[str, Tensor]]
"""By layer, for ``q`` and ``k``: boolean ``[heads, head_dim]``."""


@dataclass(frozen=True)
class Channels:
    """Massive channels of every head, and the energy that they hold.

    Attributes
    ----------
    masks
        The dims at ``R > 5`` and the largest one, each with its rotation partner; at most half of a head's.
    units
        By layer, the unit that each dim belongs to ``[head_dim]``: a rotated pair, or the dim alone.
    energy
        By layer, the mean over key heads of the energy share of the massive channels among all.
    """

    masks: Masks
    units: Mapping[int, Tensor]
    energy: Mapping[int, float]

    def random(self, seed: int) -> Masks:
        """As many channels of every head, drawn from the others, pairs for pairs."""
        return {
            layer: {name: _drawn(mask, self.units[layer], seed_of(seed, layer, name)) for name, mask in of.items()}
            for layer, of in self.masks.items()
        }

    def layers(self, count: int) -> tuple[int, ...]:
        """The layers whose massive channels hold the largest share of their keys' energy."""
        return tuple(sorted(sorted(self.energy, key=lambda layer: -self.energy[layer])[:count]))

    def random_layers(self, count: int, seed: int) -> tuple[int, ...]:
        """As many others, where there are enough."""
        first = set(self.layers(count))
        others = [layer for layer in self.energy if layer not in first]
        pool = others if len(others) > count else list(self.energy)
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed_of(seed, "layers")))
        return tuple(sorted(pool[i] for i in order[:count].tolist()))


def find(lm: LM, some: Sequence[Sequence[int]]) -> Channels:
    """The massive channels of a model, from its root mean squares over some texts; remembered."""
    known = _FOUND.setdefault(lm.model, {})
    key = tuple(map(tuple, some))
    if key not in known:
        known[key] = _find(lm, some)
    return known[key]


def _find(lm: LM, some: Sequence[Sequence[int]]) -> Channels:
    moments = Moments()
    with torch.no_grad(), evaluating(lm.model), tap(lm, moments):
        for ids in some:
            batch = torch.tensor([list(ids)], device=lm.device)
            lm.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)
    rms = {layer: {name: of[name].cpu() for name in "qk"} for layer, of in moments.rms.items()}
    units = {
        a.layer: _units(a.rotation.pair_of_dim() if a.rotation else None, a.head_dim) for a in lm.anatomy.attention
    }
    masks = {layer: {name: massive(x, units[layer]) for name, x in of.items()} for layer, of in rms.items()}
    energy = {}
    for layer, of in rms.items():
        squares = of["k"].square()
        energy[layer] = float((squares * masks[layer]["k"]).sum() / squares.sum())
    return Channels(masks, units, energy)


def massive(rms: Tensor, units: Tensor) -> Tensor:
    """The massive dims of each head ``[heads, dims]``: whole units, the largest ratios first, at most half of all."""
    ratio = rms / rms.mean(-1, keepdim=True).clamp_min(torch.finfo(rms.dtype).tiny)
    sizes = torch.bincount(units)
    of_unit = torch.full((len(ratio), len(sizes)), -torch.inf, dtype=ratio.dtype)
    of_unit = of_unit.scatter_reduce(1, units.expand(len(ratio), -1), ratio, "amax")
    order = of_unit.argsort(1, descending=True)
    fits = sizes[order].cumsum(1) <= len(units) // 2
    fits[:, 0] = True
    chosen = (of_unit.gather(1, order) > LAMBDA) & fits
    chosen[:, 0] = True
    return torch.zeros_like(chosen).scatter(1, order, chosen)[:, units]


def rows(lm: LM, masks: Masks) -> dict[str, Tensor]:
    """The rows of the linear layers that make these channels, by the layer's name.

    Raises
    ------
    Refused
        If they cannot be told.
    """
    known = _PROJECTIONS.setdefault(lm.model, [])
    if not known:
        known.append(projections(lm))
    return row_masks(known[0], lm, masks)


_FOUND: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], ...], Channels]] = WeakKeyDictionary()
_PROJECTIONS: WeakKeyDictionary[Any, list[dict[int, dict[str, Projection]]]] = WeakKeyDictionary()


def _units(pairs: object, width: int) -> Tensor:
    """A number for each rotated pair and each dim that does not rotate, by dim."""
    pair = torch.full((width,), -1) if pairs is None else torch.as_tensor(pairs)
    named = torch.where(pair >= 0, pair, width + torch.arange(width))
    numbers: Tensor = named.unique(return_inverse=True)[1]
    return numbers


def _drawn(mask: Tensor, units: Tensor, seed: int) -> Tensor:
    """For each head as many dims as ``mask`` has, of the others: units of the same sizes, as far as there are some."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.bincount(units)
    out = torch.zeros_like(mask)
    for head, own in enumerate(mask):
        taken = torch.isin(torch.arange(len(sizes)), units[own])
        for size in sizes.unique():
            count = int((taken & (sizes == size)).sum())
            out[head] |= torch.isin(units, _some(~taken & (sizes == size), count, generator))
        lacking = int(own.sum() - out[head].sum())
        out[head, _some(~own & ~out[head], lacking, generator)] = True
    return out


def _some(free: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` of the places where ``free``, at random."""
    at = free.nonzero()[:, 0]
    return at[torch.randperm(len(at), generator=generator)[:count]]
