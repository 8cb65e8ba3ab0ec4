"""Queries and keys before rotary embedding, against what the layers compute where every position is 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from rotoscope.checks.bench import LEFT, Batch, Bench, Check, Measure, apart
from rotoscope.model.anatomy import FLOOR
from rotoscope.model.call import AttentionCall
from rotoscope.model.residual import record, replace
from rotoscope.model.rotary import Rotation
from rotoscope.model.tap import tap
from rotoscope.observers import Capture, Grams

BEFORE = "un-rotated = those at position 0"
AGAIN = "re-rotated = rotated"
DISTANCE = "logits from un-rotated q, k, i - j"

Calls = dict[int, list[AttentionCall]]


def checks(bench: Bench) -> Iterator[Check]:
    """Nothing where no layer's rotation is known."""
    known = [layer for layer in bench.lm.anatomy.attention if layer.rotation is not None]
    if known:
        yield Check(BEFORE, LEFT, _at_position_0)
    if any(layer.rotation.pairs for layer in known if layer.rotation):
        yield Check(DISTANCE, f"{bench.lengths[:3][-1]} tokens", _by_distance)


def _at_position_0(bench: Bench) -> Iterator[Measure]:
    """The same states enter every layer twice, once at their own positions and once all at position 0.

    A table shifted by one, dims paired in another way or turned the other way round agree with themselves in every
    other respect; here they do not.
    """
    batch = bench.padded([bench.row(n) for n in bench.lengths[:3]], "one row")
    given = bench.arguments(batch)
    with tap(bench.lm, there := Capture()):
        h = record(bench.model, **given).h
    yield _again(bench, batch, there._seen)
    if "position_ids" not in bench.takes:
        yield Measure(BEFORE, batch.case, float("nan"), 0.0, note="the model's forward takes no position_ids")
        return
    zero = given | {"position_ids": torch.zeros_like(batch.ids)}
    try:
        with tap(bench.lm, at_0 := Capture()), ExitStack() as states:
            for k, state in enumerate(h[:-1]):
                states.enter_context(replace(bench.model, k, lambda _, state=state: state))  # type: ignore[misc]
            bench.model(**zero, use_cache=False)
    except Exception:
        with bench.untouched(batch.case):  # does it run so by itself?
            bench.model(**zero, use_cache=False)
        raise
    layers = {
        layer: _worst(batch, ((_unturned(call, x), y) for call, other in _pairs(calls, at_0._seen[layer])
                              for x, y in ((call.q, other.q), (call.k, other.k))))
        for layer, calls in there._seen.items() if _known(calls)
    }  # fmt: skip
    yield Measure(BEFORE, batch.case, max(layers.values(), default=0.0), bench.floor, layers=layers)


def _again(bench: Bench, batch: Batch, seen: Calls) -> Measure:
    layers = {}
    for layer, calls in seen.items():
        turned = [call for call in calls if call.rotation and call.rotation.pairs and call.table is not None]
        if turned:
            pairs = ((c.rotation.rotate(c.unrotate(x), c.table), x) for c in turned for x in (c.q, c.k))  # type: ignore
            layers[layer] = _worst(batch, pairs)
    return Measure(AGAIN, batch.case, max(layers.values(), default=0.0), bench.floor, layers=layers)


def _by_distance(bench: Bench) -> Iterator[Measure]:
    """``Re Σ q conj(k) e^{i (i - j) θ}`` must be the call's own logit of every real pair."""
    n = bench.lengths[:3][-1]
    batch = bench.batch(f"{n} tokens", [bench.row(n)])
    calls, grams = Capture(), Grams()
    bench.tapped(batch, calls, grams)
    distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp_min(0)
    layers: dict[int, float] = {}
    for layer, of_layer in calls._seen.items():
        for call in of_layer:
            if call.rotation is None or not call.rotation.pairs or call.table is None or layer not in grams._seen:
                continue
            q, k = (torch.complex(*call.unrotate(x)[0].chunk(2, -1)) for x in (call.q, call.k))
            k = grams._seen[layer].for_heads(k)
            turns = torch.from_numpy(call.rotation.angles(n)).to(q.device)[distance]
            w = torch.einsum("him,hjm,ijm->hij", q, k.conj(), turns.to(q.dtype)).real.tril() * call.scaling
            found = apart(w, call.logits()[0].double().tril())
            layers[layer] = max(layers.get(layer, 0.0), found)
    floor = max(bench.floor, FLOOR[torch.float32])  # most tables are made in float32, whatever the model's dtype
    yield Measure(DISTANCE, batch.case, max(layers.values(), default=0.0), floor, layers=layers)


def _known(calls: Sequence[AttentionCall]) -> bool:
    return all(c.rotation is not None and (c.table is not None or not c.rotation.pairs) for c in calls)


def _pairs(calls: Sequence[AttentionCall], others: Sequence[AttentionCall]) -> Iterator[tuple[AttentionCall, ...]]:
    """A layer's first call here and there; what a second one receives follows from what the first one returned."""
    return zip(calls[:1], others[:1], strict=True)


def _unturned(call: AttentionCall, x: torch.Tensor) -> torch.Tensor:
    """Un-rotated queries or keys in the layer's own order of dims, scaled as its table scales."""
    rotation = call.rotation
    assert isinstance(rotation, Rotation)
    real, imaginary = call.unrotate(x).chunk(2, -1)
    if not rotation.pairs or rotation.scale is None:
        return torch.cat([real, imaginary], -1)[..., : rotation.head_dim]
    out = real.new_zeros(*real.shape[:-1], rotation.head_dim)
    first, second = rotation.dims()
    scale = torch.from_numpy(rotation.scale).to(real.device)
    out[..., first], out[..., second] = real[..., : rotation.pairs] * scale, imaginary[..., : rotation.pairs] * scale
    still = torch.cat([real[..., rotation.pairs :], imaginary[..., rotation.pairs :]], -1)
    out[..., rotation.still()] = still[..., : len(rotation.still())]
    return out


def _worst(batch: Batch, pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference over real tokens of ``[batch, heads, tokens, dims]``."""
    gaps = [
        apart(a.transpose(1, 2)[batch.real.to(a.device)], b.transpose(1, 2)[batch.real.to(b.device)]) for a, b in pairs
    ]
    return max(gaps, default=0.0)
