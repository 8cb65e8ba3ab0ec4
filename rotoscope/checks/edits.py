"""Changes: the identity changes nothing, a real one is felt, in every layer; all is put back, errors included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from rotoscope.checks.bench import LEFT, Bench, Check, Measure, apart
from rotoscope.checks.forwards import in_steps
from rotoscope.errors import Refused
from rotoscope.interventions import (
    Disrupt,
    DistanceCap,
    Freeze,
    LambdaMask,
    Noise,
    QuantizeKV,
    ShiftPositions,
    Shuffle,
    SkipAttention,
    shallow_prefill,
)
from rotoscope.interventions.shift import no_jitter
from rotoscope.model import residual
from rotoscope.model.call import AttentionCall
from rotoscope.model.lm import LM
from rotoscope.model.tap import tap

IDENTITY = "a change by nothing does nothing"
FELT = "a real change is felt"
REACHED = "an edit of each layer is felt"
RESTORED = "the model is put back"
SHALLOW = "a shallow prefill equals freezing"
_FAR = 10**6  # no two tokens of a probe are further apart

Trial = Callable[[LM, bool], AbstractContextManager[Any]]


@dataclass
class Scale:
    """Multiplies queries."""

    by: float

    def edit(self, call: AttentionCall) -> AttentionCall:
        return replace(call, q=call.q * self.by)


@dataclass
class NegateValues:
    """Layer ``layers[i]`` gets the values of row ``i`` of the batch negated."""

    layers: list[int]

    def edit(self, call: AttentionCall) -> AttentionCall:
        if call.layer not in self.layers:
            return call
        v = call.v.clone()
        v[self.layers.index(call.layer)] *= -1
        return replace(call, v=v)


class Raises:
    """Breaks a forward off."""

    def observe(self, call: AttentionCall) -> None:
        raise _Broken


class _Broken(Exception):
    pass


TRIALS: dict[str, Trial] = {
    "editor": lambda lm, real: tap(lm, Scale(1.5 if real else 1.0)),
    "boundary": lambda lm, real: residual.replace(lm.model, 0, lambda h: -h.flip(1) if real else h),
    "disrupt": lambda lm, real: Disrupt(selection="top-2" if real else "top-0", replacement="zero").on(lm),
    "noise": lambda lm, real: Noise(_at(lm, real)).on(lm),
    "shuffle": lambda lm, real: Shuffle(_at(lm, real)).on(lm),
    "freeze": lambda lm, real: Freeze(_at(lm, real)).on(lm),
    "skip": lambda lm, real: SkipAttention(_at(lm, real)).on(lm),
    "lambda-mask": lambda lm, real: LambdaMask(2 if real else _FAR, first=1).on(lm),
    "distance-cap": lambda lm, real: DistanceCap(1 if real else _FAR).on(lm),
    "shift": lambda lm, real: ShiftPositions("jitter", mean=2.0 if real else 0.0).on(lm),
    "quantize-kv": lambda lm, real: _quantized(lm, real).on(lm, prompt=4),
}
"""By name, what changes a model while a block is open: for real, or by nothing. All that apply are tried."""
_APPLIES: dict[str, Callable[[LM], bool]] = {
    "distance-cap": lambda lm: bool(lm.anatomy.rotary),
    "shift": lambda lm: not no_jitter(lm),
}


def _at(lm: LM, real: bool) -> int:
    """The boundary of a change that is felt most, or of one that is none."""
    return 0 if real else len(lm.anatomy.layers)


def _quantized(lm: LM, real: bool) -> QuantizeKV:
    """A cache of keys and values of 2 bits, or one of keys in which every dim is protected."""
    if real:
        return QuantizeKV("int2", group=_FAR)
    kept = {a.layer: torch.ones(a.kv_heads, a.head_dim, dtype=torch.bool) for a in lm.anatomy.attention}
    return QuantizeKV("int2", group=_FAR, targets="K", keep=kept)


def checks(bench: Bench) -> Iterator[Check]:
    """Every trial, every layer, prefill that stops early, and what an exception leaves behind."""
    for name, trial in TRIALS.items():
        if name in _APPLIES and not _APPLIES[name](bench.lm):
            continue
        yield Check(IDENTITY, name, partial(_trial, name=name, trial=trial))
    yield Check(REACHED, "values negated", _each_layer)
    yield Check(SHALLOW, LEFT, _shallow)
    yield Check(RESTORED, "after an exception", _restored)


def traces(model: nn.Module) -> list[tuple[Any, ...]]:
    """Per module, everything that a block could leave behind: hooks, forwards, implementation names, flags."""
    hooks = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    found = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        chosen = getattr(config, "_attn_implementation_internal", None)
        own = vars(module).get("forward")
        counts = tuple(len(getattr(module, hook)) for hook in hooks)
        found.append((name, id(own), counts, module.training, type(chosen), str.__str__(chosen or "")))
    return found


def left_behind(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> int:
    """How many modules are not as they were."""
    return sum(a != b for a, b in zip_longest(before, after))


def _trial(bench: Bench, name: str, trial: Trial) -> Iterator[Measure]:
    batch = bench.batch(name, [bench.row(bench.lengths[:2][-1])])
    plain = bench.plain(batch)
    try:
        with trial(bench.lm, False):
            same = bench.run(batch)
        with trial(bench.lm, True):
            changed = apart(bench.run(batch), plain)
    except Refused as error:
        yield Measure(IDENTITY, name, float("nan"), 0.0, note=str(error))
        return
    yield Measure(IDENTITY, name, apart(same, plain), 2 * apart(bench.plain(batch), plain), strict=True)
    if name == "freeze" and len(bench.lm.anatomy.layers) == 1:
        return  # frozen from the only layer on, every token has the states that it has anyway
    yield Measure(FELT, name, float(not changed > 0), 0.0, strict=True, note=f"by {changed:.1e}")


def _each_layer(bench: Bench) -> Iterator[Measure]:
    """One row of a batch per layer, so that one forward tells of all."""
    layers = [layer.layer for layer in bench.lm.anatomy.attention]
    row = bench.row(bench.lengths[:2][-1])[:5]
    felt = []
    for start in range(0, len(layers), 16):
        some = layers[start : start + 16]
        batch = bench.batch("", [row] * len(some))
        plain, edited = bench.plain(batch), bench.tapped(batch, NegateValues(some))
        felt += [apart(a, b) for a, b in zip(edited, plain, strict=True)]
    unfelt = {layer: 1.0 for layer, by in zip(layers, felt, strict=True) if by == 0}
    yield Measure(REACHED, "values negated", float(len(unfelt)), 0.0, strict=True, layers=unfelt)


def _shallow(bench: Bench) -> Iterator[Measure]:
    """The first new token's logits, to half the depth."""
    longest = bench.row(bench.lengths[:2][-1])
    batch = bench.padded([longest, longest[:4]], "one row")
    if "use_cache" not in bench.takes:
        yield Measure(SHALLOW, batch.case, float("nan"), 0.0, note="the model's forward takes no use_cache")
        return
    with bench.untouched("cache"):
        own = apart(in_steps(bench, batch)[:, -1], bench.plain(batch)[:, -1])  # what the model's cache costs by itself
    depth = len(bench.lm.anatomy.layers) // 2
    with Freeze(depth).on(bench.lm):
        frozen = bench.run(batch)[:, -1]
    try:
        with shallow_prefill(bench.lm, depth):
            shallow = bench.model(**bench.arguments(batch), use_cache=True).logits[:, -1].to(frozen.device)
    except Refused as error:
        yield Measure(SHALLOW, batch.case, float("nan"), 0.0, note=str(error))
        return
    yield Measure(SHALLOW, batch.case, apart(shallow, frozen), max(bench.floor, 10 * own))


def _restored(bench: Bench) -> Iterator[Measure]:
    batch = bench.batch("", [bench.row(bench.lengths[:2][-1])])
    before, plain = traces(bench.model), bench.plain(batch)
    with suppress(_Broken):
        bench.tapped(batch, Raises())
    changed = left_behind(before, traces(bench.model))
    yield Measure(RESTORED, "after an exception", float(changed), 0.0, strict=True)
    difference = apart(bench.plain(batch), plain)
    yield Measure(RESTORED, "logits after an exception", difference, bench.floor)
