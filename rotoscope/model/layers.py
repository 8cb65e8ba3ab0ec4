"""The decoder layers of a model, found and handled without knowing its architecture.

Which modules they are, where the residual stream enters them and what they return is seen in one short forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rotoscope.errors import BadInput, Refused


@dataclass(frozen=True)
class Loop:
    """The layers that a model runs one after the other.

    Attributes
    ----------
    layers
        The model's own list.
    returns
        What each layer returns: 0 for the state itself, ``n`` for a tuple of ``n`` with the state in front.
    """

    layers: nn.ModuleList
    returns: tuple[int, ...]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of the model's decoder layers, wherever it lies.

    Of all ``ModuleList`` whose items take the residual stream and return one of the same shape in a forward on four
    token ids, it is the one with the most parameters, the outermost on a tie: a vision tower is not called, and the
    experts inside a layer weigh less than the layers. The answer is remembered per model until its layers change.

    Raises
    ------
    Refused
        If the model is an encoder-decoder, does not run on token ids alone, has no such list, calls a layer more than
        once a forward, or does something to the stream between two layers.
    """
    return loop(model).layers


def loop(model: nn.Module) -> Loop:
    """Return the decoder layers together with what each of them returns; see `decoder_layers`."""
    known = _LOOPS.get(model)
    if known is None or len(known.layers) != len(known.returns) or not any(m is known.layers for m in model.modules()):
        known = _LOOPS[model] = _find(model)
    return known


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go in: the embedding's device, or the one that it is brought to when it is offloaded."""
    find: Any = getattr(model, "get_input_embeddings", lambda: model)
    embedding = find()
    at: torch.device = next((p.device for p in embedding.parameters()), torch.device("cpu"))
    brought_to = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return torch.device("cpu" if brought_to is None else brought_to) if at.type == "meta" else at


def at_boundary(layers: nn.ModuleList, k: int, act: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Hook ``act`` onto ``h[k]``: a tensor that it returns takes the place of ``h[k]``.

    Raises
    ------
    BadInput
        If ``k`` is not one of 0 … L.
    """
    if not 0 <= k <= len(layers):
        raise BadInput(f"there is no boundary {k}: this model has 0 to {len(layers)}")

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = act(_state_in(args, kwargs))
        if state is None:
            return None
        return ((state, *args[1:]), kwargs) if args else (args, {**kwargs, _NAME: state})

    def after(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        state = act(_state_out(output))
        if state is None:
            return None
        return (state, *output[1:]) if isinstance(output, (tuple, list)) else state

    if k == len(layers):
        return layers[-1].register_forward_hook(after)
    return layers[k].register_forward_pre_hook(before, with_kwargs=True)


@contextmanager
def bypass(layer: nn.Module, returns: int) -> Iterator[None]:
    """Let ``layer`` hand the residual stream through unchanged inside the block.

    The layer stays where it is, so whatever the model's loop reads on it (its attention type, say) is still there;
    only its ``forward`` is covered. `returns` is as in `Loop`; what else a tuple holds is ``None``.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        state = _state_in(args, kwargs)
        return (state, *[None] * (returns - 1)) if returns else state

    own = layer.__dict__.get("forward")  # an instance has one of its own where weights are offloaded or sharded
    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


_NAME = "hidden_states"  # the keyword of the residual stream where a layer does not get it as its first argument
_LOOPS: WeakKeyDictionary[nn.Module, Loop] = WeakKeyDictionary()


def _state_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get(_NAME)


def _state_out(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) and output else output


class _Call(NamedTuple):
    before: Any
    after: Any
    returns: int

    def carries_on(self) -> bool:
        both = isinstance(self.before, Tensor) and isinstance(self.after, Tensor)
        return both and self.before.shape == self.after.shape


def _find(model: nn.Module) -> Loop:
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Refused(f"{name} is an encoder-decoder: only decoder-only models have one stack of layers to follow")
    calls = _watch(model)
    found = [items for items in _lists(model) if all(_carry_on(calls[item]) for item in items)]
    if not found:
        raise Refused(f"{name} has no list of layers that take and return a residual stream")
    # the largest before any closer look: where the true layers fail it, something inside them must not pass for them
    layers = max(found, key=lambda items: sum(p.numel() for p in items.parameters()))
    once = [calls[layer][0] for layer in layers]
    if any(len(calls[layer]) > 1 for layer in layers):
        raise Refused(f"{name} runs its layers several times a forward, so that a boundary is not one state")
    if not all(_equal(lower.after, upper.before) for lower, upper in pairwise(once)):
        raise Refused(f"{name} changes the residual stream between its layers, so that a boundary is not one state")
    return Loop(layers, tuple(call.returns for call in once))


def _lists(model: nn.Module) -> list[nn.ModuleList]:
    """Return every list that is not empty, outer ones before those inside them."""
    return [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]


def _watch(model: nn.Module) -> dict[nn.Module, list[_Call]]:
    """Run four tokens and note the calls of every item of every list."""
    calls: dict[nn.Module, list[_Call]] = {item: [] for items in _lists(model) for item in items}

    def note(item: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        returns = len(output) if isinstance(output, (tuple, list)) else 0
        calls[item].append(_Call(_state_in(args, kwargs), _state_out(output), returns))

    device = input_device(model)
    with torch.no_grad(), ExitStack() as hooks:
        for item in calls:
            hooks.enter_context(item.register_forward_hook(note, with_kwargs=True))
        try:
            model(input_ids=torch.arange(1, 5, device=device)[None], use_cache=False)
        except Exception as error:
            raise Refused(f"{type(model).__name__} does not run on token ids alone: {error}") from error
    return calls


def _carry_on(calls: list[_Call]) -> bool:
    return bool(calls) and all(call.carries_on() for call in calls)


def _equal(lower: Tensor, upper: Tensor) -> bool:
    return lower is upper or torch.equal(lower.to(upper.device), upper)
