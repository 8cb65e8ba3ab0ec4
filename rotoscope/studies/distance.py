"""Controlled distance: all pairs at one dummy distance, so that position and content cannot be confounded.

If a query's logits are position + content, a change of the dummy distance moves all its keys' logits alike (the
distance axis shifts) and leaves their differences as they are (the key axis does not move; Han & Ji 2025, arXiv
2503.13305, section 3). With un-rotated queries and keys both follow from second moments, over all query-key pairs of a
text, causal or not; :class:`rotoscope.interventions.ShiftPositions` does the same to a running model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from rotoscope.engine import REFUSED, Cell
from rotoscope.model.call import AttentionCall
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.residual import stop
from rotoscope.model.tap import tap
from rotoscope.observers import Grams
from rotoscope.observers.grams import LayerGrams
from rotoscope.stats.additive import grid_squares
from rotoscope.stats.moments import Moments
from rotoscope.studies.memory import layers_at_once, split
from rotoscope.studies.observe import LONGEST_DISTANCE, Tables
from rotoscope.studies.options import Options
from rotoscope.studies.texts import Text

DISTANCES = (1, 4, 16, 64, 256, LONGEST_DISTANCE - 1)
NAME = "perturb/distance/text-{}"


def cells(lm: LM, options: Options, some: Sequence[Text]) -> list[Cell]:
    """One cell per text; none where no layer rotates."""
    if not lm.anatomy.rotary:
        return []
    at_once = layers_at_once(lm.anatomy.rotary, max(len(text.ids) for text in some), options.max_memory)
    at = [d for d in DISTANCES if d < (lm.trained_length or LONGEST_DISTANCE)]
    passes = len(split(lm.anatomy.rotary, at_once))
    return [
        Cell(NAME.format(i), distances, {"ids": list(text.ids), "at": at}, float(passes * len(text.ids)), at_once)
        for i, text in enumerate(some)
    ]


def distances(lm: LM, ids: Sequence[int], at: Sequence[int], at_once: int) -> Tables:
    """Run one text and measure how far each head's axes move at some dummy distances."""
    batch = torch.tensor([list(ids)], device=lm.device)
    frames = []
    for part in split(lm.anatomy.rotary, at_once):
        layers = [layer.layer for layer in part]
        seen = _Some(layers)
        with torch.no_grad(), evaluating(lm.model), tap(lm, seen), stop(lm.model, max(layers) + 1):
            lm.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)
        for layer in layers:
            key, distance = (x.cpu().numpy() for x in axis_shifts(seen.layers[layer], at))
            d, head = (x.ravel() for x in np.meshgrid(at, np.arange(key.shape[1]), indexing="ij"))
            of_heads = {"key_axis_shift": key.ravel(), "distance_axis_shift": distance.ravel()}
            frames.append(pd.DataFrame({"layer": layer, "head": head, "d": d, **of_heads}))
    return {"distance": pd.concat(frames, ignore_index=True)}


def axis_shifts(grams: LayerGrams, at: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """By how much logits move from dummy distance 0 to some others, in standard deviations.

    With ``w(i, j, d)`` the logit of query i and key j, the change ``w(i, j, d) - w(i, j, 0)`` is taken apart into each
    query's mean over keys (distance axis) and the rest (key axis).

    Parameters
    ----------
    grams : LayerGrams
        Moments of a layer's queries and keys, position 0 left out.
    at : sequence of int
        Dummy distances.

    Returns
    -------
    tuple of torch.Tensor
        Shift of the key axis and of the distance axis: root mean squares over queries (and keys), each ``[distances,
        heads]``, in units of the standard deviation of a query's logits over keys at distance 0. NaN where that is 0.
    """
    q, keys = grams.q, grams.keys()
    turns = torch.from_numpy(grams.rotation.angles(max([0, *at]) + 1)).to(q.sum.device)
    changes = Moments.of((turns[list(at)] - turns[0])[:, None, None])
    spread = grid_squares(q, keys.centred(), Moments.of(turns[:1]))
    key, both = grid_squares(q, keys.centred(), changes), grid_squares(q, keys, changes)
    # What rounding leaves of squares that are 0.
    key, both = (torch.where(x > 1e-13 * spread, x, 0) for x in (key, both))
    unit = torch.where(spread > 0, spread, torch.nan)
    return (key / unit).sqrt(), ((both - key).clamp_min(0) / unit).sqrt()


def table(done: Mapping[str, Tables]) -> dict[str, pd.DataFrame]:
    """The table ``distance``: means over the texts that were run; empty if none was."""
    prefix = NAME.format("")
    found = [of["distance"] for name, of in done.items() if name.startswith(prefix) and REFUSED not in of]
    if not found:
        return {}
    return {"distance": pd.concat(found).groupby(["layer", "head", "d"], as_index=False).mean()}


class _Some(Grams):
    """Moments of some layers; of the first attention call where a layer makes several."""

    def __init__(self, layers: Sequence[int]):
        super().__init__()
        self._wanted = frozenset(layers)

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self._wanted and call.index == 0:
            super().observe(call)
