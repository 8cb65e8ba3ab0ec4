"""Which dims of Q, K or V a disruption takes, and how far it moves each of them.

A selection gives a weight per head and dim: 0 leaves a dim alone, 1 replaces it, and what lies between (or above, where
all dims together do not suffice) moves it part of the way, so that control arms can match the massive arm's change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rotoscope.errors import BadInput

_SELECTION = re.compile(
    r"(?P<kind>top|lambda|second|smallest|random|change-matched|energy-matched)(-(?P<rest>[\w.-]+))?"
)
_BASE = "top-1"
MATCHED = ("change-matched", "energy-matched")


@dataclass(frozen=True)
class Size:
    """What a selection is made from, each ``[batch, heads, dims]``, over the prompt's real tokens.

    Attributes
    ----------
    magnitude
        Root mean square, ``M`` of Jin et al. 2025.
    change
        ``Σ (r − x)²`` over the tokens that would be replaced by ``r``.
    energy
        ``Σ x²`` over the same tokens.
    """

    magnitude: Tensor
    change: Tensor
    energy: Tensor


@dataclass(frozen=True)
class Selection:
    """A selection as users name it.

    Attributes
    ----------
    kind, number
        ``top-K``: the K largest dims of each head. ``lambda-X``: those with ``R = M / mean M > X``. ``second``: the
        second largest. ``smallest-K``, ``random-K`` (never one of the two largest). ``change-matched``,
        ``energy-matched``: random other dims, the last one blended, until ``Σ (x′ − x)²``, or ``Σ x²``, equals that of
        ``base``.
    base
        What a matched selection is matched to and leaves out, ``top-1`` by default.
    """

    kind: str
    number: float = 1
    base: Selection | None = None

    @property
    def random(self) -> bool:
        """Whether it draws dims."""
        return self.kind in (*MATCHED, "random")

    def chosen(self, magnitude: Tensor, draw: Tensor | None) -> Tensor:
        """The dims that an unmatched selection takes, boolean ``[batch, heads, dims]``."""
        ranked = magnitude.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        dims, n = magnitude.shape[-1], int(self.number)
        if self.kind == "lambda":
            large: Tensor = magnitude > self.number * magnitude.mean(-1, keepdim=True)
            return large
        if self.kind == "random":
            assert draw is not None
            order = draw.masked_fill(ranked < 2, torch.inf).argsort(-1).argsort(-1)
            return (order < n).logical_and(ranked >= 2)
        return {"top": ranked < n, "second": ranked == 1, "smallest": ranked >= dims - n}[self.kind]

    def weights(self, size: Size, draw: Tensor | None) -> Tensor:
        """How far each dim is moved towards its replacement, ``[batch, heads, dims]``."""
        if self.base is None:
            return self.chosen(size.magnitude, draw).to(size.magnitude.dtype)
        assert draw is not None
        taken = self.base.chosen(size.magnitude, None)
        amount = size.change if self.kind == "change-matched" else size.energy
        share = _matched(amount, taken, draw)
        # A dim moved by β of its way changes by β² of what a full replacement would.
        return share.sqrt() if self.kind == "change-matched" else share


def parse(text: str) -> Selection:
    """A selection from its name: ``top-1``, ``lambda-5``, ``second``, ``change-matched``, ``change-matched-top-2``, ….

    Raises
    ------
    BadInput
        If there is none of that name.
    """
    found = _SELECTION.fullmatch(text)
    if found is not None:
        kind, rest = found["kind"], found["rest"]
        if kind in MATCHED:
            base = parse(rest or _BASE)
            if not base.random:
                return Selection(kind, base=base)
        elif kind == "second" and rest is None:
            return Selection(kind)
        elif kind != "second" and (number := _number(rest, kind)) is not None:
            return Selection(kind, number)
    raise BadInput(
        f"there is no selection {text!r}: top-K, lambda-X, second, smallest-K, random-K, change-matched or "
        "energy-matched, the last two also with what they match, as in change-matched-top-2"
    )


def _number(text: str | None, kind: str) -> float | None:
    if text is None:
        return 1 if kind in ("smallest", "random") else None
    convert: Callable[[str], float] = float if kind == "lambda" else int
    try:
        number = convert(text)
    except ValueError:
        return None
    return number if number >= 0 else None


def _matched(amount: Tensor, taken: Tensor, draw: Tensor) -> Tensor:
    """Shares of random dims outside ``taken`` whose amounts add up to that of ``taken``, ``[batch, heads, dims]``.

    Dims are added in random order, the last one in part. Where all of them fall short, all get the same share above 1.
    """
    target = (amount * taken).sum(-1, keepdim=True)
    other = amount.masked_fill(taken, 0)
    order = draw.masked_fill(taken, torch.inf).argsort(-1)
    sorted_amount = other.gather(-1, order)
    before = sorted_amount.cumsum(-1) - sorted_amount
    share = ((target - before) / sorted_amount).nan_to_num(0, 0, 0).clamp(0, 1)
    total = sorted_amount.sum(-1, keepdim=True)
    short = (target > total) & (total > 0)
    share = torch.where(short, (target / total).nan_to_num(0, 0, 0).expand_as(share), share)
    return torch.zeros_like(share).scatter(-1, order, share).masked_fill(taken, 0)
