"""Boundaries: the residual stream between the layers of any decoder.

``h[k]`` is the input of layer ``k``, so ``h[0]`` is the embedding; ``h[L]`` is the output of the last layer, before the
final norm. One index ``k``, 0 … L, serves everything here: `record` keeps boundaries, `replace` edits one, `resume`
starts a forward at one, `stop` ends it there.

It is always the model's own ``forward`` that runs, so masks, position ids, rotary tables, windows, the final norm and
the head stay the model's own. Every change is gone when its block is left, however that happens.

What `resume` cannot carry is whatever one layer hands to another *beside* the residual stream: keys and values shared
between layers, a bias made once in layer 0. `check` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput, NeverFired
from rotoscope.model.layers import at_boundary, bypass, decoder_layers, loop

__all__ = ["Boundaries", "Resumption", "Stopped", "check", "decoder_layers", "record", "replace", "resume", "stop"]


@dataclass(frozen=True)
class Boundaries:
    """What one forward carried between its layers.

    Attributes
    ----------
    h
        ``h[0]`` to ``h[L]``, each ``[batch, tokens, hidden]``; ``tokens`` counts the chosen positions, if any were.
    logits
        As the model returned them (all tokens, unless the batch says ``logits_to_keep``); ``None`` without a head.
    """

    h: list[Tensor]
    logits: Tensor | None


@dataclass
class Stopped:
    """Holds ``h[k]``, ``[batch, tokens, hidden]``, once the forward in a `stop` block has reached it."""

    h: Tensor = field(init=False, repr=False)


@dataclass(frozen=True)
class Resumption:
    """How exactly a model resumes.

    Attributes
    ----------
    differences
        For each ``k`` from 0 to L the largest absolute difference between the resumed and the plain logits; infinite
        where one of them holds a NaN, or the resumed forward raised.
    reason
        Why the first infinite one is so, in a sentence; empty if there is none.
    """

    differences: tuple[float, ...]
    reason: str = ""

    @property
    def worst(self) -> float:
        """The largest difference over all ``k``."""
        return max(self.differences)


def record(model: nn.Module, positions: Sequence[int] | Tensor | None = None, **batch: Any) -> Boundaries:
    """Run ``model(**batch)`` without gradients and keep every boundary.

    Parameters
    ----------
    positions
        Token positions to keep: ``[n]`` for all rows alike, or ``[batch, n]``. Negative ones count from the end; all
        tokens by default.
    batch
        What the model takes. No cache is made unless ``use_cache`` is among it.
    """
    layers = decoder_layers(model)
    kept: dict[int, Tensor] = {}

    def keep(k: int) -> Callable[[Tensor], None]:
        def act(state: Tensor) -> None:
            kept[k] = _choose(state, positions)

        return act

    with torch.no_grad(), ExitStack() as hooks:
        for k in range(len(layers) + 1):
            hooks.enter_context(at_boundary(layers, k, keep(k)))
        output = model(**{"use_cache": False, **batch})
    return Boundaries([kept[k] for k in range(len(layers) + 1)], getattr(output, "logits", None))


@contextmanager
def replace(model: nn.Module, k: int, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put ``edit(h[k])`` in place of ``h[k]`` in every forward in the block; ``k = L`` edits what the norm receives.

    Under ``generate`` with a cache, ``edit`` sees the prompt first and then the new tokens, one a step. Blocks nest;
    at the same ``k``, the inner edit sees what the outer one returned. What ``edit`` returns is moved to the dtype and
    device of ``h[k]``.

    Raises
    ------
    BadInput
        If there is no such ``k``, or ``edit`` does not return a tensor of the shape that it was given.
    """

    def act(state: Tensor) -> Tensor:
        edited = edit(state)
        if not isinstance(edited, Tensor) or edited.shape != state.shape:
            got = tuple(edited.shape) if isinstance(edited, Tensor) else type(edited).__name__
            raise BadInput(f"the edit of boundary {k} must return a tensor of shape {tuple(state.shape)}, not {got}")
        return edited.to(state)

    with at_boundary(decoder_layers(model), k, act):
        yield


