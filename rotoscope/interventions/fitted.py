"""The logits of the additive forms, block by block, from queries and keys and from means of other texts.

Every function returns ``logits(rows, columns)``, scaled, ``[batch, heads, rows, keys]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotoscope.errors import BadInput
from rotoscope.interventions.logits import Blocks, Columns, Logits, grouped, pick
from rotoscope.model.rotary import AngleTable, Rotation
from rotoscope.stats.causal import CausalSums, causal_sums, causal_terms


@dataclass(frozen=True)
class Fit:
    """What the forms are computed from.

    Attributes
    ----------
    call : Blocks
        The call, with its real logits.
    table : AngleTable
        The turns of the tokens that its keys are of.
    zero : torch.Tensor
        Column of each row's position 0 among the keys ``[batch or 1]``; below 0 where it is not among them.
    """

    call: Blocks
    table: AngleTable
    zero: Tensor

    @property
    def rotation(self) -> Rotation:
        assert self.call.rotation is not None
        return self.call.rotation

    @property
    def dtype(self) -> torch.dtype:
        """Of what is multiplied: half precision is not enough for sums of terms that nearly cancel."""
        return torch.float64 if self.call.q.dtype == torch.float64 else torch.float32

    @cached_property
    def keys(self) -> Tensor:
        """Un-rotated keys ``[batch, kv_heads, keys, 2 · pairs]``."""
        return self.by_head(lambda k: self.rotation.unrotate(k, self.table))

    def by_head(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the keys, one head at a time: float64 copies of all of them would be most of the memory."""
        return torch.cat([function(k).to(self.dtype) for k in self.call.k.split(1, 1)], 1)

    def queries(self, rows: slice) -> Tensor:
        """Un-rotated queries ``[batch, heads, rows, 2 · pairs]``, float64."""
        return self.rotation.unrotate(self.call.q[:, :, rows], self.table_of_queries(rows))

    def rotated(self, rows: slice) -> Tensor:
        """Queries as they come, ``[batch, heads, rows, head_dim]``."""
        return self.call.q[:, :, rows].to(self.dtype)

    def table_of_queries(self, rows: slice) -> AngleTable:
        table = self.table.since(-self.call.q.shape[2])
        return AngleTable(table.one[:, rows], table.two[:, rows])

    def rotate(self, z: Tensor, table: AngleTable) -> Tensor:
        """One vector a head ``[heads, 2 · pairs]`` turned to every token of a table.

        Returns ``[batch or 1, heads, tokens, head_dim]``.
        """
        batch, tokens = table.one.shape[:2]
        each = z[None, :, None].expand(batch, -1, tokens, -1).split(1, 1)
        return torch.cat([self.rotation.rotate(x, table).to(self.dtype) for x in each], 1)

    def for_heads(self, of_keys: Tensor) -> Tensor:
        """Rows of a key quantity ``[kv_heads, …]``, one for each query head."""
        return of_keys.repeat_interleave(self.call.q.shape[1] // self.call.k.shape[1], 0)

    def but_position0(self, logits: Logits) -> Logits:
        """The same with the real logits in the column of position 0."""
        at = self.zero.clamp_min(0).expand(self.call.k.shape[0])
        batch = torch.arange(len(at), device=at.device)
        first = self.call.k[batch, :, at][..., None].to(self.dtype) * self.call.scaling

        def mended(rows: slice, columns: Columns) -> Tensor:
            _, keys = self.call.at(rows, columns)
            here = (keys == self.zero[:, None])[:, None, None]
            return torch.where(here, grouped(self.rotated(rows), first), logits(rows, columns))

        return mended


def full(fit: Fit) -> Logits:
    """The real logits, from keys un-rotated and rotated again."""
    keys = fit.by_head(lambda k: fit.rotation.rotate(fit.rotation.unrotate(k, fit.table), fit.table))

    def logits(rows: slice, columns: Columns) -> Tensor:
        return grouped(fit.rotated(rows), pick(keys, columns, 2).transpose(-1, -2)) * fit.call.scaling

    return logits


def form1(fit: Fit, key: Tensor, turn: Tensor, terms: str = "fg") -> Logits:
    """``f(q, d) + g(q, k)``, or one of the two."""
    place = fit.rotate(key, fit.table).expand(fit.call.k.shape[0], -1, -1, -1)
    content = fit.keys - key[:, None].to(fit.dtype)
    keys = {"f": [place], "g": [content], "fg": [place, content]}[terms]
    both = torch.cat(keys, -1) * fit.call.scaling

    def logits(rows: slice, columns: Columns) -> Tensor:
        queries = {
            "f": lambda: fit.rotated(rows),
            "g": lambda: turned(fit.queries(rows), turn).to(fit.dtype),
        }
        x = torch.cat([queries[term]() for term in terms], -1)
        return grouped(x, pick(both, columns, 2).transpose(-1, -2))

    return logits


def form2(fit: Fit, query: Tensor, key: Tensor, turn: Tensor) -> Logits:
    """``a_d + b_i + c_j`` from the means."""
    place = fit.rotate(key, fit.table) * fit.call.scaling
    at_mean = turned(query, turn)
    key_of_head = fit.for_heads(key)
    mean = (at_mean * key_of_head).sum(-1)[:, None, None]
    c = grouped(at_mean[None, :, None].to(fit.dtype).expand(len(fit.keys), -1, -1, -1), fit.keys.transpose(-1, -2))

    def logits(rows: slice, columns: Columns) -> Tensor:
        queries = fit.rotate(query, fit.table_of_queries(rows))
        a = grouped(queries, pick(place, columns, 2).transpose(-1, -2))
        b = (turned(fit.queries(rows), turn) * key_of_head[:, None]).sum(-1, keepdim=True) - 2 * mean
        return a + (b.to(fit.dtype) + pick(c, columns, -1)) * fit.call.scaling

    return logits


def causal(fit: Fit) -> Logits:
    """``a_d + b_i + c_j`` by least squares on the text's own pairs, position 0 left out."""
    call = fit.call
    batch, heads, length = call.q.shape[:3]
    if call.k.shape[2] != length:
        raise BadInput("the causal fit reads whole texts in one forward: run the model without a cache")
    a, b, c = (call.q.new_zeros(batch, heads, length, dtype=fit.dtype) for _ in range(3))
    for row, real in enumerate(call.tokens & ~call.first):
        at = real.nonzero()[:, 0]
        if len(at) < 2:
            continue
        some = slice(int(at[0]), int(at[-1]) + 1)
        q, k = call.q[row, :, some], call.k[row, :, some]
        group = len(q) // len(k)
        parts = [causal_sums(q[i * group : (i + 1) * group], k[i : i + 1]) for i in range(len(k))]
        terms = causal_terms(CausalSums.stack(parts))
        a[row, :, : len(at)] = (terms.distances * call.scaling).to(fit.dtype)
        b[row, :, some], c[row, :, some] = ((t * call.scaling).to(fit.dtype) for t in (terms.rows, terms.columns))

    def logits(rows: slice, columns: Columns) -> Tensor:
        queries, keys = call.at(rows, columns)
        distance = (queries[:, None] - keys).clamp_min(0)
        return a[..., distance] + b[:, :, rows, None] + pick(c, columns, -1)[:, :, None]

    return logits


def centred(fit: Fit, logits: Logits) -> Logits:
    """The real logits less the residual of ``logits``, centred over each query's permitted keys but position 0."""

    def mixed(rows: slice, columns: Columns) -> Tensor:
        real, _, residual = _residual(fit, logits, rows, columns)
        return real - residual

    return mixed


def permuted(fit: Fit, logits: Logits, seed: int) -> Logits:
    """The same with the residual permuted over those keys."""

    def mixed(rows: slice, columns: Columns) -> Tensor:
        real, left, residual = _residual(fit, logits, rows, columns)
        token, of_key = (at - fit.zero[:, None] for at in fit.call.at(rows, columns))
        draw = torch.where(left, draws(token, of_key, fit.call.q.shape[1], seed), torch.iinfo(torch.int64).max)
        # The n-th permitted key gets the residual of the one whose draw is n-th.
        nth = (left.cumsum(-1) - 1).clamp_min(0).expand(residual.shape)
        order = draw.argsort(-1).expand(residual.shape).gather(-1, nth)
        return torch.where(left, real - residual.gather(-1, order), real)

    return mixed


def _residual(fit: Fit, logits: Logits, rows: slice, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Real logits, the permitted keys but position 0, and the centred residual there, 0 elsewhere."""
    _, keys = fit.call.at(rows, columns)
    real = fit.call.block(rows, columns).to(fit.dtype)
    left = fit.call.permitted(rows, columns) & (keys != fit.zero[:, None])[:, None, None]
    residual = (real - logits(rows, columns)).masked_fill(~left, 0)
    mean = residual.sum(-1, keepdim=True) / left.sum(-1, keepdim=True).clamp_min(1)
    return real, left, (residual - mean).masked_fill(~left, 0)


def draws(token: Tensor, of_key: Tensor, heads: int, seed: int) -> Tensor:
    """Random integers for each head, query and key by their positions in the row ``[batch or 1, heads, rows, keys]``.

    A hash, not a stream: what a pair gets depends on nothing beside it.
    """
    head = torch.arange(heads, device=token.device)
    x = token[:, None, :, None] * 0x1E3779B97F4A7C15 + of_key[:, None, None] * 0x3F58476D1CE4E5B9
    x = x + (head[:, None, None] * 0x14D049BB133111EB + seed)
    for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        x ^= (x >> 29) & 0x7FFFFFFFF
        x *= factor
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def turned(z: Tensor, turn: Tensor) -> Tensor:
    """Complex products with ``[2 · pairs]``, real parts first."""
    (a, b), (c, s) = z.chunk(2, -1), turn.chunk(2, -1)
    return torch.cat([a * c - b * s, a * s + b * c], -1)
