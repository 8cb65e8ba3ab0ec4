"""Many quantized caches behind one prefill: the prompt runs once, its keys and values are stored in many ways.

A first pass attends to its own keys and values exactly. So what it leaves in the cache, and everything below the last
prompt token, is the same whatever the cache is going to be stored in; only the tokens behind it run again for each way.
That is the function that :class:`rotoscope.interventions.QuantizeKV` computes in one forward over prompt and answer,
at a small part of its cost.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache

from rotoscope.errors import Refused
from rotoscope.interventions import Run, parse
from rotoscope.interventions.base import chosen_layers
from rotoscope.interventions.kv_cache import Cache
from rotoscope.interventions.quantize_kv import QuantizeKV
from rotoscope.model.anatomy import relative, rounding_floor
from rotoscope.model.call import NewKeys
from rotoscope.model.forwards import CACHES
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.prompts import Prompts, takes
from rotoscope.studies import quantization_channels as channels
from rotoscope.tasks.forward import Row, Scored, batches_of, read

CLEAN = "clean"
"""The same second pass, from the cache as it is."""
FINER = "int8"
"""What protected layers are stored in."""


@dataclass(frozen=True)
class Variant:
    """One way to store a cache.

    Attributes
    ----------
    spec
        A quantizer of caches, as its registry reads it; empty: the cache as it is.
    arm, draw, count
        As in :func:`rotoscope.studies.quantization_cells.protect`; ``plain``: nothing is protected.
    """

    spec: str = ""
    arm: str = "plain"
    draw: int = -1
    count: int = 0

    def parts(self, lm: LM, some: Sequence[Sequence[int]]) -> tuple[QuantizeKV, ...]:
        """The quantizers, each with layers of its own; massive channels are found on some texts."""
        how: Any = parse(self.spec)
        if self.arm == "plain":
            return (how,)
        found = channels.find(lm, some)
        if self.arm in ("massive", "random"):
            masks = found.masks if self.arm == "massive" else found.random(self.draw)
            return (replace(how, keep={layer: of["k"] for layer, of in masks.items()}),)
        kept = found.layers(self.count) if self.arm == "layers" else found.random_layers(self.count, self.draw)
        others = tuple(layer for layer in found.masks if layer not in kept)
        return replace(how, layers=others), replace(how, kind=FINER, layers=kept)


class Stored:
    """Caches as some quantizers hand them back, and what they take: ``run.measured`` is that of the quantizers."""

    def __init__(self, lm: LM, parts: Sequence[QuantizeKV]):
        self.run, self.parts = Run(), tuple(parts)
        attention = [a.layer for a in lm.anatomy.attention]
        self._by_layer = {
            layer: part for part in parts for layer in chosen_layers(part.layers, attention, "layers of attention")
        }

    @property
    def bits(self) -> float:
        """Bits for each value stored so far."""
        return self.run.measured["bits"] / self.run.measured["values"] if self.run.measured else float("nan")

    def through(self, layer: int, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """What is read of keys and values ``[batch, heads, tokens, dims]`` of rows with this ``attention_mask``."""
        how = self._by_layer.get(layer)
        if how is None:
            return k, v
        new = Cache(how, self.run, frozenset((layer,))).write(NewKeys(layer, k, v, mask))
        return new.k, new.v

    def __call__(self, cache: Any, mask: Tensor) -> Any:
        """A copy of a cache, quantized."""
        other = copy.deepcopy(cache)
        for layer in self._by_layer:
            if layer < len(other.layers):  # layers that read the keys of others have no place of their own
                held = other.layers[layer]
                held.keys, held.values = self.through(layer, held.keys, held.values, mask)
        return other


@dataclass(frozen=True)
class Prefilled:
    """A batch whose prompts, but for their last token, have run: what is in the cache then."""

    prompts: Prompts
    cache: Any

    @classmethod
    def of(cls, lm: LM, prompts: Prompts) -> Prefilled:
        """Run the first pass.

        Raises
        ------
        Refused
            If the model's cache does not hold the keys and values that attention reads.
        """
        prompts = prompts.to(lm.device)
        given: dict[str, Any] = {**prompts.arguments(lm.model, 0, prompts.prompt - 1), "use_cache": True}
        # A cache of the model's own drops what falls out of a window; one made without its config keeps all tokens.
        for own in ({}, {_name(lm): DynamicCache()}):
            with torch.no_grad(), evaluating(lm.model):
                out = lm.model(**given, **own)
            found = next((cache for name in CACHES if (cache := getattr(out, name, None)) is not None), None)
            if found is not None and _plain(lm, found, prompts):
                return cls(prompts, found)
        raise Refused(f"the cache of {lm.source} holds something else than the keys and values that it attends to")

    def arguments(self, lm: LM, stored: Stored | None) -> dict[str, Any]:
        """What the model takes for the second pass: from a copy of the cache, quantized or not."""
        start = self.prompts.prompt - 1
        mask = self.prompts.mask[:, :start]
        cache = copy.deepcopy(self.cache) if stored is None else stored(self.cache, mask)
        return {**self.prompts.arguments(lm.model, start), _name(lm): cache, "use_cache": True}


def score(
    lm: LM, rows: Sequence[Row], stores: Mapping[str, Stored | None], batch_tokens: int
) -> dict[str, list[Scored]]:
    """Rows, in their order, from caches stored in several ways; None: as they are.

    Raises
    ------
    Refused
        If the model cannot go on from a filled cache as from its own keys and values.
    """
    check(lm)
    out: dict[str, dict[int, Scored]] = {name: {} for name in stores}
    if len(lm.anatomy.attention) < len(lm.anatomy.layers):
        batch_tokens = 1  # recurrent layers take padding for text
    for batch in batches_of(rows, batch_tokens):
        for name, scored in _batch(lm, [rows[i] for i in batch], stores).items():
            out[name] |= zip(batch, scored, strict=True)
    return {name: [of[i] for i in range(len(rows))] for name, of in out.items()}


@torch.no_grad()
def _batch(lm: LM, rows: Sequence[Row], stores: Mapping[str, Stored | None]) -> dict[str, list[Scored]]:
    """One batch of answers of equal length: its prompts run once."""
    answers = [row.answer[:-1] for row in rows]
    first = Prefilled.of(lm, Prompts.of([row.prompt for row in rows], answers))
    out = {}
    for name, stored in stores.items():
        with evaluating(lm.model):
            logits = lm.model(**first.arguments(lm, stored)).logits
        out[name] = list(read(rows, logits))
    if len(rows) > 1 and any(isnan(scored.logprob) for of in out.values() for scored in of):
        # Some models' eager attention gives NaN of padding in float64.
        singly = [_batch(lm, [row], stores) for row in rows]
        return {name: [one[name][0] for one in singly] for name in stores}
    return out


def check(lm: LM) -> None:
    """See, once, that a second pass from the cache as it is computes what one forward does.

    Raises
    ------
    Refused
        If it does not: some recurrent layers take a second pass for one token.
    """
    if lm.model not in _EXACT:
        ids = [*range(1, _TRIED + 1)]
        prompts = Prompts.of([ids[: _TRIED // 2]], [ids[_TRIED // 2 :]]).to(lm.device)
        first = Prefilled.of(lm, prompts)
        with torch.no_grad(), evaluating(lm.model):
            again = lm.model(**first.arguments(lm, None)).logits
            whole = lm.model(**prompts.arguments(lm.model), use_cache=False).logits[:, -again.shape[1] :]
        _EXACT[lm.model] = relative(again, whole) <= rounding_floor(lm.model, lm.dtype)
    if not _EXACT[lm.model]:
        raise Refused(f"{lm.source} goes on from a filled cache to other logits than in one forward")


_EXACT: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_TRIED = 16


def _plain(lm: LM, cache: Any, prompts: Prompts) -> bool:
    """Whether the cache's layers hold keys and values as attention reads them."""
    layers = getattr(cache, "layers", [])
    batch, tokens = len(prompts.ids), prompts.prompt - 1
    for a in lm.anatomy.attention:
        if a.layer < len(layers):
            shapes = [getattr(getattr(layers[a.layer], name, None), "shape", None) for name in ("keys", "values")]
            if shapes != [(batch, a.kv_heads, tokens, width) for width in (a.head_dim, a.v_head_dim)]:
                return False
    return bool(layers)


def _name(lm: LM) -> str:
    return next(name for name in CACHES if name in takes(lm.model))
