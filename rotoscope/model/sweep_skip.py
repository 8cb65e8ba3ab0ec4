"""The skip sweep: from layer k on, no attention at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from rotoscope.model.layers import at_boundary, decoder_layers
from rotoscope.model.lm import evaluating
from rotoscope.model.residual import resume
from rotoscope.model.sublayer import without_attention
from rotoscope.model.sweep import Logits, Recorded, begin, quickest


def skipped(past: Recorded, ks: Iterable[int], rows: int = 256) -> Logits:
    """Leave out the attention sublayer of every layer from k on, for every token, for each k.

    Without attention no token sees another, so only the last tokens run: the rows of each k join those of smaller k at
    layer k, and each layer runs once on all of them. Layers that mix tokens by other means need all tokens: there, each
    k costs the layers above it in full. ``k = L`` gives the clean logits.

    Parameters
    ----------
    past : Recorded
        The recorded pass.
    ks : iterable of int
        Boundaries.
    rows : int
        Sequences (of ``prompts.last`` tokens) that run at once at most, but one batch at least; so memory is that of a
        forward on as many, with ``rows · prompts.last · vocabulary`` logits.
    """
    ks = past.boundaries(ks)
    some = [k for k in ks if k < past.depth]
    size = max(1, rows // len(past.clean))
    for start in range(0, len(some), size):
        chunk = some[start : start + size]
        yield from zip(chunk, _skipped(past, chunk), strict=True)
    if ks and ks[-1] == past.depth:
        yield past.depth, past.clean


@torch.no_grad()
def _skipped(past: Recorded, ks: Sequence[int]) -> Sequence[Tensor]:
    with evaluating(past.model):
        if quickest(past.lm, "skip", (_joined, _all_tokens)) is _joined:
            return list(_alone(past, ks).tensor_split(len(ks)))
        return [_all_tokens(past, k) for k in ks]


def _alone(past: Recorded, ks: Sequence[int]) -> Tensor:
    """The last tokens of all rows for all ks, one k after the other ``[ks · batch, last, vocabulary]``."""
    model, split = past.model, past.prompts.prompt - 1
    with ExitStack() as stack:
        stack.enter_context(without_attention(model, range(ks[0], past.depth)))
        stack.enter_context(resume(model, ks[0], past.h[ks[0]][:, split:]))
        for k in ks[1:]:
            join = partial(_join, past.h[k][:, split:])
            stack.enter_context(at_boundary(decoder_layers(model), k, join))
        return past.answer(split, past=False)


def _joined(past: Recorded, k: int) -> Tensor:
    return _alone(past, sorted({0, k}))[-len(past.clean) :]


def _all_tokens(past: Recorded, k: int) -> Tensor:
    with without_attention(past.model, range(k, past.depth)), begin(past, k, past.h[k]):
        return past.answer()


def _join(more: Tensor, state: Tensor) -> Tensor:
    return torch.cat([state, more.to(state)])
