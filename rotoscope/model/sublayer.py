"""The attention sublayer of each decoder layer: what it is, found by what it computes, and layers that do without it.

Which submodules make up the sublayer is seen in one short forward in which attention weighs all values by zero. What
then comes out of a submodule the same for every token, or the same beside one of its own arguments, is made of
attention alone: biases, and norms that only the attention's output passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rotoscope.errors import Refused
from rotoscope.model.call import AttentionCall, Output
from rotoscope.model.forwards import CACHES, covered
from rotoscope.model.layers import decoder_layers, input_device
from rotoscope.model.lm import evaluating
from rotoscope.model.tap import tap_model


@dataclass(frozen=True)
class Sublayer:
    """What one attention call of a layer belongs to.

    Attributes
    ----------
    module
        The outermost submodule of the layer that computes attention and nothing beside it.
    width
        Of its output.
    returns
        What it returns: 0 for a tensor, ``n`` for a tuple of ``n`` with the tensor in front.
    residual
        Place or name of the argument that the module itself adds its output to; None where the layer does that.
    after
        Modules with weights that its output passes before it is added to anything else.
    lists
        Whether it returns a list rather than a tuple.
    """

    module: nn.Module
    width: int
    returns: int
    residual: int | str | None
    after: tuple[nn.Module, ...]
    lists: bool = False


def sublayers(model: nn.Module) -> Mapping[int, tuple[Sublayer, ...]]:
    """The attention sublayers of each decoder layer; layers without attention are left out.

    They are looked for once per model, in one forward on a few tokens.

    Raises
    ------
    Refused
        If attention cannot be told from what else a layer computes.
    """
    inside = {id(module) for module in decoder_layers(model).modules()}
    known = _FOUND.get(model)
    if known is None or known[0] != inside:
        known = _FOUND[model] = inside, _find(model)
    return known[1]


@contextmanager
def without_attention(
    model: nn.Module, layers: Iterable[int], skipped: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Let the attention sublayers of some layers do nothing inside the block: nothing is added to the residual stream.

    Their norms and biases go with them. What else a layer does (its MLP, a recurrent part) goes on as ever; layers
    without attention are left as they are. Where a cache is handed in, the sublayer runs so that the cache grows as
    the model's masks and positions expect, and what it computes is dropped.

    Parameters
    ----------
    model
        A causal language model.
    layers
        Decoder layers, counted from 0.
    skipped
        Told the layer each time that a sublayer is left out.
    """
    found = sublayers(model)
    with ExitStack() as stack:
        for layer in layers:
            for sublayer in found.get(layer, ()):
                told = (lambda: None) if skipped is None else partial(skipped, layer)
                quiet = partial(_quiet, sublayer, sublayer.module.forward, told)
                stack.enter_context(covered(sublayer.module, "forward", quiet))
                for module in sublayer.after:
                    stack.enter_context(module.register_forward_hook(_zero))
        yield


_FOUND: WeakKeyDictionary[nn.Module, tuple[set[int], dict[int, tuple[Sublayer, ...]]]] = WeakKeyDictionary()
_TOKENS = 6


def _quiet(
    sublayer: Sublayer, original: Callable[..., Any], told: Callable[[], None], *args: Any, **kwargs: Any
) -> Any:
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    others: Any = [None] * (sublayer.returns - 1)
    if any(given.get(name) is not None for name in CACHES) or any(hasattr(x, "update") for x in args):
        output = original(*args, **kwargs)
        if sublayer.returns:  # among tensors there may be a bias that the layer is to add
            others = [None if isinstance(x, Tensor) else x for x in output[1:]]
    if sublayer.residual is None:
        state = next(x for x in given.values() if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3)
        neutral = state.new_zeros(*state.shape[:-1], sublayer.width)
    else:
        neutral = given[sublayer.residual]
    told()
    if not sublayer.returns:
        return neutral
    return [neutral, *others] if sublayer.lists else (neutral, *others)


