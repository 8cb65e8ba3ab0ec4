"""ReplaceLogits: fitted logits in place of a model's own (Han & Ji 2025, arXiv 2503.13305, as a causal test)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rotoscope.errors import BadInput, Refused
from rotoscope.interventions.base import Intervention, Layers, Run, chosen_layers, seed_of
from rotoscope.interventions.fitted import Fit, causal, centred, form1, form2, full, permuted
from rotoscope.interventions.logits import Logits, Tables, earlier, position0, with_logits
from rotoscope.model.call import AttentionCall
from rotoscope.model.lm import evaluating
from rotoscope.model.residual import stop
from rotoscope.model.tap import tap
from rotoscope.observers.grams import Grams

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

ARMS = ("full", "form1", "form1-centred", "form2", "form2-causal", "permuted", "f", "g")
_WITHOUT_MEANS = ("full", "form2-causal")
_LONGEST_DISTANCE = 1024


@dataclass(frozen=True)
class LogitMeans:
    """What the fits on the full grid need, measured on texts other than those that they are put to use on.

    Vectors are of un-rotated pairs, float64, real parts first and imaginary parts second; dims that do not rotate are
    pairs with angle 0.

    Attributes
    ----------
    query, key : dict of int to torch.Tensor
        By layer, mean un-rotated query ``[heads, 2 · pairs]`` and key ``[kv_heads, 2 · pairs]``, position 0 left out.
    turn : dict of int to torch.Tensor
        By layer, mean of ``e^{i d θ}`` over the distances, times what a scaled table multiplies logits by
        ``[2 · pairs]``.
    """

    query: dict[int, Tensor]
    key: dict[int, Tensor]
    turn: dict[int, Tensor]

    @classmethod
    def measure(cls, lm: LM, texts: Sequence[Sequence[int]], distances: int | None = None) -> LogitMeans:
        """Measure them on a model.

        Parameters
        ----------
        lm : LM
            The model; a twin with random weights gives the fit of such a model.
        texts : sequence of sequences of int
            Token ids, position 0 first.
        distances : int, optional
            Distances 0 … ``distances - 1`` are averaged over, by default the lesser of 1,024 and the trained length.

        Raises
        ------
        BadInput
            If no text has two tokens, or ``distances`` is below 1.
        Refused
            If no layer rotates.
        """
        layers = _rotary(lm)
        texts = [text for text in texts if len(text) > 1]
        distances = min(_LONGEST_DISTANCE, lm.trained_length or _LONGEST_DISTANCE) if distances is None else distances
        if not texts or distances < 1:
            raise BadInput("means of logits need a text of two tokens or more, and one distance or more")
        with torch.no_grad(), evaluating(lm.model), tap(lm, Grams()) as (grams,):
            for text in texts:
                batch = torch.tensor([list(text)], device=lm.device)
                with stop(lm.model, max(layers) + 1):
                    lm.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)
        seen = {layer: grams.layers[layer] for layer in layers}
        return cls(
            {layer: g.q.mean.clone() for layer, g in seen.items()},
            {layer: g.k.mean.clone() for layer, g in seen.items()},
            {layer: g.turns(distances).mean for layer, g in seen.items()},
        )


@dataclass(frozen=True)
class ReplaceLogits(Intervention):
    """Put fitted logits in place of the real ones, in the running model.

    With un-rotated queries ``q`` and keys ``k``, ``d`` the distance from query back to key, and means ``q̄``, ``k̄``
    and ``ē`` (of ``e^{i d θ}``):

    ================= ===================================================================================
    arm               logits, over ``scaling``
    ================= ===================================================================================
    ``full``          ``Re Σ q conj(k) e^{i d θ}``: the real ones, by the same path
    ``form1``         ``Re Σ q conj(k̄) e^{i d θ} + Re Σ q conj(k − k̄) ē``, the least squares ``f(q, d) + g(q, k)``
    ``form1-centred`` form 1 with its residual centred over each query's permitted keys (position 0 left out), so that
                      they keep their mean against position 0
    ``f``, ``g``      the first term alone, the second alone
    ``form2``         ``Re Σ q̄ conj(k̄) e^{i d θ} + Re Σ q conj(k̄) ē + Re Σ q̄ conj(k) ē − 2 Re Σ q̄ conj(k̄) ē``
    ``form2-causal``  ``a_d + b_i + c_j`` by least squares on this text's own pairs ``j ≤ i``, position 0 out, windows
                      not applied; descriptive, as it sees what it replaces, and not for steps with a cache
    ``permuted``      the real ones less the residual of form 1, permuted over each query's permitted keys (position 0
                      left out) and centred over them: what form 1's error does when it hits the wrong keys
    ================= ===================================================================================

    The column of position 0 keeps its real logits in every arm. Softcap, mask, windows, sinks and padding stay the
    model's own. Attention is computed block by block, so that no full logits are kept.

    Parameters
    ----------
    means : LogitMeans or None
        Measured on other texts; None for ``full`` and ``form2-causal``, which need none.
    arm : str
        One of the above.
    layers
        One layer, several, or None for all that rotate; the others are left alone.
    seed : int
        For ``permuted``. The permutation depends on it, the layer, the head, and the tokens' positions in their row:
        not on padding, on other rows, or on whether there is a cache.
    """

    name: ClassVar[str] = "replace-logits"
    means: LogitMeans | None
    arm: str = "form1"
    layers: Layers = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise BadInput(f"arm is one of {', '.join(ARMS)}, not {self.arm!r}")
        if self.means is None and self.arm not in _WITHOUT_MEANS:
            raise BadInput(f"the arm {self.arm} needs means: LogitMeans.measure(lm, texts) gives them")

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        rotary = _rotary(lm)
        layers = chosen_layers(_named(self.layers, lm, rotary), rotary, "layers that rotate")
        if self.means is not None:
            self.means_for(lm, layers)
        stack.enter_context(tap(lm, _Edit(self, run, layers)))

    def means_for(self, lm: LM, layers: frozenset[int]) -> None:
        """Check that the means are those of such a model.

        Raises
        ------
        BadInput
            If they lack one of the layers, or have other heads.
        """
        assert self.means is not None
        for layer in sorted(layers):
            found, there = (self.means.query.get(layer), self.means.key.get(layer)), lm.anatomy.layers[layer]
            if [None if x is None else len(x) for x in found] != [there.heads, there.kv_heads]:
                raise BadInput(f"the means have no layer {layer} of this model's heads: measure them on this model")


class _Edit:
    """What a block puts on the tap."""

    def __init__(self, how: ReplaceLogits, run: Run, layers: frozenset[int]):
        self._how, self._run, self._layers = how, run, layers
        self._tables = Tables()

    def edit(self, call: AttentionCall) -> AttentionCall:
        if call.layer not in self._layers:
            return call
        self._run.fired += 1
        past = earlier(call, self._run)
        keys = call.k.shape[2]
        zero = position0(call, past) - (past + call.q.shape[2] - keys)
        table = self._tables.of(call, past).since(-keys)
        return with_logits(call, lambda plain: self._logits(Fit(plain, table, zero)))

    def _logits(self, fit: Fit) -> Logits:
        how, layer = self._how, fit.call.layer
        if how.arm == "full":
            return fit.but_position0(full(fit))
        if how.arm == "form2-causal":
            return fit.but_position0(causal(fit))
        assert how.means is not None
        of_layer = (how.means.query, how.means.key, how.means.turn)
        query, key, turn = (of[layer].to(fit.call.q.device) for of in of_layer)
        if how.arm == "form2":
            return fit.but_position0(form2(fit, query, key, turn))
        logits = form1(fit, key, turn, how.arm if how.arm in ("f", "g") else "fg")
        if how.arm == "form1-centred":
            logits = centred(fit, logits)
        if how.arm == "permuted":
            logits = permuted(fit, logits, seed_of(how.seed, layer, fit.call.index))
        return fit.but_position0(logits)


def _rotary(lm: LM) -> list[int]:
    """The layers that rotate.

    Raises
    ------
    Refused
        If there are none.
    """
    layers = [layer.layer for layer in lm.anatomy.rotary]
    if not layers:
        raise Refused("no layer of this model has a rotary embedding that is reached, so its logits have no such form")
    return layers


def _named(layers: Layers, lm: LM, rotary: Collection[int]) -> Layers:
    """The same layers.

    Raises
    ------
    Refused
        If one of them attends, but does not rotate.
    """
    named = [] if layers is None else [layers] if isinstance(layers, int) else list(layers)
    for there in lm.anatomy.attention:
        if there.layer in named and there.layer not in rotary:
            raise Refused(f"layer {there.layer} has no rotary embedding that is reached: name other layers, or none")
    return layers
