"""Disrupt: break chosen dims of Q, K or V (Jin et al. 2025, arXiv 2502.01563, with controls of our own)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rotoscope.errors import BadInput
from rotoscope.interventions.base import Intervention, Layers, Run, chosen_layers, uniform
from rotoscope.interventions.selection import Selection, Size, parse
from rotoscope.model.call import AttentionCall, NewKeys
from rotoscope.model.tap import tap

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

REPLACEMENTS = ("token-mean", "pooled", "zero", "max")
POSITIONS = ("all", "all-but-0", "only-0")
PHASES = ("prefill", "prefill+decode")


@dataclass(frozen=True)
class Disrupt(Intervention):
    """Replace chosen dims of queries, keys or values, chosen per prompt, layer and head.

    Parameters
    ----------
    targets : str
        Which of ``Q``, ``K`` and ``V``: ``QK``, ``V``, ….
    selection : str
        Which dims: see :class:`rotoscope.interventions.selection.Selection`.
    replacement : str
        By what. ``token-mean``: the dim's mean over the prompt's tokens. ``pooled``: one number per prompt and layer,
        the mean over all chosen dims and heads. ``zero``. ``max``: the dim's largest value over the prompt's tokens.
        A matched selection with ``pooled`` uses the number of the selection that it is matched to.
    positions : str
        ``all`` tokens, ``all-but-0`` (position 0 stays as it is), or ``only-0``. What is chosen, and by what it is
        replaced, is measured on all of the prompt's tokens either way.
    layers
        One layer, several, or None for all that have attention.
    phase : str
        ``prefill``: the prompt's tokens. ``prefill+decode``: the tokens that follow too, with the dims and values
        chosen in the prompt.
    seed : int
        For random dims. They also depend on the prompt's tokens, so that prompts have different ones (with
        ``inputs_embeds``, on the seed alone).

    Notes
    -----
    Magnitudes are root mean squares over the prompt's real tokens after rotary embedding. Keys and values are changed
    before a cache receives them: later steps, and caches that quantize, read the changed ones.

    ``run.measured`` sums over prompts, layers, tensors and heads: ``change`` (``Σ (x′ − x)²``) and ``energy``
    (``Σ x²``) over the prompt's changed tokens, ``dims`` (weights of dims added up) and ``heads``.
    """

    name: ClassVar[str] = "disrupt"
    targets: str = "QK"
    selection: str = "top-1"
    replacement: str = "token-mean"
    positions: str = "all-but-0"
    layers: Layers = None
    phase: str = "prefill+decode"
    seed: int = 0

    def __post_init__(self) -> None:
        parse(self.selection)
        if not self.targets or not set(self.targets) <= set("QKV"):
            raise BadInput(f"targets are some of Q, K and V, as in QK, not {self.targets!r}")
        choices = (("replacement", REPLACEMENTS), ("positions", POSITIONS), ("phase", PHASES))
        for what, allowed in choices:
            if getattr(self, what) not in allowed:
                raise BadInput(f"{what} is one of {', '.join(allowed)}, not {getattr(self, what)!r}")

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        attention = [layer.layer for layer in lm.anatomy.attention]
        layers = chosen_layers(self.layers, attention, "layers of attention")
        stack.enter_context(tap(lm, self.part(run, layers)))

    def part(self, run: Run, layers: frozenset[int]) -> Queries | Keys:
        """What goes on the tap: it edits queries, and writes keys and values."""
        kind = Queries if self.targets == "Q" else Keys if "Q" not in self.targets else Both
        return kind(self, run, layers)


@dataclass
class _Choice:
    """What was chosen in a prompt, for one tensor of one layer: weights and values ``[batch, heads, 1, dims]``."""

    weights: Tensor
    value: Tensor

    def apply(self, x: Tensor, where: Tensor) -> Tensor:
        """``x`` ``[batch, heads, tokens, dims]`` changed at tokens ``where`` ``[batch, tokens]``."""
        blended = torch.where(self.weights == 1, self.value, x + self.weights * (self.value - x))
        return torch.where(where[:, None, :, None] & (self.weights != 0), blended, x)


class _Part:
    """What a block puts on the tap."""

    def __init__(self, how: Disrupt, run: Run, layers: frozenset[int]):
        self._how, self._run, self._layers = how, run, layers
        self._selection = parse(how.selection)
        self._choices: dict[tuple[int, int, str], _Choice] = {}
        self._columns = 0

    def _change(self, x: Tensor, key: tuple[int, int, str], real: Tensor, past: int, start: int) -> Tensor:
        """One tensor's tokens from column ``start`` on, ``[batch, heads, tokens, dims]``, changed."""
        if past == 0:
            self._columns = x.shape[2] if self._run.prompt is None else self._run.prompt
        at = start + torch.arange(x.shape[2], device=x.device)
        of_prompt = (at < self._columns) & real
        where = real if self._how.phase == "prefill+decode" else of_prompt
        if self._how.positions != "all":
            first = real & (real.cumsum(-1) == 1) & (start == 0)
            where = where & (first if self._how.positions == "only-0" else ~first)
        if past == 0:
            self._choices[key] = self._choose(x, key, of_prompt, where & of_prompt)
        if not bool(where.any()):
            return x
        choice = self._choices.get(key)
        if choice is None or choice.weights.shape[0] != x.shape[0]:
            raise BadInput("a disrupted decode step needs its own prompt's prefill inside the same block")
        self._run.fired += 1
        return choice.apply(x, where)

    def _choose(self, x: Tensor, key: tuple[int, int, str], prompt: Tensor, where: Tensor) -> _Choice:
        exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if not bool(prompt.all()):  # padding may hold NaN, which no weight of 0 takes away
            exact = exact.masked_fill(~prompt[:, None, :, None], 0)
        n = prompt.sum(-1).clamp_min(1)[:, None, None].to(exact.dtype)
        (total, squares), changed = _sums(exact, prompt, where)
        draw = None
        if self._selection.random:
            seeds = self._run.seeds(x.shape[0], self._how.seed, *key)
            draw = uniform(seeds, (x.shape[1], x.shape[3]), x.device)
        magnitude = (squares / n).sqrt()
        value = self._value(exact, prompt, total / n, magnitude, draw)
        size = _size(changed, where, magnitude, value)
        weights = self._selection.weights(size, draw)
        self._run.measure(
            change=(size.change * weights.square()).sum().item(), energy=size.energy.sum().item(),
            dims=weights.sum().item(), heads=float(weights.shape[0] * weights.shape[1]),
        )  # fmt: skip
        return _Choice(weights[:, :, None].to(x.dtype), value[:, :, None].to(x.dtype))

    def _value(self, x: Tensor, prompt: Tensor, mean: Tensor, magnitude: Tensor, draw: Tensor | None) -> Tensor:
        """What each dim is replaced by, ``[batch, heads, dims]``."""
        if self._how.replacement == "token-mean":
            return mean
        if self._how.replacement == "zero":
            return torch.zeros_like(mean)
        if self._how.replacement == "max":
            return x.masked_fill(~prompt[:, None, :, None], -torch.inf).amax(2)
        base: Selection = self._selection.base or self._selection
        chosen = base.chosen(magnitude, draw)
        count = chosen.sum((1, 2), keepdim=True).clamp_min(1)
        return ((mean * chosen).sum((1, 2), keepdim=True) / count).expand_as(mean)