def _zero(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.zeros_like(output)


@dataclass
class _Passage:
    """One run of a submodule in the probe."""

    module: nn.Module
    given: dict[int | str, Any]
    output: Any

    @property
    def out(self) -> Any:
        return self.output[0] if isinstance(self.output, tuple | list) and self.output else self.output

    @property
    def residual(self) -> int | str | None:
        """The argument beside which the output is the same for every token."""
        same = (key for key, x in self.given.items() if isinstance(x, Tensor) and x.shape == self.out.shape)
        return next((key for key in same if _constant(self.out - self.given[key], self.out)), None)

    def attention_alone(self) -> bool:
        """Whether nothing but attention, which is zero in the probe, and biases make the output."""
        out = self.out
        if not isinstance(out, Tensor) or out.ndim != 3 or self.carries_more:
            return False
        return _constant(out, out) or self.residual is not None

    @property
    def carries_more(self) -> bool:
        """Whether it hands on a second state of the tokens beside its first."""
        others = self.output[1:] if isinstance(self.output, tuple | list) else ()
        return any(isinstance(x, Tensor) and x.shape == self.out.shape for x in others)

    def takes(self, x: Tensor) -> bool:
        return any(y is x or (isinstance(y, Tensor) and y.data_ptr() == x.data_ptr()) for y in self.given.values())


@dataclass
class _Probe:
    """Lets attention give zero, and notes which module called it and what passed through the submodules of a layer."""

    callers: dict[int, list[nn.Module]] = field(default_factory=dict)
    passages: dict[int, list[_Passage]] = field(default_factory=dict)

    def edit(self, call: AttentionCall) -> AttentionCall:
        self.callers.setdefault(call.layer, []).append(call.module)

        def zero(edited: AttentionCall) -> Output:
            out, weights = call.run(edited)
            return torch.zeros_like(out), weights

        return replace(call, run=zero)

    def note(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        self.passages.setdefault(layer, []).append(_Passage(module, given, output))


def _find(model: nn.Module) -> dict[int, tuple[Sublayer, ...]]:
    layers, probe = decoder_layers(model), _Probe()
    ids = torch.arange(1, _TOKENS + 1, device=input_device(model))[None]
    with torch.no_grad(), evaluating(model), ExitStack() as stack:
        stack.enter_context(tap_model(model, (probe,)))  # first, since it may run the model when it is opened
        for index, layer in enumerate(layers):
            for module in layer.modules():
                if module is not layer:
                    hook = partial(probe.note, index)
                    stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        model(input_ids=ids, use_cache=False)
    found = {}
    for index, callers in probe.callers.items():
        distinct = list(dict.fromkeys(callers))  # some layers attend twice in one module
        chosen = [_sublayer(type(model).__name__, index, module, probe.passages[index]) for module in distinct]
        found[index] = tuple({id(sublayer.module): sublayer for sublayer in chosen}.values())
    return found


def _sublayer(name: str, layer: int, caller: nn.Module, passages: list[_Passage]) -> Sublayer:
    # Modules end in the order from the innermost outwards.
    holding = [p for p in passages if any(module is caller for module in p.module.modules())]
    alone = [p for p in holding if p.attention_alone()]
    if not alone:
        raise Refused(f"{name}: in layer {layer}, attention cannot be told from what else is computed beside it")
    chosen = alone[-1]
    returns = len(chosen.output) if isinstance(chosen.output, tuple | list) else 0
    constant = _constant(chosen.out, chosen.out)
    residual = None if constant else chosen.residual
    after = () if residual is not None else tuple(_after(chosen, passages))
    return Sublayer(chosen.module, chosen.out.shape[-1], returns, residual, after, isinstance(chosen.output, list))


def _after(chosen: _Passage, passages: list[_Passage]) -> Iterator[nn.Module]:
    """Modules with weights that get the attention's output itself, one after the other."""
    passed = [chosen.out]
    for p in passages[passages.index(chosen) + 1 :]:
        out = p.out
        if isinstance(out, Tensor) and any(p.takes(x) for x in passed) and _constant(out, out):
            passed.append(out)
            if any(True for _ in p.module.parameters()):
                yield p.module


def _constant(x: Tensor, scale: Tensor) -> bool:
    """Whether ``x`` ``[batch, tokens, width]`` is the same for every token, to the rounding of ``scale``."""
    eps = torch.finfo(x.dtype).eps
    tolerance = (64 if eps < 1e-5 else 4) * eps * scale.abs().max()  # in half precision 64 would be half of all
    return bool((x - x[:, :1]).abs().max() <= tolerance)
