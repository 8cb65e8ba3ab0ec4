"""Swap: another prompt's states at chosen tokens (Ben-Artzy & Schwartz 2024, section 4)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rotoscope.errors import BadInput
from rotoscope.interventions.base import Intervention, Run
from rotoscope.interventions.boundary import as_it_was, at_end, side_by_side
from rotoscope.model.layers import at_boundary, decoder_layers
from rotoscope.model.residual import stop

if TYPE_CHECKING:
    from rotoscope.model.lm import LM


@dataclass(frozen=True)
class Swap(Intervention):
    """At the input of layer ``layer``, chosen tokens of the prompt get the states of a donor prompt's.

    Parameters
    ----------
    layer : int
        The layer, 0 … L; at L nothing changes.
    donor : str or sequence of int
        The other prompt, as text or as token ids. It runs through the model, as that is, when the block opens.
    positions : sequence of int, optional
        Which tokens of the prompt, counted from its first, padding left out; negative ones from its end.
    donor_positions : sequence of int, optional
        Which tokens of the donor take their place; the same by default.
    span : str
        In place of positions: the tokens of every occurrence of this text in the prompt.
    donor_span : str
        The text in the donor; the same by default.
    """

    name: ClassVar[str] = "swap"
    layer: int
    donor: str | Sequence[int] = ""
    positions: Sequence[int] | None = None
    donor_positions: Sequence[int] | None = None
    span: str = ""
    donor_span: str = ""

    def __post_init__(self) -> None:
        if not len(self.donor):
            raise BadInput("swap needs a donor prompt: its text or its token ids")
        if (self.positions is None) == (not self.span):
            raise BadInput("swap needs to know which tokens: give either positions or a span of text")
        if any(places is not None and not len(places) for places in (self.positions, self.donor_positions)):
            raise BadInput("swap of no tokens changes nothing: name one position or more")

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        layers = decoder_layers(lm.model)
        if at_end(layers, self.layer, run, stack):
            return
        ids = self._donor(lm)
        of_donor = self.positions if self.donor_positions is None else self.donor_positions
        given = self._places(lm, ids.tolist(), self.donor_span or self.span, of_donor)
        with torch.no_grad(), stop(lm.model, self.layer) as at:
            lm.model(input_ids=ids[None].to(lm.device), use_cache=False)
        one = torch.ones(1, len(ids), dtype=torch.bool)
        states = side_by_side(at.h, one)[..., 0, given, :]

        def act(h: Tensor) -> Tensor | None:
            forward: Any = run.forward
            if forward.past:
                return None
            out = side_by_side(h.clone(), forward.real)
            for row, real in enumerate(forward.real[:, : run.prompt]):
                columns = real.nonzero()[:, 0]
                known = [] if forward.ids is None else forward.ids[row][columns.to(forward.ids.device)].tolist()
                places = self._places(lm, known, self.span, self.positions, len(columns))
                if len(places) != len(given):
                    raise BadInput(
                        f"swap takes {len(given)} tokens from the donor and {len(places)} from the prompt: choose "
                        "spans or positions of equal length"
                    )
                out[..., row, columns[places].to(h.device), :] = states.to(h)
            run.fired += 1
            return as_it_was(out, h, forward.real)

        stack.enter_context(at_boundary(layers, self.layer, act))

    def _donor(self, lm: LM) -> Tensor:
        ids = lm.encode(self.donor) if isinstance(self.donor, str) else torch.tensor(list(self.donor))
        unknown = ids[(ids < 0) | (ids >= lm.anatomy.vocabulary)].tolist()
        if unknown:
            raise BadInput(f"the donor's token {unknown[0]} is none of the model's, 0 to {lm.anatomy.vocabulary - 1}")
        return ids

    def _places(
        self, lm: LM, ids: Sequence[int], span: str, positions: Sequence[int] | None, length: int | None = None
    ) -> list[int]:
        """The chosen tokens of one prompt, counted from its first."""
        if span:
            return spanned(lm, ids, span)
        length = len(ids) if length is None else length
        outside = [p for p in positions or () if not -length <= p < length]
        if outside:
            raise BadInput(f"there is no token {outside[0]} to swap: the prompt has {length}, counted from 0")
        return [p % length for p in positions or ()]


def spanned(lm: LM, ids: Sequence[int], text: str) -> list[int]:
    """Which of a prompt's tokens hold some of a text, at every place where it stands.

    Raises
    ------
    BadInput
        If it stands nowhere, or the model came without a tokenizer.
    """
    if lm.tokenizer is None:
        raise BadInput(f"a span of text needs a tokenizer, and {lm.source} has none: choose tokens by positions")

    def end(n: int) -> int:
        """Where the first ``n`` tokens' text ends."""
        return len(lm.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False))

    whole = lm.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    places: list[int] = []
    at = whole.find(text)
    while at >= 0:
        first = bisect_right(range(len(ids)), at, key=lambda n: end(n + 1))
        after = bisect_left(range(len(ids) + 1), at + len(text), key=end)
        places += range(first, after)
        at = whole.find(text, at + len(text))
    if not places:
        raise BadInput(f"{text!r} does not stand in the prompt {whole[-60:]!r}")
    return list(dict.fromkeys(places))
