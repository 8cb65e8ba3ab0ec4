"""Beyond the trained length: a Λ-shaped mask and a cap on distances, together LM-Infinite (arXiv 2308.16137)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rotoscope.errors import BadInput, Refused
from rotoscope.interventions.base import Intervention, Run
from rotoscope.interventions.fitted import Fit, turned
from rotoscope.interventions.logits import (
    Blocks,
    Columns,
    Logits,
    Near,
    Tables,
    earlier,
    grouped,
    narrowed,
    pick,
    position0,
    with_logits,
)
from rotoscope.model.call import AttentionCall
from rotoscope.model.rotary import AngleTable
from rotoscope.model.tap import tap

if TYPE_CHECKING:
    from rotoscope.model.lm import LM


@dataclass(frozen=True)
class LambdaMask(Intervention):
    """Let every query attend to its row's first tokens and to the nearest ones only.

    Narrows the mask of every attention layer: what is forbidden stays forbidden. Where nothing lies beyond the
    window, calls stay as they are; elsewhere attention is computed block by block, in memory linear in length.

    Parameters
    ----------
    window : int
        Nearest tokens, the query's own among them.
    first : int
        Tokens at the start of the row, position 0 among them; padding does not count.
    """

    name: ClassVar[str] = "lambda-mask"
    window: int
    first: int = 4

    def __post_init__(self) -> None:
        if self.window < 1 or self.first < 0:
            raise BadInput(f"a Λ-shaped mask needs window ≥ 1 and first ≥ 0, not {self.window} and {self.first}")

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        stack.enter_context(tap(lm, _Narrow(self, run)))


@dataclass(frozen=True)
class DistanceCap(Intervention):
    """Compute the logits of pairs further apart than ``cap`` as if they were at distance ``cap``.

    The un-rotated query, turned by ``cap`` tokens, meets the un-rotated key. Layers that do not rotate are left alone;
    so are calls in which no pair is that far apart.

    Parameters
    ----------
    cap : int
        The largest distance, tokens.
    """

    name: ClassVar[str] = "distance-cap"
    cap: int

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise BadInput(f"a distance cap is 1 or more, not {self.cap}")

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        layers = frozenset(layer.layer for layer in lm.anatomy.rotary)
        if not layers:
            raise Refused("no layer of this model has a rotary embedding that is reached: there is no distance to cap")
        stack.enter_context(tap(lm, _Cap(self.cap, run, layers)))


class _Narrow:
    """Puts the Λ-shaped mask on calls."""

    def __init__(self, how: LambdaMask, run: Run):
        self._how, self._run = how, run

    def edit(self, call: AttentionCall) -> AttentionCall:
        self._run.fired += 1
        past, keys = earlier(call, self._run), call.k.shape[2]
        zero = position0(call, past) - (past + call.q.shape[2] - keys)
        if keys <= max(self._how.window, self._how.first):
            return call
        return narrowed(call, Near(self._how.first, self._how.window, zero))


class _Cap:
    """Puts capped logits on calls."""

    def __init__(self, cap: int, run: Run, layers: frozenset[int]):
        self._cap, self._run, self._layers = cap, run, layers
        self._tables = Tables()

    def edit(self, call: AttentionCall) -> AttentionCall:
        if call.layer not in self._layers:
            return call
        self._run.fired += 1
        past, keys = earlier(call, self._run), call.k.shape[2]
        zero = position0(call, past)
        table = self._tables.of(call, past)
        if keys <= self._cap + 1:
            return call
        gone = past + call.q.shape[2] - keys

        def prepare(plain: Blocks) -> Logits:
            fit = Fit(plain, table.since(-keys), zero - gone)
            return _capped(fit, self._cap, _turn_at(fit, table, zero, self._cap))

        return with_logits(call, prepare)


def _turn_at(fit: Fit, table: AngleTable, zero: Tensor, cap: int) -> Tensor:
    """The turn at a distance, from the table of all tokens: ``[batch or 1, 1, 1, 2 · pairs]``, float64."""
    cos, sin = fit.rotation.turns(table)
    turns = torch.complex(cos, sin)[:, 0]
    batch = max(len(turns), len(zero))
    row, start = torch.arange(batch, device=zero.device), zero.expand(batch)
    turns = turns.expand(batch, -1, -1)
    # Rows too short for the distance have no pair that uses it.
    turn = turns[row, (start + cap).clamp_max(turns.shape[1] - 1)] * turns[row, start].conj()
    still = turn.new_ones(batch, fit.keys.shape[-1] // 2 - turn.shape[-1])
    turn = torch.cat([turn, still], -1)
    return torch.cat([turn.real, turn.imag], -1)[:, None, None]


def _capped(fit: Fit, cap: int, turn: Tensor) -> Logits:
    call, far_keys = fit.call, fit.keys

    def far(rows: slice, columns: Columns) -> Tensor:
        queries = turned(fit.queries(rows), turn).to(fit.dtype)
        return grouped(queries, pick(far_keys, columns, 2).transpose(-1, -2)) * call.scaling

    def logits(rows: slice, columns: Columns) -> Tensor:
        queries, _ = call.at(rows, columns)
        low, high = int(queries[0]) - cap, int(queries[-1]) - cap
        parts = []
        for piece in _cut(columns, low, high, call.k.shape[2]):
            some = (piece,)
            if piece.stop <= low:
                parts.append(far(rows, some))
            elif piece.start >= high:
                parts.append(call.block(rows, some).to(fit.dtype))
            else:
                _, keys = call.at(rows, some)
                beyond = queries[:, None] - keys > cap
                parts.append(torch.where(beyond, far(rows, some), call.block(rows, some).to(fit.dtype)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    return logits


def _cut(columns: Columns, low: int, high: int, keys: int) -> Iterator[slice]:
    """The same columns, in pieces that lie below ``low``, between, or from ``high`` on."""
    for some in columns:
        start, stop, _ = some.indices(keys)
        edges = [start, *(at for at in (low, high) if start < at < stop), stop]
        for a, b in pairwise(edges):
            if a < b:
                yield slice(a, b)