@contextmanager
def resume(model: nn.Module, k: int, h: Tensor) -> Iterator[None]:
    """Start the forwards in the block at layer ``k``, with ``h`` as ``h[k]``; the layers below do not run.

    Call the model with the batch that ``h`` was recorded from: masks and positions come from its ids, as always.

    A bypassed layer hands on what it gets (hooks on it still see that) and neither reads nor writes a cache. A cache
    made or extended in the block lacks the layers below ``k``: it serves that one forward and must be dropped. So
    `resume` is not for ``generate``, whose second step is refused because ``h`` no longer fits.

    Raises
    ------
    BadInput
        If there is no such ``k``, or the model is called with a batch of another shape than that of ``h``.
    """

    def recorded(state: Tensor) -> Tensor:
        if state.shape != h.shape:
            raise BadInput(
                f"the states to resume from have shape {tuple(h.shape)}, this forward carries {tuple(state.shape)}: "
                "call the model once, with the batch that they were recorded from"
            )
        return h

    model_loop = loop(model)
    with ExitStack() as stack:
        stack.enter_context(replace(model, k, recorded))
        for layer, returns in zip(model_loop.layers[:k], model_loop.returns[:k], strict=True):
            stack.enter_context(bypass(layer, returns))
        yield


@contextmanager
def stop(model: nn.Module, k: int) -> Iterator[Stopped]:
    """End the forward in the block once ``h[k]`` is there: ``with stop(model, k) as at: model(**batch)``, ``at.h``.

    Layer ``k``, all above it, the final norm and the head do not run. Nor does what follows the forward in the block,
    which is left from within the model. A cache handed in is filled for the layers below ``k`` only.

    Raises
    ------
    BadInput
        If there is no such ``k``.
    NeverFired
        If the block ends without a forward.
    """
    stopped, signal = Stopped(), _Stop()

    def act(state: Tensor) -> None:
        stopped.h = state
        raise signal

    with at_boundary(decoder_layers(model), k, act):
        try:
            yield stopped
        except _Stop as caught:
            if caught is signal:
                caught.__traceback__ = None  # its frames hold the forward's activations, and this frame holds it
                return
            raise
    raise NeverFired(f"no forward came to boundary {k}: call the model inside the block")


def check(model: nn.Module, batch: Mapping[str, Any]) -> Resumption:
    """Resume from every ``k`` and compare with the plain forward, padded positions left out.

    0.0 throughout is what a model gives whose layers speak through the residual stream alone. It costs about
    ``L / 2 + 2`` forwards.
    """
    plain = {"use_cache": False, **batch}
    differences, reason = [], ""
    with torch.no_grad():
        h = record(model, **plain).h
        expected = _attended(_answer(model(**plain)), batch)
        if expected.isnan().any():
            return Resumption((math.inf,) * len(h), f"{type(model).__name__} gives NaN on this batch by itself")
        for k, state in enumerate(h):
            try:
                with resume(model, k, state):
                    resumed = _attended(_answer(model(**plain)), batch)
                difference = (resumed - expected).abs().max().nan_to_num(math.inf).item()
                problem = "gave NaN"
            except Exception as error:  # whatever a layer does that misses what a bypassed one would have left it
                difference, problem = math.inf, f"raised {type(error).__name__}: {error}"
            differences.append(difference)
            if math.isinf(difference) and not reason:
                reason = f"resuming at layer {k} {problem}"
    return Resumption(tuple(differences), " ".join(reason.split()))


class _Stop(BaseException):
    """Leaves a forward early; not an `Exception`, so that no handler on its way takes it for a fault."""


def _choose(state: Tensor, positions: Sequence[int] | Tensor | None) -> Tensor:
    if positions is None:
        return state.clone()  # the model may go on to write into its own
    index = torch.as_tensor(positions, device=state.device)
    if index.ndim == 1:
        return state[..., index, :]
    return state[torch.arange(len(index), device=state.device)[:, None], index]


def _answer(output: Any) -> Tensor:
    logits: Tensor | None = getattr(output, "logits", None)
    first: Tensor = output[0]
    return first if logits is None else logits


def _attended(answer: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != answer.shape[:2]:
        return answer.double()
    return answer[mask.to(answer.device).bool()].double()
