"""One tap on attention: observers and editors see every attention call of a model while a block is open.

transformers routes attention through a registry of functions. The tap registers one function of its own, and
its mask twin, for each implementation met (``sdpa``, ``eager``, …), points the decoder's configs at it for the
length of the block, shows each call to the parts, and hands the call on to what the model used before.
Nothing is left on the model: configs and hooks are put back on any exit.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVarTuple, runtime_checkable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rotoscope.errors import BadInput, Refused
from rotoscope.model.layers import decoder_layers
from rotoscope.model.rotary import AngleTable, Rotation, find_table

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

Parts = TypeVarTuple("Parts")
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
        causal.
    scaling : float
        Factor of ``q · k``.
    module : torch.nn.Module
        The attention module that made the call.
    run : callable
        What computes attention for the call; an editor may replace it.
    extra : mapping
        The remaining arguments of the model's own attention function, passed on untouched.
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
    def tokens(self) -> torch.Tensor:
        """Which of this call's query tokens are real, boolean ``[batch, tokens]`` (False = padding).

        Raises
        ------
        BadInput
            If the model was given a mask that does not say which tokens are padding.
        """
        batch, _, length, _ = self.q.shape
        if self.padding is None:
            return torch.ones(batch, length, dtype=torch.bool, device=self.q.device)
        if self.padding.ndim != 2:
            raise BadInput("observers need a two-dimensional attention_mask [batch, tokens] to tell padding from text")
        return self.padding[:, -length:].to(self.q.device, torch.bool)

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


@runtime_checkable
class Observer(Protocol):
    """Reads calls: ``observe(call)`` is told of every attention call while the tap is open."""

    def observe(self, call: AttentionCall) -> None: ...


@runtime_checkable
class Editor(Protocol):
    """Changes calls: ``edit(call)`` returns the call that goes on in its place."""

    def edit(self, call: AttentionCall) -> AttentionCall: ...


@contextmanager
def tap(lm: LM, *parts: *Parts) -> Iterator[tuple[*Parts]]:
    """Show every attention call of a model to observers and editors, in the order given.

    An observer that stands after an editor sees the edited call. Taps nest: an inner one's parts come after the
    outer one's.

    Parameters
    ----------
    lm : LM
        A wrapped model.
    *parts : Observer or Editor
        Objects with ``observe(call)`` or ``edit(call)``.

    Yields
    ------
    tuple
        The parts, so that ``with tap(lm, Moments()) as (moments,)`` reads well.
    """
    rotations = {layer.layer: layer.rotation for layer in lm.anatomy.layers}
    with tap_model(lm.model, parts, rotations):
        yield parts


@contextmanager
def tap_model(
    model: torch.nn.Module, parts: tuple[Any, ...], rotations: Mapping[int, Rotation | None] | None = None
) -> Iterator[None]:
    """The tap on a bare model, for the probe that measures its anatomy."""
    for part in parts:
        if not isinstance(part, Observer | Editor):
            raise BadInput(f"{type(part).__name__} is neither an observer (observe) nor an editor (edit)")
    wiring = _WIRINGS.get(id(model)) or _Wiring(model)
    session = [*parts]
    wiring.open(session, rotations or {})
    try:
        yield
    finally:
        wiring.close(session)


class _Name(str):
    """A registered implementation's name that compares equal to the one it stands for.

    Some modeling files branch on ``config._attn_implementation == "eager"``; under the tap they must branch as
    they would without it. Look-ups in the registries go by hash, hence by the name's own text.
    """

    base: str

    def __new__(cls, base: str) -> _Name:
        name = super().__new__(cls, f"rotoscope_{base}")
        name.base = base
        return name

    def __getnewargs__(self) -> tuple[str]:
        return (self.base,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__str__(other) in (str.__str__(self), self.base)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


_WIRINGS: dict[int, _Wiring] = {}
_BY_MODULE: dict[int, tuple[_Wiring, int]] = {}
_PARAMETERS: dict[type, tuple[str, ...]] = {}


class _Wiring:
    """Everything put on one model while at least one tap is open on it."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.sessions: list[list[Any]] = []
        self.rotations: dict[int, Rotation | None] = {}
        self.padding: torch.Tensor | None = None
        self.tables: dict[int, AngleTable | None] = {}
        self.saved: list[tuple[Any, str | None]] = []
        self.hooks: list[Any] = []

    def open(self, session: list[Any], rotations: Mapping[int, Rotation | None]) -> None:
        self.sessions.append(session)
        self.rotations.update(rotations)
        if len(self.sessions) > 1:
            return
        try:
            self._connect()
        except BaseException:
            self.close(session)
            raise

    def close(self, session: list[Any]) -> None:
        self.sessions = [s for s in self.sessions if s is not session]
        if self.sessions:
            return
        for hook in self.hooks:
            hook.remove()
        for config, previous in self.saved:
            config._attn_implementation_internal = previous
        self.hooks, self.saved, self.tables, self.padding = [], [], {}, None
        for module in [m for m, (wiring, _) in _BY_MODULE.items() if wiring is self]:
            del _BY_MODULE[module]
        _WIRINGS.pop(id(self.model), None)

    def _connect(self) -> None:
        layers = decoder_layers(self.model)
        above = _ancestors(self.model, layers)
        _WIRINGS[id(self.model)] = self
        inside = [(index, module) for index, layer in enumerate(layers) for module in layer.modules()]
        for index, module in inside:
            _BY_MODULE[id(module)] = (self, index)
        configs = {id(c): c for m in [*above, *(m for _, m in inside)] if (c := getattr(m, "config", None)) is not None}
        for config in configs.values():
            if not hasattr(config, "_attn_implementation_internal"):
                continue
            previous = config._attn_implementation_internal
            self.saved.append((config, previous))
            config._attn_implementation_internal = _register(str(previous or "eager"))
        for module in above:
            self.hooks.append(module.register_forward_pre_hook(self._remember_padding, with_kwargs=True))
        self.hooks.append(above[0].register_forward_hook(self._forget, always_call=True))
        for index, module in inside:
            if module is layers[index] or hasattr(module, "layer_idx") or "position_embeddings" in _arguments(module):
                hook = partial(self._remember_table, index)
                self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _remember_padding(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(_arguments(module), args, strict=False)) | kwargs
        mask = given.get("attention_mask")
        # Inner models may receive a mask already expanded; the two-dimensional one says which tokens are padding.
        if isinstance(mask, torch.Tensor) and (self.padding is None or mask.ndim == 2):
            self.padding = mask

    def _forget(self, *_: Any) -> None:
        self.padding = None
        self.tables.clear()

    def _remember_table(self, layer: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        given = dict(zip(_arguments(module), args, strict=False)) | kwargs
        if (table := find_table(given)) is not None:
            # Layers share a table: what one of them computed from it serves the others.
            known = next((t for t in self.tables.values() if t is not None and t.one is table.one), table)
            self.tables[layer] = known

    def attend(self, layer: int, base: Callable[..., Output], module: torch.nn.Module, *args: Any, **kw: Any) -> Output:
        names = ("query", "key", "value", "attention_mask")
        given = dict(zip(names, args, strict=False))
        rest = dict(zip(("scaling", "dropout"), args[len(names) :], strict=False)) | kw
        q, k, v, mask = (given[name] if name in given else rest.pop(name, None) for name in names)

        def run(call: AttentionCall) -> Output:
            arguments = dict(call.extra)
            if scaled:
                arguments["scaling"] = call.scaling
            return base(call.module, call.q, call.k, call.v, call.mask, **arguments)

        scaled = rest.get("scaling") is not None
        scaling = float(rest.pop("scaling")) if scaled else q.shape[-1] ** -0.5
        call = AttentionCall(
            layer, q, k, v, mask, scaling, module, run, rest,
            rotation=self.rotations.get(layer), table=self.tables.get(layer), padding=self.padding,
        )  # fmt: skip
        for part in [part for session in self.sessions for part in session]:
            if isinstance(part, Editor):
                call = part.edit(call)
            if isinstance(part, Observer):
                part.observe(call)
        return call.run(call)


def _ancestors(model: torch.nn.Module, layers: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules on the way from the model down to its decoder layers, top first."""
    path = next(name for name, module in model.named_modules() if module is layers).split(".")
    return [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]


def _register(base: str) -> _Name:
    name = _Name(base)
    if str.__str__(name) not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(str.__str__(name), partial(_dispatch, base))
        # Without its mask twin a registered function gets no mask, and attention silently becomes bidirectional.
        AttentionMaskInterface.register(str.__str__(name), ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _dispatch(base: str, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Output:
    kind: Any = type(module)
    function = _base_function(kind, base)
    found = _BY_MODULE.get(id(module))
    if found is None:
        return function(module, *args, **kwargs)
    wiring, layer = found
    return wiring.attend(layer, function, module, *args, **kwargs)


@cache
def _base_function(kind: type, base: str) -> Callable[..., Output]:
    """What the modeling file itself would have called: eager attention lives in each file, not in the registry."""
    for cls in kind.__mro__:
        file = sys.modules.get(cls.__module__)
        if base == "eager" and hasattr(file, "eager_attention_forward"):
            return file.eager_attention_forward  # type: ignore[union-attr, no-any-return]
        if base != "eager" and base in (table := getattr(file, "ALL_ATTENTION_FUNCTIONS", {})):
            return table[base]  # type: ignore[no-any-return]
    raise Refused(f"{kind.__name__} has no attention function named {base!r} that the call could be handed on to")


def _arguments(module: torch.nn.Module) -> tuple[str, ...]:
    kind: Any = type(module)
    if kind not in _PARAMETERS:
        _PARAMETERS[kind] = tuple(inspect.signature(kind.forward).parameters)[1:]
    return _PARAMETERS[kind]
