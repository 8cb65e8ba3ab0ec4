"""What the study measures of quantized caches: all of them together, task by task, behind one prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from rotoscope.errors import BadInput, Refused
from rotoscope.interventions import Together, parse
from rotoscope.model.lm import LM
from rotoscope.model.prompts import Prompts
from rotoscope.studies import quantization_cache as caches
from rotoscope.studies import quantization_channels as channels
from rotoscope.studies import quantization_logits as logits
from rotoscope.studies import quantization_texts as texts
from rotoscope.studies.observe import Tables
from rotoscope.studies.quantization_cache import Stored, Variant
from rotoscope.studies.quantization_cells import ITEMS, Ids
from rotoscope.tasks import evaluate, find
from rotoscope.tasks.evaluate import prepared

Given = Sequence[Any]
"""A method's name in tables and the arguments of its `Variant`."""


def answers(
    lm: LM, spec: str, n: int, seed: int, variants: Sequence[Given], some: Sequence[Ids], at_once: int
) -> Tables:
    """A task's items from caches stored in several ways.

    Parameters
    ----------
    variants
        For each its method's name in tables, then spec, arm, draw and count of a `Variant`.
    some
        Texts that massive channels are found on.

    Returns
    -------
    dict
        ``items`` and ``facts`` (bits a value), both by method, arm and draw.
    """
    ways = [(str(name), Variant(*how)) for name, *how in variants]
    stores = {str(i): _opened(lm, way, some) for i, (_, way) in enumerate(ways)}
    task = find(spec)
    if hasattr(task, "evaluate") or task.scoring == "generate":
        tables = {i: _one_by_one(lm, spec, n, seed, of, at_once) for i, of in stores.items()}
    else:
        asked = prepared(lm, task, n=n, seed=seed)
        scored = caches.score(lm, asked.rows, stores, at_once)
        tables = {i: asked.table(of) for i, of in scored.items()}
    found, facts = [], []
    for i, (name, way) in enumerate(ways):
        labels = {"method": name, "arm": way.arm, "draw": way.draw}
        found.append(tables[str(i)].assign(spec=spec)[ITEMS].assign(**labels))
        facts.append({**labels, "bits": stores[str(i)].bits})
    return {"items": pd.concat(found, ignore_index=True), "facts": pd.DataFrame(facts)}


def likelihoods(lm: LM, some: Sequence[Ids], methods: Mapping[str, str]) -> Tables:
    """The second half of texts from caches of their first half.

    Parameters
    ----------
    methods
        Spec of each method, by its name in tables.

    Returns
    -------
    dict
        ``texts`` (method, text, clean, nll, kl), ``facts`` (method, bits), ``logits`` (method and, by layer, errors of
        products with the keys of the first text), ``effects`` (method, measure, value, clean).
    """
    stores = {name: _opened(lm, Variant(spec), some[:2]) for name, spec in methods.items()}
    rows = []
    for i, ids in enumerate(some):
        for name, numbers in _second_half(lm, ids, stores).items():
            rows.append((name, i, *numbers))
    masks, before = channels.find(lm, some[:2]).masks, logits.clean(lm, some[0])
    errors, effects = [], []
    for name, spec in methods.items():
        after = _stored(before, _opened(lm, Variant(spec), some[:2]))
        errors.append(logits.errors(before, after, masks).assign(method=name))
        effects.append((name, "massive_k", _share(after), _share(before)))
    return {
        "texts": pd.DataFrame(rows, columns=["method", "text", "clean", "nll", "kl"]),
        "facts": pd.DataFrame([(name, of.bits) for name, of in stores.items()], columns=["method", "bits"]),
        "logits": pd.concat(errors, ignore_index=True),
        "effects": pd.DataFrame(effects, columns=["method", "measure", "value", "clean"]),
    }


def layers(lm: LM, spec: str, chosen: Sequence[int], some: Sequence[Ids]) -> Tables:
    """The same with the cache of one layer at a time: layer, text, clean, nll, kl."""
    how: Any = parse(spec)
    stores = {str(layer): Stored(lm, (replace(how, layers=(layer,)),)) for layer in chosen}
    rows = [
        (int(layer), i, *numbers)
        for i, ids in enumerate(some)
        for layer, numbers in _second_half(lm, ids, stores).items()
    ]
    return {"texts": pd.DataFrame(rows, columns=["layer", "text", "clean", "nll", "kl"])}


def _opened(lm: LM, way: Variant, some: Sequence[Ids]) -> Stored:
    try:
        return Stored(lm, way.parts(lm, some))
    except BadInput as error:
        raise Refused(str(error)) from error


def _second_half(lm: LM, ids: Ids, stores: Mapping[str, Stored]) -> dict[str, tuple[float, float, float]]:
    """Mean nats of a text's second half, clean and changed, and the divergence between them, by method."""
    caches.check(lm)
    half = len(ids) // 2
    first = caches.Prefilled.of(lm, Prompts.of([ids[:half]], [ids[half:]]))
    columns = torch.arange(len(ids) - half)

    def ends(stored: Stored | None) -> texts.Ends:
        given = first.arguments(lm, stored)
        return texts.run(lm, given.pop("input_ids"), **given)

    clean = ends(None)
    targets = torch.tensor(list(ids[half:]))
    return {name: texts.compare(lm, clean, ends(of), targets, columns) for name, of in stores.items()}


def _stored(before: Mapping[int, logits.Products], stored: Stored) -> dict[int, logits.Products]:
    """The same queries with the keys that a cache hands back."""
    out = {}
    for layer, of in before.items():
        k = of.k[None]
        mask = torch.ones(1, k.shape[2], dtype=torch.long)
        out[layer] = replace(of, k=stored.through(layer, k, k, mask)[0][0])
    return out


def _share(of: Mapping[int, logits.Products]) -> float:
    """Share of heads whose keys have a massive value."""
    rms = [x.k.square().mean(1).sqrt() for x in of.values()]
    has = torch.cat([(x.amax(-1) > channels.LAMBDA * x.mean(-1)) for x in rms])
    return float(has.float().mean())


def _one_by_one(lm: LM, spec: str, n: int, seed: int, stored: Stored, at_once: int) -> pd.DataFrame:
    """Tasks that generate, or that another library runs: each cache in a run of its own."""
    return evaluate(lm, spec, n=n, seed=seed, under=Together(stored.parts), batch_tokens=at_once)
