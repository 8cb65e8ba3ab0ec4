"""The tap's part of a quantized cache: writes what a cache would hand back, and keeps every pass's own keys exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rotoscope.errors import BadInput, Refused
from rotoscope.interventions.base import Run
from rotoscope.interventions.kv_grid import EXACT_BITS, Rounded, at, fp8, fp8_scale, rounded, whole
from rotoscope.model.call import AttentionCall, NewKeys, Output
from rotoscope.model.forwards import Forward

if TYPE_CHECKING:
    from rotoscope.interventions.quantize_kv import QuantizeKV

_ORDER = (
    "something that was opened after quantize-kv changes keys, values or attention too: open quantize-kv last, "
    "inside of what else is open"
)
_BESIDE = (
    "something that was opened before quantize-kv changes keys or values where attention reads them and not in the "
    "cache: use the model with use_cache=False"
)


@dataclass(frozen=True)
class _New:
    """Keys and values of one layer and forward: as they are, and as the cache holds them.

    Attributes
    ----------
    cut
        Columns of the forward that belong to its first pass.
    split
        Whether later columns of the forward read something quantized from its first pass.
    earlier
        Whether earlier forwards left something quantized.
    """

    index: int
    exact: tuple[Tensor, Tensor]
    written: tuple[Tensor, Tensor]
    cut: int
    split: bool
    earlier: bool

    def wrote(self, call: AttentionCall) -> bool:
        """Whether the call's newest keys and values are those that were written."""
        return _newest(call, self.written)

    def was_given(self, call: AttentionCall) -> bool:
        """Whether the call's newest keys and values are those that were to be written."""
        return call.index != self.index or _newest(call, self.exact)


@dataclass(frozen=True)
class _Pass:
    """What new tokens are to the passes that a cache is filled in, each ``[batch, tokens]``.

    Attributes
    ----------
    real
        Which are no padding.
    index
        Place in the row, padding left out.
    before
        Which columns belong to the first pass of the forward.
    """

    real: Tensor
    index: Tensor
    before: Tensor

    @classmethod
    def of(cls, new: NewKeys, cut: int) -> _Pass:
        real, mask = new.tokens, new.padding
        tokens = real.shape[1]
        earlier: Any = new.past
        if mask is not None and mask.shape[1] > tokens:
            earlier = mask[:, :-tokens].to(real.device, torch.bool).sum(-1, keepdim=True)
        before = (torch.arange(tokens, device=real.device) < cut).expand_as(real)
        return cls(real, earlier + real.cumsum(-1) - 1, before)

    def in_whole_groups(self, group: int) -> Tensor:
        """Tokens of groups that one pass brings in full."""
        some = (self.real & self.before, self.real & ~self.before)
        return whole(self.index, some[0], group) | whole(self.index, some[1], group)


