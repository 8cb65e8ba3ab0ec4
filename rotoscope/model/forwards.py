"""Whole forwards of a model, seen and led from outside: what each was given, and what it goes on with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput
from rotoscope.model.layers import decoder_layers

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What the argument that carries a cache is called, in this and in earlier releases of transformers."""


@dataclass
class Forward:
    """What one forward of the whole model was given.

    Attributes
    ----------
    arguments
        All of it, by name.
    ids
        Token ids ``[batch, tokens]``, None where embeddings were given.
    real
        Which tokens are no padding, boolean ``[batch, tokens]``.
    past
        Tokens, padding included, that the cache holds already.
    cache
        The cache that was handed in, if any.
    """

    arguments: Mapping[str, Any] = field(repr=False)
    ids: Tensor | None
    real: Tensor
    past: int
    cache: Any = field(repr=False)

    @property
    def first(self) -> Tensor:
        """Which token is position 0 of its row, boolean ``[batch, tokens]``."""
        mask: Any = self.arguments.get("attention_mask")
        tokens = self.real.shape[1]
        count = self.real.cumsum(-1)
        if self.past and (mask is None or mask.shape[1] == tokens):
            count = count + self.past
        elif self.past:
            count = count + mask[:, :-tokens].to(self.real.device, torch.bool).sum(-1, keepdim=True)
        return self.real & (count == 1)

    @property
    def last(self) -> Tensor:
        """Which token is the last real one of its row, boolean ``[batch, tokens]``."""
        return self.real & (self.real.flip(-1).cumsum(-1).flip(-1) == 1)


Act = Callable[[Forward, Callable[..., Any]], Any]
"""Called with a forward and with what runs it, ``proceed(**arguments)``; returns what the caller gets."""


@contextmanager
def around(model: nn.Module, act: Act) -> Iterator[None]:
    """Let ``act`` lead every forward of the model in the block, also those that ``generate`` makes.

    A forward counts once, on whichever of the model's wrappers it was called. Blocks nest: the inner one leads first,
    and what it runs is led by the outer one.

    Raises
    ------
    BadInput
        In a forward that is given neither ``input_ids`` nor ``inputs_embeds``, or a mask that does not say which
        tokens are padding.
    """
    inside = False

    def lead(original: Callable[..., Any]) -> Callable[..., Any]:
        names = positional(original)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return original(*args, **kwargs)
            arguments = dict(zip(names, args, strict=False)) | kwargs
            inside = True
            try:
                return act(describe(arguments), original)
            finally:
                inside = False

        return forward

    with ExitStack() as stack:
        for module in ancestors(model, decoder_layers(model)):
            stack.enter_context(covered(module, "forward", lead(module.forward)))
        yield


@contextmanager
def covered(thing: Any, name: str, by: Any) -> Iterator[None]:
    """Put ``by`` in front of a method of one object inside the block."""
    own = vars(thing).get(name)  # an instance has one of its own where another library covered it before
    setattr(thing, name, by)
    try:
        yield
    finally:
        if own is None:
            delattr(thing, name)
        else:
            setattr(thing, name, own)


def ancestors(model: nn.Module, layers: nn.Module) -> list[nn.Module]:
    """The modules on the way from the model down to its decoder layers, top first."""
    path = next(name for name, module in model.named_modules() if module is layers).split(".")
    return [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]


def describe(arguments: Mapping[str, Any]) -> Forward:
    """What a forward's arguments say of its tokens.

    Raises
    ------
    BadInput
        If they name no tokens, or the mask is not ``[batch, tokens]``.
    """
    ids, embeds, mask = (arguments.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    given = embeds if ids is None else ids
    if given is None:
        raise BadInput("interventions need input_ids or inputs_embeds in every forward")
    batch, tokens = given.shape[:2]
    cache = next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)
    if mask is None:
        real = torch.ones(batch, tokens, dtype=torch.bool, device=given.device)
    elif not isinstance(mask, Tensor) or mask.ndim != 2:
        raise BadInput("interventions need a two-dimensional attention_mask [batch, tokens] to tell padding from text")
    else:
        real = mask[:, -tokens:].to(given.device, torch.bool)
    return Forward(arguments, ids, real, 0 if cache is None else int(cache.get_seq_length()), cache)


def positional(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a forward takes, in the order in which it takes them."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)
    return names or ("input_ids",)  # wrappers pass on whatever they get
