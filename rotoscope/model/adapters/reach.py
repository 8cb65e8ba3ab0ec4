"""Which modules compute attention by themselves, and what their calls are made of; found once per model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rotoscope.model.adapters.watch import Found, Meet, Watch
from rotoscope.model.layers import input_device

Attend = Callable[..., tuple[Tensor, Tensor | None]]
_FIELDS = ("q", "k", "v", "mask", "scaling")


@dataclass(frozen=True)
class Attention:
    """A module that computes attention by itself.

    Attributes
    ----------
    module
        The innermost one that does.
    layer : int
        The decoder layer that it is part of.
    scaling : float
        Factor of ``q · k``, measured.
    group : int
        How often each key and value head stands there repeated.
    window : int or None
        Width of its sliding window, where it keeps one as a square mask.
    """

    module: nn.Module
    layer: int
    scaling: float
    group: int
    window: int | None


def find(model: nn.Module, layers: Iterable[nn.Module]) -> list[Attention]:
    """The attention modules in decoder layers that do not go through transformers' attention interface.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model. On the first call two rows of four tokens are run through it, unless its files use the
        interface.
    layers : iterable of torch.nn.Module
        Its decoder layers.
    """
    if any(_routed(module) for layer in layers for module in layer.modules()):
        return []
    known = _FOUND.get(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    if known is None or known[0] != inside:
        known = _FOUND[model] = inside, _look(model, layers)
    return known[1]


@contextmanager
def attend_with(attention: Attention, attend: Attend) -> Iterator[None]:
    """Lead the attention of a module through ``attend(base, module, q, k, v, mask, scaling=…, …)`` inside the block.

    ``base(module, q, k, v, mask, scaling=…, …)`` computes what the module would have computed, returned as
    ``[batch, tokens, heads, head_dim]`` together with the weights where there are any.
    """

    def meet(found: Found) -> Tensor:
        group = attention.group
        scaling = found.scaling = attention.scaling if found.scaling is None else found.scaling
        given = (found.q, found.k[:, ::group], found.v[:, ::group], found.mask, scaling)

        def base(module: nn.Module, *args: Any, scaling: float, **_: Any) -> tuple[Tensor, Tensor | None]:
            now = zip(_FIELDS, (*args, scaling), given, strict=True)
            changed = {name: x for name, x, was in now if not (x is was or (name == "scaling" and x == was))}
            for name in changed.keys() & {"k", "v"}:
                changed[name] = changed[name].repeat_interleave(group, 1)
            out = found.run(changed)
            return out.view(len(found.q), -1, *out.shape[-2:]).transpose(1, 2), found.weights

        extra = {} if attention.window is None else {"sliding_window": attention.window}
        out, _ = attend(base, attention.module, *given[:4], scaling=scaling, **extra)
        return out.transpose(1, 2).reshape(found.shape)

    with _watched(attention.module, meet):
        yield


_FOUND: WeakKeyDictionary[nn.Module, tuple[set[int], list[Attention]]] = WeakKeyDictionary()


def _routed(module: nn.Module) -> bool:
    return hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")


def _look(model: nn.Module, layers: Iterable[nn.Module]) -> list[Attention]:
    """Run a few tokens with every module watched that holds others; the innermost that attend are the ones."""
    seen: dict[nn.Module, Attention | None] = {}

    def note(layer: int, module: nn.Module, found: Found) -> Tensor:
        seen[module] = _describe(layer, module, found)
        return found.run({})

    with torch.no_grad(), ExitStack() as stack:
        for index, layer in enumerate(layers):
            for module in layer.modules():
                if any(module.children()):
                    stack.enter_context(_watched(module, partial(note, index, module)))
        ids = torch.arange(1, 5, device=input_device(model))
        model(input_ids=torch.stack([ids, ids.flip(0)]), use_cache=False)
    inner = (m for m in seen if not any(part in seen for part in m.modules() if part is not m))
    return [found for m in inner if (found := seen[m]) is not None]


def _describe(layer: int, module: nn.Module, found: Found) -> Attention | None:
    """What is measured once of a module; None where its weights are not those of its queries, keys and mask."""
    scaling = found.measured_scaling()
    # A bias that differs between texts is made of what they say, beside the product of queries and keys.
    if scaling is None or (found.mask is not None and not torch.equal(found.mask[0], found.mask[-1])):
        return None
    if found.weights is not None and found.mask is not None:
        keys = found.k.repeat_interleave(found.q.shape[1] // found.k.shape[1], 1)
        mine = (found.q.double() @ keys.double().transpose(-1, -2) * scaling + found.mask).softmax(-1)
        if (mine - found.weights).abs().max() > max(1e-5, 16 * torch.finfo(found.weights.dtype).eps):
            return None
    return Attention(module, layer, scaling, _repeats(found), _window(module))


def _repeats(found: Found) -> int:
    """The largest number of neighbouring heads that share keys and values."""
    heads = found.k.shape[1]
    for group in range(heads, 1, -1):
        if heads % group == 0 and all(
            bool(x.any()) and torch.equal(x, x[:, ::group].repeat_interleave(group, 1)) for x in (found.k, found.v)
        ):
            return group
    return 1


def _window(module: nn.Module) -> int | None:
    """Keys per query in the last row of a square boolean mask that the module keeps, if they are not all."""
    for mask in module.buffers(recurse=False):
        if mask.dtype == torch.bool and mask.ndim > 1 and mask.shape[-1] == mask.shape[-2]:
            width = int(mask.reshape(-1, mask.shape[-1])[-1].sum())
            return width if width < mask.shape[-1] else None
    return None


@contextmanager
def _watched(module: nn.Module, meet: Meet) -> Iterator[None]:
    """Cover a module's forward with one that runs it under watch."""
    own = module.__dict__.get("forward")  # an instance has one of its own where weights are offloaded or sharded
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = next(x.shape[0] for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with Watch(batch, meet):
            return run(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
