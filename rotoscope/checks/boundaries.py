"""The residual stream between layers: recorded under padding, resumed from every boundary."""

from __future__ import annotations

from collections.abc import Iterator

from rotoscope.checks.bench import LEFT, Bench, Check, Measure, apart
from rotoscope.model.residual import check, record

RESUMED = "resumed from every boundary"
RECORDED = "the model: h = h of row alone"


def checks(bench: Bench) -> Iterator[Check]:
    """Two checks on short rows: a resumption costs half a forward per layer."""
    yield Check(RESUMED, LEFT, _resumed)
    yield Check(RECORDED, LEFT, _recorded)


def _resumed(bench: Bench) -> Iterator[Measure]:
    """Where padding alone is what breaks it, the row without padding is tried."""
    longest = bench.row(bench.lengths[:2][-1])
    for batch in (bench.padded([longest, longest[:4]], "one row"), bench.batch("one row", [longest])):
        plain = bench.plain(batch)
        found = check(bench.model, bench.arguments(batch))
        scale = plain[batch.real].abs().max().item()
        layers = {k: gap / scale for k, gap in enumerate(found.differences)}
        if max(layers.values()) <= bench.floor:
            break
    # What goes from layer to layer beside the stream is the model's; that it is not carried is said, not hidden.
    yield Measure(
        RESUMED, batch.case, max(layers.values()), bench.floor, "the model's", layers=layers, note=found.reason
    )


def _recorded(bench: Bench) -> Iterator[Measure]:
    longest = bench.row(bench.lengths[:2][-1])
    batch = bench.batch(LEFT, [longest, longest[:4]])
    bench.plain(batch)  # where this runs, recording must
    h = record(bench.model, **bench.arguments(batch)).h
    alone = [record(bench.model, **bench.arguments(bench.batch("", [batch.row(i)]))).h for i in range(2)]
    if h[0].ndim != 3:
        yield Measure(RECORDED, batch.case, float("nan"), 0.0, note="the stream is more than one state per token")
        return
    real = batch.real
    layers = {k: max(apart(h[k][i][real[i].to(h[k].device)], alone[i][k][0]) for i in range(2)) for k in range(len(h))}
    yield Measure(RECORDED, batch.case, max(layers.values()), bench.floor, "the model's", layers=layers)
