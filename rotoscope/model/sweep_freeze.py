"""The freeze sweep: from layer k on, previous tokens keep the state that they have at k."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rotoscope.model.fill import filling
from rotoscope.model.forwards import CACHES
from rotoscope.model.layers import at_boundary, decoder_layers
from rotoscope.model.lm import evaluating
from rotoscope.model.prompts import takes
from rotoscope.model.residual import resume, stop
from rotoscope.model.sweep import Logits, Recorded, begin, quickest


def frozen(past: Recorded, ks: Iterable[int]) -> Logits:
    """Hold the previous tokens' ``h[l]`` at ``h[k]`` for every ``l ≥ k``; the last tokens run as ever, for each k.

    Of the previous tokens only keys and values are computed above k, into a cache from which the last tokens then run.
    Layers that mix tokens by other means than attention need all of them: there, each k costs the layers above it in
    full. One k runs at a time, so memory is that of one forward and a cache. ``k = L`` gives the clean logits.

    As in all generation with a cache, a rotary table that changes at some length is taken to be the same with the
    answer as without it.
    """
    for k in past.boundaries(ks):
        yield k, past.clean if k == past.depth else _frozen(past, k)


@torch.no_grad()
def _frozen(past: Recorded, k: int) -> Tensor:
    with evaluating(past.model):
        return quickest(past.lm, "freeze", (_filled, _held))(past, k)


def _filled(past: Recorded, k: int) -> Tensor:
    """The previous tokens fill a cache, the last ones go on from it."""
    model, split = past.model, past.prompts.prompt - 1
    cache: Any = DynamicCache()
    name = next(name for name in CACHES if name in takes(model))
    given: dict[str, Any] = {name: cache, "use_cache": True}
    with ExitStack() as stack:
        stack.enter_context(stop(model, past.depth))
        stack.enter_context(resume(model, k, past.h[k][:, :split]))
        for layer in range(k + 1, past.depth) if past.exempt_first else ():
            act = partial(_exempt, past.prompts.first[:, :split], past.h[layer][:, :split])
            stack.enter_context(at_boundary(decoder_layers(model), layer, act))
        stack.enter_context(filling(model, range(k, past.depth), cache))
        model(**past.prompts.arguments(model, 0, split), **given)
    for layer in range(k):  # bypassed, but models ask the cache of one of them how many tokens came before
        stand_in = cache.layers[k]
        cache.update(stand_in.keys, stand_in.values, layer)
    with resume(model, k, past.h[k][:, split:]):
        return past.answer(split, **given)


def _held(past: Recorded, k: int) -> Tensor:
    """All tokens run, and the previous ones are put back at every layer."""
    with ExitStack() as stack:
        stack.enter_context(begin(past, k, past.h[k]))
        for layer in range(k + 1, past.depth):
            act = partial(_exempt, ~past.changed, held=past.h[k])
            stack.enter_context(at_boundary(decoder_layers(past.model), layer, act))
        return past.answer()


def _exempt(where: Tensor, own: Tensor, held: Tensor) -> Tensor:
    """The tokens' own states where they are exempt, held ones elsewhere."""
    return torch.where(where[..., None].to(held.device), own.to(held), held)
