"""One tap on attention: observers and editors see every attention call of a model while a block is open.

transformers routes attention through a registry of functions. The tap registers one function of its own, and
its mask twin, for each implementation met (``sdpa``, ``eager``, …), points the decoder's configs at it for the
length of the block, shows each call to the parts, and hands the call on to what the model used before.
Modeling files that compute attention by themselves are reached through `rotoscope.model.adapters`. Nothing is left on
the model: configs, hooks and covered methods are put back on any exit.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVarTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rotoscope.errors import BadInput, Refused
from rotoscope.model import adapters
from rotoscope.model.call import AttentionCall, Editor, Observer, Output, Writer
from rotoscope.model.forwards import CACHES, ancestors
from rotoscope.model.layers import decoder_layers
from rotoscope.model.rotary import AngleTable, Rotation, find_table
from rotoscope.model.writes import Widths, Writes

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

Parts = TypeVarTuple("Parts")


@contextmanager
def tap(lm: LM, *parts: *Parts) -> Iterator[tuple[*Parts]]:
    """Show every attention call of a model to observers and editors, in the order given.

    An observer that stands after an editor sees the edited call. Taps nest: an inner one's parts come after the
    outer one's.

    Parameters
    ----------
    lm : LM
        A wrapped model.
    *parts : Observer, Editor or Writer
        Objects with ``observe(call)``, ``edit(call)`` or ``write(new)``.

    Yields
    ------
    tuple
        The parts, so that ``with tap(lm, Moments()) as (moments,)`` reads well.
    """
    rotations = {layer.layer: layer.rotation for layer in lm.anatomy.layers}
    widths = {a.layer: (a.kv_heads, a.head_dim, a.v_head_dim) for a in lm.anatomy.attention}
    with tap_model(lm.model, parts, rotations, widths):
        yield parts


@contextmanager
def tap_model(
    model: torch.nn.Module,
    parts: tuple[Any, ...],
    rotations: Mapping[int, Rotation | None] | None = None,
    widths: Mapping[int, Widths] | None = None,
) -> Iterator[None]:
    """The tap on a bare model, for the probe that measures its anatomy."""
    for part in parts:
        if isinstance(part, type) or not isinstance(part, Observer | Editor | Writer):
            raise BadInput(f"{type(part).__name__} is neither an observer (observe) nor an editor (edit, write)")
    wiring = _WIRINGS.get(id(model)) or _Wiring(model)
    session = [*parts]
    wiring.open(session, rotations or {}, widths or {})
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
        self.widths: dict[int, Widths] = {}
        self.padding: torch.Tensor | None = None
        self.tables: dict[int, AngleTable | None] = {}
        self.saved: list[tuple[Any, str | None]] = []
        self.hooks: list[Any] = []
        self.covers = ExitStack()
        self.calls: dict[int, int] = {}
        self.slots = False
        self.open_levels: list[int] = []
        self.level = -1
        self.writes = Writes()

    def open(self, session: list[Any], rotations: Mapping[int, Rotation | None], widths: Mapping[int, Widths]) -> None:
        self.sessions.append(session)
        self.rotations.update(rotations)
        self.widths.update(widths)
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
        self.covers.close()
        for hook in self.hooks:
            hook.remove()
        for config, previous in self.saved:
            config._attn_implementation_internal = previous
        self.hooks, self.saved = [], []
        self._forget()
        for module in [m for m, (wiring, _) in _BY_MODULE.items() if wiring is self]:
            del _BY_MODULE[module]
        _WIRINGS.pop(id(self.model), None)

    def _connect(self) -> None:
        layers = decoder_layers(self.model)
        above = ancestors(self.model, layers)
        for attention in adapters.find(self.model, layers):
            self.covers.enter_context(adapters.attend_with(attention, partial(self.attend, attention.layer)))
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
        for level, module in enumerate(above):
            enter, leave = partial(self._enter, level), partial(self._leave, level)
            self.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self.hooks.append(module.register_forward_hook(leave, always_call=True))
        for index, module in inside:
            if module is layers[index] or hasattr(module, "layer_idx") or "position_embeddings" in _arguments(module):
                hook = partial(self._remember_table, index)
                self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            if any(True for _ in module.buffers()) and not any(True for _ in module.parameters()):
                self.hooks.append(module.register_forward_hook(partial(self._remember_made, index)))

    def _enter(self, level: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if level <= self.level or not self.open_levels:
            # A forward begins; the one before may have been broken off, or led through the layers more than once.
            self._forget()
        self.open_levels = [outer for outer in self.open_levels if outer < level] + [level]
        self.level = level
        given = dict(zip(_arguments(module), args, strict=False)) | kwargs
        mask = given.get("attention_mask")
        # Inner models may receive a mask already expanded; the two-dimensional one says which tokens are padding.
        if isinstance(mask, torch.Tensor) and (self.padding is None or mask.ndim == 2):
            self.padding = mask

    def _leave(self, level: int, *_: Any) -> None:
        self.open_levels = [outer for outer in self.open_levels if outer < level]
        if not self.open_levels:
            self._forget()

    def _forget(self) -> None:
        self.padding, self.slots, self.level = None, False, -1
        self.tables.clear()
        self.calls.clear()
        self.writes.close()

    def _remember_table(self, layer: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        given = dict(zip(_arguments(module), args, strict=False)) | kwargs
        for held in (given[name] for name in CACHES if given.get(name) is not None):
            self.slots = self.slots or getattr(held, "is_compileable", False)
            if writers := [part for part in self._parts() if isinstance(part, Writer)]:
                self.writes.cover(held, layer, self.widths.get(layer), writers, self.padding)
        if (table := find_table(given)) is not None:
            # Layers share a table: what one of them computed from it serves the others.
            known = next((t for t in self.tables.values() if t is not None and t.one is table.one), table)
            self.tables[layer] = known

    def _remember_made(self, layer: int, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A table that the layer makes for itself, where it received none."""
        if layer not in self.tables and (table := find_table({"position_embeddings": output})) is not None:
            self.tables[layer] = table

    def _parts(self) -> list[Any]:
        return [part for session in self.sessions for part in session]

    def attend(self, layer: int, base: Callable[..., Output], module: torch.nn.Module, *args: Any, **kw: Any) -> Output:
        parts = self._parts()
        if not self.open_levels:
            # Gradient checkpointing computes layers again during the backward pass: what was seen is not seen twice.
            if any(isinstance(part, Editor | Writer) for part in parts):
                raise Refused("an edit cannot follow gradient checkpointing into the backward pass: turn it off")
            return base(module, *args, **kw)
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
        table = self.tables.get(layer)
        if table is not None and table.one.shape[1] > q.shape[2]:
            table = table.since(-q.shape[2])  # some layers receive the turns of the tokens in the cache, too
        call = AttentionCall(
            layer, q, k, v, mask, scaling, module, run, rest,
            rotation=self.rotations.get(layer), table=table, padding=self.padding,
            index=self.calls.get(layer, 0), slots=self.slots,
        )  # fmt: skip
        self.calls[layer] = call.index + 1
        call = self.writes.begin(call, parts)
        for part in parts:
            if isinstance(part, Writer):
                call = self.writes.through(call, part)
            if isinstance(part, Editor):
                call = part.edit(call)
                if not isinstance(call, AttentionCall):
                    raise BadInput(f"{type(part).__name__}.edit must return the call to go on with, not {call!r}")
            if isinstance(part, Observer):
                part.observe(call)
        return call.run(call)


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
            found = table[base]
            if getattr(found, "func", None) is _dispatch:  # it would call itself without end
                raise Refused("a tap's name was left on this model's configuration: load the model anew")
            return found  # type: ignore[no-any-return]
    raise Refused(f"{kind.__name__} has no attention function named {base!r} that the call could be handed on to")


def _arguments(module: torch.nn.Module) -> tuple[str, ...]:
    kind: Any = type(module)
    if kind not in _PARAMETERS:
        _PARAMETERS[kind] = tuple(inspect.signature(kind.forward).parameters)[1:]
    return _PARAMETERS[kind]
