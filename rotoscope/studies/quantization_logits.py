"""What quantization does to the products of queries and keys: how much of it sits in massive channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import pandas as pd
import torch
from torch import Tensor

from rotoscope.model.call import AttentionCall
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.tap import tap
from rotoscope.studies.quantization_channels import Masks

TOKENS = 128
"""Leading tokens of a text whose products are looked at."""
COLUMNS = ["layer", "massive", "other", "total", "signal"]


@dataclass(frozen=True)
class Products:
    """Queries and keys of one layer ``[heads, tokens, dims]``, and the factor of their products."""

    q: Tensor
    k: Tensor
    scaling: float

    def logits(self, dims: Tensor) -> Tensor:
        """The part of all logits that some dims ``[heads, dims]`` make: ``[heads, tokens, tokens]``."""
        group = len(self.q) // len(self.k)
        return (self.q * dims[:, None]) @ self.k.repeat_interleave(group, 0).transpose(1, 2) * self.scaling


class Kept:
    """Keeps queries and keys of the leading tokens of a text, by layer: of the first attention call of each."""

    def __init__(self, tokens: int = TOKENS):
        self._tokens = tokens
        self.layers: dict[int, Products] = {}

    def observe(self, call: AttentionCall) -> None:
        if call.index == 0:
            q, k = (x[0, :, : self._tokens].detach().float().cpu() for x in (call.q, call.k))
            self.layers[call.layer] = Products(q, k, call.scaling)


@torch.no_grad()
def clean(lm: LM, ids: Sequence[int]) -> dict[int, Products]:
    """Queries and keys of a text's leading tokens, remembered: every method is compared with them."""
    known = _KNOWN.setdefault(lm.model, {})
    key = tuple(ids[:TOKENS])
    if key not in known:
        batch = torch.tensor([list(key)], device=lm.device)
        with evaluating(lm.model), tap(lm, kept := Kept()):
            lm.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)
        known[key] = kept.layers
    return known[key]


def errors(before: Mapping[int, Products], after: Mapping[int, Products], masks: Masks) -> pd.DataFrame:
    """By layer, the root mean square over heads and causal pairs of what changed in the logits.

    Parameters
    ----------
    before, after
        Queries and keys of the same tokens.
    masks
        The massive channels. A head's are those of its queries and those of its keys.

    Returns
    -------
    pandas.DataFrame
        layer, massive (the change in what massive channels add), other (in what the others do), total, signal (the
        logits themselves).
    """
    return pd.DataFrame(_rows(before, after, masks), columns=COLUMNS)


def _rows(before: Mapping[int, Products], after: Mapping[int, Products], masks: Masks) -> Iterator[tuple[Any, ...]]:
    for layer, was in before.items():
        now = after[layer]
        group = len(was.q) // len(was.k)
        mine = masks[layer]["q"] | masks[layer]["k"].repeat_interleave(group, 0)
        clean_parts = [was.logits(dims) for dims in (mine, ~mine)]
        massive, other = (now.logits(dims) - x for dims, x in zip((mine, ~mine), clean_parts, strict=True))
        yield layer, *(_rms(x) for x in (massive, other, massive + other, clean_parts[0] + clean_parts[1]))


def _rms(logits: Tensor) -> float:
    length = logits.shape[-1]
    pairs = logits.tril().double().square().sum() / (len(logits) * length * (length + 1) / 2)
    return float(pairs.sqrt())


_KNOWN: WeakKeyDictionary[Any, dict[tuple[int, ...], dict[int, Products]]] = WeakKeyDictionary()
