"""One method of quantization at a time: put on the model once, and everything measured under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from rotoscope import quantizers
from rotoscope.errors import BadInput, Refused
from rotoscope.interventions.base import Run, Together
from rotoscope.model.lm import LM
from rotoscope.model.tap import tap
from rotoscope.quantizers import checkpoint
from rotoscope.quantizers.base import linear_layers
from rotoscope.studies import quantization_channels as channels
from rotoscope.studies import quantization_logits as logits
from rotoscope.studies import quantization_texts as texts
from rotoscope.studies.disruption import score
from rotoscope.studies.massive import per_head, pooled
from rotoscope.studies.observe import Tables, observe

ITEMS = ["spec", "task", "variant", "id", "correct", "logprob", "chance"]
Ids = Sequence[int]
Asked = Mapping[str, int]
"""Items of each task, by spec."""


def reference(lm: LM, some: Sequence[Ids], effect_tokens: int, seed: int, at_once: int) -> Tables:
    """The model as it is: how likely the texts are, what is re-measured, and its size."""
    numbers = [_compared(lm, ids, end, end) for ids in some for end in (texts.text(lm, ids),)]
    width = 8 * lm.dtype.itemsize
    facts = {"bits": float(width), "share_changed": 0.0, "bytes": stored_bytes(lm)}
    return {
        "facts": pd.DataFrame([facts]),
        "texts": _texts(numbers),
        "effects": effects(lm, some[0][:effect_tokens], seed, at_once),
    }


def weights(
    lm: LM, spec: str, some: Sequence[Ids], calibration: Sequence[Ids], effect_tokens: int, asked: Asked, seed: int,
    at_once: int,
) -> Tables:  # fmt: skip
    """The model under a quantizer of weights, or of weights and activations.

    Returns
    -------
    dict
        ``facts`` (bits a weight, share of the decoder's weights that changed, bytes of the whole model), ``texts``
        (text, clean, nll, kl), ``items``, ``effects`` (measure, value), ``logits`` (by layer).

    Raises
    ------
    Refused
        If the method cannot be put on the model, or its library is missing.
    """
    how = _parsed(spec, calibration)
    before = logits.clean(lm, some[0])
    masks = channels.find(lm, some[:2]).masks
    cleanly = [texts.text(lm, ids) for ids in some]
    with opened(how, lm) as run:
        with tap(lm, kept := logits.Kept()):
            changed = [texts.run(lm, some[0])]
        changed += [texts.run(lm, ids) for ids in some[1:]]
        tables = {
            "items": items(lm, asked, seed),
            "effects": effects(lm, some[0][:effect_tokens], seed, at_once),
            "facts": pd.DataFrame([_facts(lm, run)]),
        }
    pairs = zip(some, cleanly, changed, strict=True)
    tables["texts"] = _texts([_compared(lm, ids, clean, end) for ids, clean, end in pairs])
    tables["logits"] = logits.errors(before, kept.layers, masks)
    return tables


def stored(lm: LM, path: str, some: Sequence[Ids], effect_tokens: int, asked: Asked, seed: int, at_once: int) -> Tables:
    """The same of a quantized checkpoint of the model, which is loaded beside it."""
    try:
        other = checkpoint.load(path, lm)
        facts = checkpoint.about(other, lm)
    except BadInput as error:
        raise Refused(str(error)) from error
    before = logits.clean(lm, some[0])
    masks = channels.find(lm, some[:2]).masks
    with tap(other, kept := logits.Kept()):
        changed = [texts.run(other, some[0])]
    changed += [texts.run(other, ids) for ids in some[1:]]
    numbers = [_compared(lm, ids, texts.text(lm, ids), end, other) for ids, end in zip(some, changed, strict=True)]
    return {
        "facts": pd.DataFrame([facts]),
        "texts": _texts(numbers),
        "items": items(other, asked, seed),
        "effects": effects(other, some[0][:effect_tokens], seed, at_once),
        "logits": logits.errors(before, kept.layers, masks),
    }


def protect(
    lm: LM, spec: str, arm: str, draw: int, count: int, some: Sequence[Ids], asked: Asked, take: int, seed: int,
    at_once: int,
) -> Tables:  # fmt: skip
    """Items under a quantizer of weights that leaves something exact.

    Parameters
    ----------
    arm
        ``massive``: the rows that make massive channels of queries and keys. ``random``: as many others. ``layers``:
        the ``count`` layers with most massive energy at 8 bits. ``random-layers``: as many others.
    draw
        Seed of the random ones.
    take
        Items of each task, of those that are asked.
    """
    found = channels.find(lm, some[:2])
    how: Any = _parsed(spec)
    if arm in ("massive", "random"):
        how = replace(how, keep=channels.rows(lm, found.masks if arm == "massive" else found.random(draw)))
    else:
        kept = found.layers(count) if arm == "layers" else found.random_layers(count, draw)
        finer = replace(how, bits=8, layers=kept)
        how = Together((replace(how, layers=[i for i in quantizable(lm) if i not in kept]), finer))
    with opened(how, lm) as run:
        tables = items(lm, asked, seed, take, at_once)
    measured = run.measured
    return {"items": tables, "facts": pd.DataFrame([{"bits": measured["bits"] / measured["weights"]}])}


def sensitivity(lm: LM, spec: str, layer: int, some: Sequence[Ids]) -> Tables:
    """Texts with one layer's weights quantized."""
    how = replace(_parsed(spec), layers=(layer,))
    cleanly = [texts.text(lm, ids) for ids in some]
    with opened(how, lm):
        changed = [texts.run(lm, ids) for ids in some]
    pairs = zip(some, cleanly, changed, strict=True)
    return {"texts": _texts([_compared(lm, *three) for three in pairs])}


def grid(lm: LM) -> Tables:
    """Whether the weights lie on a low-bit grid already."""
    return {"grid": quantizers.low_bit_grid(lm)}


def items(lm: LM, asked: Asked, seed: int, take: int | None = None, at_once: int = 2048) -> pd.DataFrame:
    """A model's answers, as it is now: ``take`` of the ``n`` items of each task."""
    found = []
    for spec, n in asked.items():
        of_task = score(lm, spec, n, min(take or n, n), seed, None, at_once)["items"]
        found.append(of_task.assign(spec=spec))
    return pd.concat(found, ignore_index=True)[ITEMS] if found else pd.DataFrame(columns=ITEMS)


def effects(lm: LM, ids: Ids, seed: int, at_once: int) -> pd.DataFrame:
    """How many heads have massive values, and how additive logits are: measure, value."""
    seen = observe(lm, ids, seed, (), at_once)
    heads = per_head(pooled([seen["dims"]]))
    share = heads.assign(has=heads["count"] > 0).groupby("tensor").has.mean()
    rows = [(f"massive_{tensor.lower()}", float(share[tensor])) for tensor in "QKV"]
    if "form1_within" in seen["heads"]:
        rows.append(("form1_within", float(seen["heads"].form1_within.mean())))
    return pd.DataFrame(rows, columns=["measure", "value"])


@contextmanager
def opened(how: Any, lm: LM) -> Iterator[Run]:
    """An intervention on the model; what cannot be put on it is refused in its own words."""
    with ExitStack() as stack:
        try:
            run = stack.enter_context(how.on(lm))
        except BadInput as error:
            raise Refused(str(error)) from error
        yield run


def _parsed(spec: str, calibration: Sequence[Ids] = ()) -> Any:
    try:
        return quantizers.parse(spec, calibration)
    except BadInput as error:
        raise Refused(str(error)) from error


def quantizable(lm: LM) -> list[int]:
    """The decoder layers that have linear layers."""
    return sorted({linear.layer for linear in linear_layers(lm)})


def _compared(
    lm: LM, ids: Ids, clean: texts.Ends, changed: texts.Ends, head: LM | None = None
) -> tuple[float, float, float]:
    columns = torch.arange(len(ids) - 1)
    return texts.compare(lm, clean, changed, torch.tensor(list(ids[1:])), columns, head)


def _texts(numbers: Sequence[tuple[float, float, float]]) -> pd.DataFrame:
    table = pd.DataFrame(numbers, columns=["clean", "nll", "kl"])
    return table.rename_axis("text").reset_index()


def _facts(lm: LM, run: Run) -> dict[str, float]:
    of = run.measured
    own = of["weights"] * lm.dtype.itemsize
    return {
        "bits": of["bits"] / of["weights"],
        "share_changed": of["changed"] / of["should"],
        "bytes": stored_bytes(lm) - own + of["bits"] / 8,
    }


def stored_bytes(lm: LM) -> float:
    """What a model's parameters take."""
    return float(sum(p.numel() * p.itemsize for p in lm.model.parameters()))