class Queries(_Part):
    """Changes queries in the call."""

    def edit(self, call: AttentionCall) -> AttentionCall:
        if call.layer not in self._layers:
            return call
        forward, past = self._run.forward, call.k.shape[2] - call.q.shape[2]
        if forward is not None and forward.past:
            past = forward.past  # a layer with a window hands over fewer keys than there are tokens
        return replace(call, q=self._change(call.q, (call.layer, call.index, "Q"), call.tokens, past, past))


class Keys(_Part):
    """Changes keys and values on their way to the cache."""

    def write(self, new: NewKeys) -> NewKeys:
        if new.layer not in self._layers:
            return new
        k, v = (
            self._change(x, (new.layer, new.index, name), new.tokens, new.past, new.start)
            if name in self._how.targets
            else x
            for name, x in (("K", new.k), ("V", new.v))
        )
        return replace(new, k=k, v=v)


class Both(Queries, Keys):
    """Both on one tap, with the choices of one block."""


def _sums(x: Tensor, *some: Tensor) -> list[tuple[Tensor, Tensor]]:
    """``Σ x`` and ``Σ x²`` over each of some sets of tokens ``[batch, tokens]``, both ``[batch, heads, dims]``."""
    weights = torch.stack(some, 1)[:, None].to(x.dtype).expand(-1, x.shape[1], -1, -1)
    # As matrix products: no masked copies, and a sum of one token is that token, exactly.
    total, squares = weights @ x, weights @ x.square()
    return [(total[:, :, i], squares[:, :, i]) for i in range(len(some))]


def _size(sums: tuple[Tensor, Tensor], where: Tensor, magnitude: Tensor, value: Tensor) -> Size:
    """What a selection is made from; ``sums`` are those over the tokens ``where``."""
    total, squares = (x.double() for x in sums)
    n = where.sum(-1)[:, None, None]
    change = (squares - 2 * value.double() * total + n * value.double().square()).clamp_min(0)
    return Size(magnitude, change.to(magnitude.dtype), squares.to(magnitude.dtype))
