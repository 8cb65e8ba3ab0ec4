"""The tap on whole forwards: alone, batched, padded, cached. What the model itself does there is told apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from rotoscope.checks.bench import CACHE_NAMES, LEFT, Batch, Bench, Check, Measure, apart
from rotoscope.checks.watch import Seen, Truth, Weighted
from rotoscope.model.anatomy import FLOOR
from rotoscope.model.tap import tap

STEPS = 2
TAP = "tapped = untouched"
CAUSAL = "no later token changes a logit"
OBSERVED = "observers = sums by hand"
WEIGHTS = "softmax(logits) · V = attention"
CALLS = "calls of every layer"
MODEL = "the model: row = row alone"


def checks(bench: Bench) -> Iterator[Check]:
    """One check for each row alone, for each way to batch, and for each way to use a cache."""
    alone = [bench.batch(_tokens(n), [bench.row(n)]) for n in bench.lengths]
    rows = [bench.row(n) for n in bench.lengths[:3]]
    some = [row for row in rows if len(row) > STEPS]
    twice = bench.batch("batch of 2", [rows[-1], rows[-1].flip(0)])
    padded = [bench.batch(name, rows, left) for name, left in ((LEFT, True), ("right padding", False))]
    for batch in [*alone, twice, *padded]:
        yield Check(TAP, batch.case, partial(_whole, batch=batch))
    cached = [bench.batch(f"cache, {_tokens(len(row))}", [row]) for row in some]
    if some:
        cached.append(bench.batch("cache, left padding", some))
    for batch in cached:
        yield Check(TAP, batch.case, partial(_cached, batch=batch))


def _whole(bench: Bench, batch: Batch) -> Iterator[Measure]:
    plain, real = bench.plain(batch), batch.real
    truth, seen = Truth(batch), Seen()
    weighted = Weighted(truth)
    tapped = bench.tapped(batch, weighted, truth, *seen.parts)
    yield _tap(bench, batch, tapped[real], plain[real], bench.plain)
    if len(batch.ids) > 1:
        yield _own(bench, batch, plain)
    if plain[real].isnan().any():
        return
    yield from _observed(bench, batch, truth, seen, weighted)
    if len(batch.ids) == 1 or batch.case == LEFT:
        yield _causal(bench, batch, plain)


def _cached(bench: Bench, batch: Batch) -> Iterator[Measure]:
    if "use_cache" not in bench.takes:
        yield Measure(TAP, batch.case, float("nan"), 0.0, note="the model's forward takes no use_cache")
        return
    real = batch.real
    truth, seen = Truth(batch, cached=True), Seen(cached=True)
    weighted = Weighted(truth)
    with bench.untouched(batch.case):
        plain = in_steps(bench, batch)
    with tap(bench.lm, weighted, truth, *seen.parts):
        tapped = in_steps(bench, batch, truth)
    yield _tap(bench, batch, tapped[real], plain[real], partial(in_steps, bench))
    yield _own(bench, batch, plain)
    if not plain[real].isnan().any():
        yield from _observed(bench, batch, truth, seen, weighted)


def in_steps(bench: Bench, batch: Batch, truth: Truth | None = None) -> torch.Tensor:
    """Logits of a prefill and some steps of one token each, side by side as one forward would give them."""
    length, out = batch.ids.shape[1], []
    held: dict[str, Any] = {}
    for start, stop in [(0, length - STEPS), *((i, i + 1) for i in range(length - STEPS, length))]:
        if truth is not None:
            truth.at = slice(start, stop)
        answer = bench.model(**bench.arguments(batch, slice(start, stop)), **held, use_cache=True)
        name = next((name for name in CACHE_NAMES if getattr(answer, name, None) is not None), None)
        if name is None:
            raise ValueError("it returns no cache")
        held = {name: getattr(answer, name)}
        out.append(answer.logits.to(batch.ids.device))
    return torch.cat(out, 1)


def _tap(bench: Bench, batch: Batch, tapped: torch.Tensor, plain: torch.Tensor, again: Any) -> Measure:
    """Exactly equal, unless the untouched model differs from itself."""
    difference = apart(tapped, plain)
    if difference == 0:
        return Measure(TAP, batch.case, 0.0, 0.0, strict=True)
    repeated = apart(again(batch)[batch.real], plain)
    note = f"the model differs from itself by {repeated:.1e}" if repeated else ""
    return Measure(TAP, batch.case, difference, 2 * repeated, strict=True, note=note)


def _own(bench: Bench, batch: Batch, plain: torch.Tensor) -> Measure:
    """How far each row of the untouched model's logits is from the same row by itself."""
    gaps = [apart(plain[i][batch.real[i]], bench.alone(batch.row(i))) for i in range(len(batch.ids))]
    nan = bool(plain[batch.real].isnan().any())
    return Measure(MODEL, batch.case, max(gaps), bench.floor, whose="the model's", note="gives NaN" if nan else "")


def _observed(bench: Bench, batch: Batch, truth: Truth, seen: Seen, weighted: Weighted) -> Iterator[Measure]:
    layers = truth.against(seen.sums())  # of the very same tensors, so that the model's dtype is no excuse
    yield Measure(OBSERVED, batch.case, max(layers.values(), default=0.0), FLOOR[torch.float32], layers=layers)
    floor = max(bench.floor, FLOOR[torch.float32])  # attention weights are float32 in most modeling files
    layers = weighted.layers
    yield Measure(WEIGHTS, batch.case, max(layers.values(), default=0.0), floor, layers=layers)
    forwards = 1 if "cache" not in batch.case else 1 + STEPS
    wrong = {
        a.layer: 1.0 for a in bench.lm.anatomy.layers if truth.calls.get(a.layer, 0) != forwards * a.calls
    }  # fmt: skip
    yield Measure(CALLS, batch.case, float(len(wrong)), 0.0, strict=True, layers=wrong)


def _causal(bench: Bench, batch: Batch, plain: torch.Tensor) -> Measure:
    """Change each row's last token under the tap: all that stands before it must stay what the untouched model gave."""
    ids, real = batch.ids.clone(), batch.real.clone()
    last = [int(row.nonzero()[-1]) for row in real]
    for row, at in enumerate(last):
        ids[row, at] = (ids[row, at] + 1) % bench.lm.anatomy.vocabulary
        real[row, at] = False
    changed = bench.tapped(Batch(batch.case, ids, batch.mask), Seen().moments)
    return Measure(CAUSAL, batch.case, apart(changed[real], plain[real]), bench.floor)


def _tokens(n: int) -> str:
    return f"{n} token{'s' * (n > 1)}"
