"""What one layer hands to attention, and who may look at it or change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from rotoscope.errors import BadInput, Refused
from rotoscope.model.rotary import AngleTable, Rotation

Output = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class AttentionCall:
    """What one layer hands to attention, after rotary embedding and query/key norms.

    Attributes
    ----------
    layer : int
        Decoder layer, counted from 0.
    q : torch.Tensor
        Queries, ``[batch, heads, tokens, head_dim]``.
    k, v : torch.Tensor
        Keys and values, ``[batch, kv_heads, keys, head_dim]``, never repeated. With a cache ``keys`` exceeds
        ``tokens`` and the last ``tokens`` keys are the new ones.
    mask : torch.Tensor or None
        Boolean (True = may attend) or additive mask, broadcastable to ``[batch, heads, tokens, keys]``; None means
        causal. An ALiBi bias is part of it, times whatever factor the layer gives it: the softmax sees
        ``logits() + mask``, and `logits` alone is content. A query's bias is known up to a constant only.
    scaling : float
        Factor of ``q · k``.
    module : torch.nn.Module
        The attention module that made the call.
    run : callable
        What computes attention for the call; an editor may replace it.
    extra : mapping
        The remaining arguments of the model's own attention function, passed on untouched.
    index : int
        Which of the layer's calls in this forward it is; some layers make several.
    slots : bool
        Whether the keys are the slots of a static cache, filled or not.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    module: torch.nn.Module = field(repr=False)
    run: Callable[[AttentionCall], Output] = field(repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)
    rotation: Rotation | None = field(default=None, repr=False)
    table: AngleTable | None = field(default=None, repr=False)
    padding: torch.Tensor | None = field(default=None, repr=False)
    index: int = 0
    slots: bool = field(default=False, repr=False)

    @property
    def softcap(self) -> float | None:
        """Bound of the logits, ``softcap · tanh(logit / softcap)``, where the layer has one."""
        return self.extra.get("softcap")

    @property
    def window(self) -> int | None:
        """Width of the sliding window in tokens, where the layer has one."""
        return self.extra.get("sliding_window")

    @property
    def sinks(self) -> torch.Tensor | None:
        """Learned sink logits ``[heads]`` that take part in the softmax without a value."""
        return self.extra.get("s_aux")

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias on the logits that comes beside the mask, ``[batch, heads, tokens, keys]``, where the layer has one."""
        return self.extra.get("position_bias")

    @property
    def tokens(self) -> torch.Tensor:
        """Which of this call's query tokens are real, boolean ``[batch, tokens]`` (False = padding).

        Raises
        ------
        BadInput
            If the model was given a mask that does not say which tokens are padding, or a static cache.
        """
        if self.slots:
            raise BadInput("a static cache hands over empty slots among the keys; observers need a dynamic cache")
        return _real(self.q, self.padding)

    @property
    def first(self) -> torch.Tensor:
        """Which query token is position 0 of its row, boolean ``[batch, tokens]``."""
        real = self.tokens
        if self.k.shape[2] > real.shape[1]:
            return torch.zeros_like(real)
        return real & (real.cumsum(-1) == 1)

    def logits(self, rows: slice = slice(None)) -> torch.Tensor:
        """Scaled ``q · k`` before softcap, mask and sinks for some query rows: ``[batch, heads, rows, keys]``."""
        q = self.q[:, :, rows]
        batch, heads, length, width = q.shape
        kv = self.k.shape[1]
        grouped = q.reshape(batch, kv, heads // kv * length, width)
        return (grouped @ self.k.transpose(-1, -2)).view(batch, heads, length, -1) * self.scaling

    def allowed(self, rows: slice = slice(None)) -> torch.Tensor:
        """Which keys some query rows may attend to, boolean, broadcastable to ``[batch, heads, rows, keys]``."""
        length, keys = self.q.shape[2], self.k.shape[2]
        if self.mask is None:
            at = torch.arange(length, device=self.q.device)[rows, None] + (keys - length)
            return (torch.arange(keys, device=self.q.device) <= at)[None, None]
        mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., rows, :]
        # Padded entries of an additive mask are the dtype's minimum in some files and -inf in others.
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or new keys as they were before rotary embedding, float64 ``[batch, heads, tokens, 2 · pairs]``.

        The first half holds the pairs' real parts, the second their imaginary parts; dims that do not rotate
        follow as pairs with angle 0.

        Raises
        ------
        Refused
            If the layer's rotation or the angle table that it received is not known.
        """
        if self.rotation is None or (self.rotation.pairs and self.table is None):
            raise Refused(f"layer {self.layer}: queries and keys before rotary embedding are not reached on this model")
        return self.rotation.unrotate(x, self.table)


@dataclass(frozen=True)
class NewKeys:
    """Keys and values that a layer is about to attend with, new ones before a cache holds them.

    Attributes
    ----------
    layer : int
        Decoder layer, counted from 0.
    k, v : torch.Tensor
        ``[batch, kv_heads, tokens, head_dim]``, after rotary embedding and key norms.
    padding : torch.Tensor or None
        The model's ``attention_mask``.
    past : int
        Tokens, padding included, of earlier forwards.
    start : int
        Column of the first of these tokens: ``past``, or 0 where a layer's cache keeps another form than attention
        reads, so that the earlier tokens' keys come unchanged again.
    index : int
        Which of the layer's calls in this forward they are for.
    """

    layer: int
    k: torch.Tensor
    v: torch.Tensor
    padding: torch.Tensor | None = field(default=None, repr=False)
    past: int = 0
    start: int = 0
    index: int = 0

    @property
    def tokens(self) -> torch.Tensor:
        """Which of them are real, boolean ``[batch, tokens]`` (False = padding)."""
        return _real(self.k, self.padding)


def _real(x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Which of the tokens of ``x`` ``[batch, heads, tokens, dims]`` are no padding, by the model's mask."""
    batch, _, length, _ = x.shape
    if padding is None:
        return torch.ones(batch, length, dtype=torch.bool, device=x.device)
    if padding.ndim != 2:
        raise BadInput("observers need a two-dimensional attention_mask [batch, tokens] to tell padding from text")
    return padding[:, -length:].to(x.device, torch.bool)


@runtime_checkable
class Observer(Protocol):
    """Reads calls: ``observe(call)`` is told of every attention call while the tap is open."""

    def observe(self, call: AttentionCall) -> None: ...


@runtime_checkable
class Editor(Protocol):
    """Changes calls: ``edit(call)`` returns the call that goes on in its place."""

    def edit(self, call: AttentionCall) -> AttentionCall: ...


@runtime_checkable
class Writer(Protocol):
    """Changes new keys and values: ``write(new)`` returns what goes into the cache, if there is one, and to attention.

    It is asked once for every layer of a forward. Where a layer writes into a cache, that is before `edit` of any part.
    """

    def write(self, new: NewKeys) -> NewKeys: ...
