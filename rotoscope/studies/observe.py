"""One forward over one text, reduced to tables: what the position and the massive study share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from rotoscope.engine import REFUSED, Cell
from rotoscope.model.anatomy import LayerAnatomy
from rotoscope.model.call import AttentionCall, Observer
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.residual import stop
from rotoscope.model.tap import tap
from rotoscope.model.twin import random_twin
from rotoscope.observers import Causal, Entropy, Grams, Moments
from rotoscope.observers.grams import LayerGrams
from rotoscope.observers.moments import DimSums
from rotoscope.stats import additive, nulls
from rotoscope.stats.causal import fit_causal
from rotoscope.stats.moments import Moments as SecondMoments
from rotoscope.studies.memory import layers_at_once, split
from rotoscope.studies.options import Options
from rotoscope.studies.texts import Text

LONGEST_DISTANCE = 1024
KINDS = ("form1", "form1_within", "form2", "form2_within")
TRAINED, RANDOM = "observe/trained/text-{}", "observe/random/seed-{}"

Tables = dict[str, pd.DataFrame]


def cells(lm: LM, options: Options, some: Sequence[Text]) -> list[Cell]:
    """One cell per text, and one per random-weights twin, each twin on one of the texts."""
    layers = lm.anatomy.attention
    at_once = layers_at_once(layers, max(len(t.ids) for t in some), options.max_memory)
    passes = max(1, len(split(layers, at_once)))
    trained = [
        Cell(TRAINED.format(i), observe, {"ids": t.ids, "seed": options.seed + i}, passes * len(t.ids), at_once)
        for i, t in enumerate(some)
    ]
    random = []
    for i in range(options.random_seeds):
        ids = some[i % len(some)].ids
        arguments = {"ids": ids, "seed": options.seed + i}
        cost = (passes + 0.5) * len(ids)
        random.append(Cell(RANDOM.format(i), observe_twin, arguments, cost, at_once, optional=True))
    return trained + random


def twins(done: Mapping[str, Tables], options: Options) -> tuple[list[Tables], str]:
    """The tables of the random-weights twins that could be run, and why the others could not (or "")."""
    every = [done[RANDOM.format(i)] for i in range(options.random_seeds)]
    reasons = [str(tables[REFUSED].reason[0]) for tables in every if REFUSED in tables]
    return [tables for tables in every if REFUSED not in tables], reasons[0] if reasons else ""


def observe_twin(lm: LM, ids: Sequence[int], seed: int, at_once: int | None = None) -> Tables:
    """:func:`observe` on a random-weights twin, with the arms that are repeated there."""
    return observe(random_twin(lm, seed), ids, seed, nulls.RANDOM_WEIGHTS_ARMS, at_once)


def observe(
    lm: LM, ids: Sequence[int], seed: int, arms: Sequence[str] = tuple(nulls.ARMS), at_once: int | None = None
) -> Tables:
    """Run one text and reduce what attention received.

    Parameters
    ----------
    lm : LM
        The model.
    ids : sequence of int
        Token ids of the text.
    seed : int
        For the arms that draw samples.
    arms : sequence of str
        Arms of the explanation table to fit.
    at_once : int, optional
        Layers observed in one forward, by default all. Fewer take less memory and more forwards, and give the same
        numbers to the last bit.

    Returns
    -------
    dict
        ``heads`` (one row per layer and head), ``pairs`` (per layer, head and rotary pair), ``dims`` (per layer,
        tensor, head and dim: count, mean and root mean square, rotated and un-rotated, value at position 0).
    """
    layers = lm.anatomy.attention
    generator = torch.Generator().manual_seed(seed)
    tables: dict[str, list[pd.DataFrame]] = {"heads": [], "pairs": [], "dims": []}
    for part in split(layers, at_once or len(layers)):
        for name, rows in _observe(lm, ids, part, arms, generator).items():
            tables[name] += rows
    return {name: pd.concat(rows, ignore_index=True) for name, rows in tables.items() if rows}


def _observe(
    lm: LM, ids: Sequence[int], layers: Sequence[LayerAnatomy], arms: Sequence[str], generator: torch.Generator
) -> dict[str, list[pd.DataFrame]]:
    """One forward, up to the last of these layers, reduced to their tables."""
    chosen = {layer.layer for layer in layers}
    by_call = [(Moments(), Grams(), Causal(), Entropy()) for _ in range(max(layer.calls for layer in layers))]
    parts = [_Only(chosen, call, observer) for call, observers in enumerate(by_call) for observer in observers]
    batch = torch.tensor([list(ids)], device=lm.device)
    with torch.no_grad(), evaluating(lm.model), tap(lm, *parts), stop(lm.model, max(chosen) + 1):
        lm.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)
    tables: dict[str, list[pd.DataFrame]] = {"heads": [], "pairs": [], "dims": []}
    for layer in layers:
        for call, observers in enumerate(by_call[: layer.calls]):
            for name, frame in _reduce(lm, layer, *observers, arms, generator):
                # The heads of a layer's second attention call are counted on from those of the first.
                frame["head"] += call * (frame["head"].max() + 1)
                if "kv_head" in frame:
                    frame["kv_head"] += call * layer.kv_heads
                tables[name].append(frame)
    return tables


def _reduce(
    lm: LM, layer: LayerAnatomy, moments: Moments, grams: Grams, causal: Causal, entropy: Entropy,
    arms: Sequence[str], generator: torch.Generator,
) -> Iterator[tuple[str, pd.DataFrame]]:  # fmt: skip
    """The tables of one attention call of a layer."""
    i = layer.layer
    columns: dict[str, Any] = {
        "layer": i,
        "head": np.arange(layer.heads),
        "kv_head": np.arange(layer.heads) // (layer.heads // layer.kv_heads),
        "position": layer.position,
        "entropy": entropy.layers[i].entropy,
        "sink_mass": entropy.layers[i].sink_mass,
    }
    real = fit_causal(causal.layers[i][0])
    columns |= {"causal": real.form2, "causal_within": real.form2_within}
    reach = min(n for n in (LONGEST_DISTANCE, lm.trained_length, layer.window) if n)
    of_layer = grams.layers.get(i) if layer.position == "rotary" else None
    if of_layer is not None:
        columns |= _additivity(of_layer, reach, lm.trained_length, arms, generator)
        yield "pairs", _pairs(i, of_layer, reach)
    if layer.slopes is not None:
        columns |= biased_additivity(grams.layers[i], layer.scaling, layer.slopes, reach)
    yield "heads", pd.DataFrame(_numpy(columns))
    for name, sums in moments.layers[i].items():
        yield "dims", _dims(i, name, sums, of_layer)


class _Only:
    """Shows an observer one of the attention calls of each of some layers."""

    def __init__(self, layers: set[int], index: int, observer: Observer):
        self._layers, self._index, self._observer = layers, index, observer

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self._layers and call.index == self._index:
            self._observer.observe(call)


def _additivity(
    grams: LayerGrams, reach: int, trained: int | None, arms: Sequence[str], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    q, k, e = grams.q, grams.keys(), grams.turns(reach)
    columns = _fit(q, k, e)
    for arm in arms:
        columns |= _fit(*nulls.ARMS[arm](q, k, generator), e, suffix=f"__{arm}")
    columns |= _fit(grams.queries(position0=True), grams.keys(position0=True), e, suffix="__with_position_0")
    energy = q.pair_energy
    share = energy / energy.sum(-1, keepdim=True)
    resultant = grams.for_heads(grams.phase.abs() / grams.k.n)
    return columns | {
        "predicted": additive.predicted_form1_within(q, k, e),
        "slow_query_share": (share * (_wavelength(grams, energy.shape[-1]) >= (trained or reach))).sum(-1),
        "phase_resultant": (share * resultant).sum(-1),
    }


def biased_additivity(
    grams: LayerGrams, scaling: float, slopes: Sequence[float], reach: int
) -> dict[str, torch.Tensor]:
    """Form 2 per head of ``w(i, j, d) = scaling · q_i·k_j - slope · d`` on the full grid.

    Distance and content add up by construction, so form 1 holds trivially and is not given.
    """
    q, k = grams.q, grams.keys()
    content = additive.fit_moments(q, k, grams.turns(reach))
    d = torch.arange(reach, dtype=torch.float64, device=q.sum.device)
    slope = torch.tensor(slopes, dtype=torch.float64, device=q.sum.device)
    distance = q.n * k.n * slope.square() * (d - d.mean()).square().sum()
    raw, within, residual = (scaling**2 * x for x in (content.raw, content.within, content.residual2))
    return {
        "form2": additive.correlation(residual, raw + distance),
        "form2_within": additive.correlation(residual, within + distance),
    }


def _fit(q: SecondMoments, k: SecondMoments, e: SecondMoments, suffix: str = "") -> dict[str, torch.Tensor]:
    fit = additive.fit_moments(q, k, e)
    return {kind + suffix: getattr(fit, kind) for kind in KINDS}


def _wavelength(grams: LayerGrams, pairs: int) -> torch.Tensor:
    """Tokens per full circle of every pair; infinite for pairs made of dims that do not rotate."""
    theta = grams.rotation.theta
    out = torch.full((pairs,), torch.inf, dtype=torch.float64)
    if theta is not None:
        out[: len(theta)] = 2 * torch.pi / torch.from_numpy(theta).abs()
    return out.to(grams.q.sum.device)


def _pairs(layer: int, grams: LayerGrams, reach: int) -> pd.DataFrame:
    energy = grams.q.pair_energy
    heads, pairs = energy.shape
    turning = grams.rotation.pairs
    wavelength = _wavelength(grams, pairs).expand(heads, -1)
    columns = {
        "theta": 2 * torch.pi / wavelength,
        "wavelength": wavelength,
        "query_energy": energy / energy.sum(-1, keepdim=True),
        "concentration": grams.for_heads(additive.concentration(grams.k)),
        "rotation_spread": additive.rotation_spread(grams.turns(reach)).expand(heads, -1),
    }
    head, pair = np.divmod(np.arange(heads * turning), turning)
    flat = {name: values[:, :turning].flatten() for name, values in columns.items()}
    return pd.DataFrame({"layer": layer, "head": head, "pair": pair, **_numpy(flat)})


def _dims(layer: int, tensor: str, sums: DimSums, grams: LayerGrams | None) -> pd.DataFrame:
    heads, width = sums.sum.shape
    pre_mean, pre_square = sums.mean, sums.squares / sums.n
    pair = np.full(width, -1)
    if grams is not None and tensor != "v":
        rest, zeroth = (grams.q, grams.q0) if tensor == "q" else (grams.k, grams.k0)
        all_tokens = rest + SecondMoments.of(zeroth)
        pre_mean, pre_square = (
            _by_dim(grams, x / all_tokens.n) for x in (all_tokens.sum, all_tokens.gram.diagonal(dim1=-2, dim2=-1))
        )
        pair = grams.rotation.pair_of_dim()
    head, dim = np.divmod(np.arange(heads * width), width)
    columns = {
        "mean": sums.mean, "rms": sums.rms, "mean_pre": pre_mean, "rms_pre": pre_square.sqrt(), "first": sums.first
    }  # fmt: skip
    flat = _numpy({name: values.flatten() for name, values in columns.items()})
    frame = {"layer": layer, "tensor": tensor.upper(), "head": head, "dim": dim, "pair": pair[dim], "n": sums.n}
    return pd.DataFrame(frame | flat)


def _by_dim(grams: LayerGrams, x: torch.Tensor) -> torch.Tensor:
    """From real-then-imaginary pair order back to the layer's own dims ``[heads, head_dim]``."""
    rotation = grams.rotation
    real, imaginary = x.chunk(2, -1)
    out = x.new_zeros(*x.shape[:-1], rotation.head_dim)
    first, second = rotation.dims()
    out[..., first], out[..., second] = real[..., : rotation.pairs], imaginary[..., : rotation.pairs]
    still = torch.cat([real[..., rotation.pairs :], imaginary[..., rotation.pairs :]], -1)
    out[..., rotation.still()] = still[..., : len(rotation.still())]
    return out


def _numpy(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for name, x in columns.items()}