class Cache:
    """Writes quantized keys and values, and lets every pass attend to its own as they are."""

    def __init__(self, how: QuantizeKV, run: Run, layers: frozenset[int]):
        self._how, self._run, self._layers = how, run, layers
        self._scales: dict[tuple[int, int, str], Tensor] = {}
        self._held: dict[int, bool] = {}
        self._new: dict[int, _New] = {}
        self._awaited: set[int] = set()

    def follow(self, forward: Forward, proceed: Callable[..., Any]) -> Any:
        """Lead a forward, and see that its attention was computed by the calls that were handed on."""
        self._new.clear()
        self._awaited.clear()
        out = proceed(**forward.arguments)
        if self._awaited:
            raise BadInput(_ORDER)
        return out

    def write(self, new: NewKeys) -> NewKeys:
        if new.layer not in self._layers:
            return new
        if new.start < new.past:
            raise Refused(
                f"layer {new.layer} keeps something else than keys and values in its cache, which cannot be quantized "
                "as such: bring prompt and answer in one forward with use_cache=False"
            )
        if new.past == 0:
            self._held[new.layer] = False
        tokens = new.k.shape[2]
        cut = tokens
        if self._run.prompt is not None:
            cut = min(max(self._run.prompt - self._how.fresh - new.start, 0), tokens)
        passes = _Pass.of(new, cut)
        (k, k_tokens), (v, v_tokens) = (self._quantize(new, name, passes) for name in "KV")
        some = k_tokens | v_tokens
        split = cut < tokens and bool(some[:, :cut].any())
        earlier = self._held.get(new.layer, False)
        self._held[new.layer] = earlier or bool(some.any())
        self._new[new.layer] = _New(new.index, (new.k, new.v), (k, v), cut, split, earlier)
        return replace(new, k=k, v=v)

    def _quantize(self, new: NewKeys, name: str, passes: _Pass) -> tuple[Tensor, Tensor]:
        """Keys or values as the cache holds them, and which tokens are quantized ``[batch, tokens]``."""
        how, x = self._how, new.k if name == "K" else new.v
        count = int(passes.real.sum()) * x.shape[1] * x.shape[3]
        if name not in how.targets:
            self._run.measure(values=count, bits=EXACT_BITS * count)
            return x, torch.zeros_like(passes.real)
        by_channel = how.kind != "fp8" and how.axis(name) == "channel"
        tokens = passes.in_whole_groups(how.group) if by_channel else passes.real
        tokens = tokens & (passes.index >= how.first)
        places = at(tokens, (how.keep or {}).get(new.layer) if name == "K" else None, x)
        if how.kind == "fp8":
            done = self._fp8(x, places, passes.before, (new.layer, new.index, name), new.past)
        else:
            done = rounded(x, places, int(how.kind[3:]), how.axis(name), how.group, passes.index)
        exact = x.double().masked_fill(~places, 0)
        self._run.measure(
            values=count, bits=done.bits + EXACT_BITS * (count - int(places.sum())),
            error=(done.x.double().masked_fill(~places, 0) - exact).square().sum().item(),
            energy=exact.square().sum().item(),
        )  # fmt: skip
        return done.x, tokens

    def _fp8(self, x: Tensor, places: Tensor, before: Tensor, key: tuple[int, int, str], past: int) -> Rounded:
        """Rows get their scale in the first pass that brings them something to quantize, and keep it."""
        scale = self._scales.get(key) if past else None
        if scale is None:
            scale = torch.zeros(len(x), 1, 1, 1, device=x.device)
        elif len(scale) != len(x):
            raise BadInput("a step with an fp8 cache needs its own prompt's prefill inside the same block")
        unset = int((scale == 0).sum())
        for some in (places & before[:, None, :, None], places):
            scale = torch.where(scale == 0, fp8_scale(x, some), scale)
        self._scales[key] = scale
        set_now = unset - int((scale == 0).sum())
        return Rounded(fp8(x, places, scale), 8 * int(places.sum()) + EXACT_BITS * set_now)

    def before(self, call: AttentionCall) -> None:
        """See a call before what was written is put into it."""
        if call.layer in self._new and not self._new[call.layer].was_given(call):
            raise BadInput(_BESIDE)

    def edit(self, call: AttentionCall) -> AttentionCall:
        if call.layer not in self._layers:
            return call
        if call.slots:
            raise BadInput("quantize-kv needs a dynamic cache: a static one hands over empty slots among its keys")
        new = self._written(call)
        k, v = _read(call, new, new.cut if new.split else 0)
        self._run.fired += new.split or (new.earlier and call.k.shape[2] > call.q.shape[2])
        self._awaited.add(call.layer)

        def run(given: AttentionCall) -> Output:
            if given.k is not k or given.v is not v:
                if not new.wrote(given):  # a writer of other layers hands on what was written
                    raise BadInput(_ORDER)
                given = replace(given, k=k, v=v)
            self._awaited.discard(call.layer)
            late = call.run(replace(given, run=call.run))
            if not new.split:
                return late
            exact = _read(call, new, 0)
            early = call.run(replace(given, k=exact[0], v=exact[1], run=call.run))
            return _joined(early, late, new.cut)

        return replace(call, k=k, v=v, run=run)

    def _written(self, call: AttentionCall) -> _New:
        """What was written of the keys and values that a call brings."""
        own = self._new.get(call.layer)
        if own is not None:
            if own.wrote(call):
                return own
            raise BadInput(_ORDER)
        for new in self._new.values():
            if new.wrote(call):
                return new
        raise Refused(
            f"layer {call.layer} reads the keys and values of a layer that is not quantized: leave it out, or take "
            "that layer, too"
        )


@dataclass(frozen=True)
class Before:
    """Stands in front of a cache on the tap."""

    cache: Cache

    def edit(self, call: AttentionCall) -> AttentionCall:
        self.cache.before(call)
        return call


def _read(call: AttentionCall, new: _New, cut: int) -> tuple[Tensor, Tensor]:
    """All keys and values of a call, the first ``cut`` new ones as the cache holds them and the others as they are."""
    k, v = (_tokens(*given, cut) for given in zip((call.k, call.v), new.written, new.exact, strict=True))
    return k, v


def _tokens(x: Tensor, held: Tensor, own: Tensor, cut: int) -> Tensor:
    old = x.shape[2] - own.shape[2]
    if not (old or cut):
        return own.to(x.dtype)  # some layers compute attention in more digits than their cache has
    some = x.clone()  # laid out in memory as it was: products of another layout round in another way
    some[:, :, old : old + cut], some[:, :, old + cut :] = held[:, :, :cut], own[:, :, cut:]
    return some


def _joined(early: Output, late: Output, cut: int) -> Output:
    """The first ``cut`` tokens of one output and the others of another.

    Both were computed for all tokens: a mask, a bias or a window cut along its rows would be laid out in full, or be
    taken to begin at the first key.
    """
    weights = None
    if early[1] is not None and late[1] is not None:
        weights = torch.cat([early[1][:, :, :cut], late[1][:, :, cut:]], 2)
    return torch.cat([early[0][:, :cut], late[0][:, cut:]], 1), weights


def _newest(call: AttentionCall, pair: tuple[Tensor, Tensor]) -> bool:
    tokens = call.q.shape[2]
    return all(_same(x[:, :, -tokens:], y) for x, y in zip((call.k, call.v), pair, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two are equal; padding may hold NaN."""
    return a.shape == b.shape and bool(((a == b) | a.isnan()).all())
