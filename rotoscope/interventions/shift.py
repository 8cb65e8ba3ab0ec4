"""ShiftPositions: tokens where they are not, by position ids or by rotated features (Han & Ji 2025, arXiv 2503.13305).

The text stays as it is; what changes is where the model takes its tokens to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rotoscope.errors import BadInput, Refused
from rotoscope.interventions.base import Intervention, Layers, Run, chosen_layers
from rotoscope.model.call import AttentionCall
from rotoscope.model.forwards import Forward, around
from rotoscope.model.prompts import takes
from rotoscope.model.rotary import Rotation
from rotoscope.model.tap import tap

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

KINDS = ("jitter", "rotate", "dummy")


@dataclass(frozen=True)
class ShiftPositions(Intervention):
    """Take the prompt's tokens to be at other positions.

    Parameters
    ----------
    kind : str
        ``jitter``: the position ids of the forward are shifted, for all layers alike. ``rotate``: queries and keys of a
        token are turned as if it stood elsewhere, at another place in every layer. ``dummy``: every pair of tokens is
        taken to be ``distance`` apart, also those that follow the prompt.
    shifts : sequence of int, or mapping of layers to such, optional
        By how much each token is shifted, from the prompt's first on, padding left out; tokens beyond stay. For
        ``rotate`` they are the same in all layers, or given for each.
    mean : float
        Mean |shift| of the shifted tokens where ``shifts`` are not given: all are shifted by this, or the whole numbers
        next to it, to either side at random. Nothing is shifted out of the prompt.
    share : float
        Share of the prompt's tokens that are shifted, drawn at random; position 0 never is.
    distance : int
        Of all pairs, with ``dummy``.
    layers
        One layer, several, or None for all that rotate; not for ``jitter``.
    seed : int
        What is drawn also depends on the prompt's tokens and, with ``rotate``, on the layer.

    Notes
    -----
    ``run.measured`` sums over prompts (and layers): ``tokens``, ``shifted`` (how many of them were) and ``shift``
    (``Σ |shift|``). Where a forward brings no position ids, jitter counts positions by the mask.
    """

    name: ClassVar[str] = "shift"
    kind: str = "jitter"
    shifts: Sequence[int] | Mapping[int, Sequence[int]] | None = None
    mean: float = 1.0
    share: float = 1.0
    distance: int = 0
    layers: Layers = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        if not 0 <= self.share <= 1 or self.mean < 0 or self.distance < 0:
            raise BadInput("share is from 0 to 1, mean and distance are 0 or more")
        if self.kind == "jitter" and self.layers is not None:
            raise BadInput("position ids are the same for all layers: leave layers out, or use kind rotate")
        fitting = (Sequence, type(None)) if self.kind == "jitter" else (Sequence, Mapping, type(None))
        if not isinstance(self.shifts, fitting) or (self.kind == "dummy" and self.shifts is not None):
            raise BadInput(f"{self.kind} takes no such shifts: give one whole number a token, or leave them out")

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        if self.kind == "jitter":
            if reason := no_jitter(lm):
                raise Refused(reason)
            stack.enter_context(around(lm.model, partial(self._jittered, run)))
            return
        rotary = [layer.layer for layer in lm.anatomy.rotary]
        if not rotary:
            raise Refused(f"no layer of {lm.source} rotates its queries and keys: there is no turn to change")
        stack.enter_context(tap(lm, _Turned(self, run, chosen_layers(self.layers, rotary, "layers that rotate"))))

    def _jittered(self, run: Run, forward: Forward, proceed: Any) -> Any:
        if forward.past:
            return proceed(**forward.arguments)
        run.follow(forward, lambda **_: None)  # seeds belong to this forward, which the run is told of only later
        shifts = self.drawn(run, forward)
        run.fired += 1
        if not bool(shifts.any()):
            return proceed(**forward.arguments)
        given, mask = (forward.arguments.get(name) for name in ("position_ids", "attention_mask"))
        places = (forward.real.cumsum(-1) - 1).clamp_min(0) if given is None else given
        # Without a mask, position ids that do not rise by one each pass for several texts packed into a row.
        mask = torch.ones_like(forward.real, dtype=torch.long) if mask is None else mask
        return proceed(**{**forward.arguments, "position_ids": places + shifts, "attention_mask": mask})

    def drawn(self, run: Run, forward: Forward, layer: int | None = None) -> Tensor:
        """By how much each column of a prompt is shifted, ``[batch, tokens]``."""
        out = torch.zeros(forward.real.shape, dtype=torch.long)
        seeds = run.seeds(len(out), self.seed, layer)
        for row, real in enumerate(forward.real[:, : run.prompt].cpu()):
            columns = real.nonzero()[:, 0]
            own = self._of_prompt(len(columns), seeds[row], layer)
            out[row, columns] = torch.from_numpy(own)
            run.measure(tokens=len(own), shifted=int((own != 0).sum()), shift=int(np.abs(own).sum()))
        return out.to(forward.real.device)

    def _of_prompt(self, tokens: int, seed: int, layer: int | None) -> NDArray[np.int64]:
        if self.shifts is not None:
            given = self.shifts
            if isinstance(given, Mapping):
                if layer is None or layer not in given:
                    raise BadInput(f"there are no shifts for layer {layer}: give them for every layer that is changed")
                given = given[layer]
            out = np.zeros(tokens, int)
            out[: len(given)] = given[:tokens]
            return out
        rng = np.random.default_rng(seed)
        chosen = 1 + rng.permutation(max(0, tokens - 1))[: round(self.share * tokens)]
        # As even as whole numbers can be, so that their mean is the one asked for.
        sizes = np.zeros(tokens, int)
        sizes[chosen] = np.diff(np.round(self.mean * np.arange(len(chosen) + 1)).astype(int))
        return signed(sizes, seed)


def no_jitter(lm: LM) -> str:
    """Why position ids of a model cannot be shifted, in a sentence, or ""."""
    if not {layer.position for layer in lm.anatomy.attention} & {"rotary", "learned"}:
        return f"{lm.source} takes no positions from position ids, neither by rotation nor by a table"
    if "position_ids" not in takes(lm.model):
        return f"{type(lm.model).__name__} accepts no position_ids that could be shifted"
    return ""


def signed(sizes: ArrayLike, seed: int | Sequence[int]) -> NDArray[np.int64]:
    """Shifts of given sizes ``[tokens]`` to either side, at random where both keep within the text.

    Raises
    ------
    BadInput
        If one leads out of the text on both sides.
    """
    size = np.asarray(sizes, dtype=np.int64)
    at = np.arange(len(size))
    left, right = at - size >= 0, at + size < len(size)
    if not np.all(left | right):
        raise BadInput(f"a shift by {size[~(left | right)][0]} leads out of a text of {len(size)} tokens")
    up = np.where(left & right, np.random.default_rng(seed).random(len(size)) < 0.5, right)
    return np.where(up, size, -size)


class _Turned:
    """What a block puts on the tap: the turns that queries and keys are given in place of their own.

    A cache keeps keys as the model made them; the turns of all columns are kept here, and given anew in every step.
    """

    def __init__(self, how: ShiftPositions, run: Run, layers: frozenset[int]):
        self._how, self._run, self._layers = how, run, layers
        self._columns: dict[tuple[int, int], Tensor] = {}

    def edit(self, call: AttentionCall) -> AttentionCall:
        if call.layer not in self._layers:
            return call
        if call.rotation is None or call.table is None:
            raise Refused(f"layer {call.layer}: the angles by which queries and keys were turned are not reached")
        forward: Any = self._run.forward
        q, k = self._factors(call, forward)
        key = call.layer, call.index
        if forward.past:
            before = self._columns.get(key)
            if before is None or (len(before), before.shape[2]) != (len(call.q), forward.past):
                raise BadInput("a step with shifted positions needs its own prompt's prefill inside the same block")
            k = torch.cat([before, k], 2)
        self._columns[key] = k
        self._run.fired += 1
        k = k[:, :, -call.k.shape[2] :]  # a layer with a window hands over the nearest keys only
        return replace(call, q=turned(call.rotation, call.q, q), k=turned(call.rotation, call.k, k))

    def _factors(self, call: AttentionCall, forward: Forward) -> tuple[Tensor, Tensor]:
        """What the call's own queries and keys are multiplied by, complex ``[batch, 1, tokens, pairs]``."""
        rotation: Any = call.rotation
        own = torch.complex(*rotation.turns(call.table)).expand(len(call.q), -1, -1, -1)
        if self._how.kind == "dummy":
            theta, scale = (torch.from_numpy(x).to(own.device) for x in (rotation.theta, rotation.scale))
            return torch.polar(scale, self._how.distance * theta) / own, scale / own
        if forward.past:
            one = torch.ones_like(own)
            return one, one
        shifts = self._how.drawn(self._run, forward, call.layer).to(own.device)
        there = torch.arange(shifts.shape[1], device=own.device) + shifts
        real = call.tokens
        if bool(((there < 0) | (there >= shifts.shape[1])).any()) or not bool((real.gather(1, there) | ~real).all()):
            raise BadInput("rotate knows the turns of the prompt's own positions only: keep shifted tokens within it")
        turn = own.gather(2, there[:, None, :, None].expand_as(own)) / own
        turn = torch.where(shifts[:, None, :, None] != 0, turn, torch.ones_like(turn))
        return turn, turn


def turned(rotation: Rotation, x: Tensor, factor: Tensor) -> Tensor:
    """Queries or keys ``[batch, heads, tokens, head_dim]`` with every rotated pair multiplied by a complex factor."""
    first, second = rotation.dims()
    a, b = x[..., first].double(), x[..., second].double()
    out = x.clone()
    out[..., first] = (a * factor.real - b * factor.imag).to(x.dtype)
    out[..., second] = (b * factor.real + a * factor.imag).to(x.dtype)
    return out
