"""Prefill that stops at a depth: above it, prompt tokens cost their keys and values and nothing else.

What comes out is what `Freeze` at that depth gives, at a fraction of the cost: Ben-Artzy & Schwartz 2024 as a way to
save time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rotoscope.errors import BadInput, NeverFired, Refused
from rotoscope.interventions.base import Run
from rotoscope.interventions.boundary import check_layer
from rotoscope.interventions.freeze import holding
from rotoscope.model.call import AttentionCall, Output
from rotoscope.model.columns import columns
from rotoscope.model.forwards import CACHES, Forward, around, covered, describe, positional
from rotoscope.model.layers import at_boundary, decoder_layers, loop
from rotoscope.model.residual import stop
from rotoscope.model.tap import tap

if TYPE_CHECKING:
    from rotoscope.model.lm import LM


@contextmanager
def shallow_prefill(lm: LM, depth: int, exempt_first: bool = False) -> Iterator[Run]:
    """Prefill prompts only up to layer ``depth`` in the block: ``with shallow_prefill(lm, 15): lm.model.generate(…)``.

    Prompt tokens run through the layers below ``depth``; each layer from there on makes its keys and values of their
    states at ``depth``, and no more. The last token of each prompt, and all that is generated, run through every layer.
    The same tokens come out as under ``Freeze(depth, scope="prompt")``.

    Parameters
    ----------
    lm : LM
        The model; it is left as found on any exit.
    depth : int
        The first layer not to run on prompt tokens, 0 … L; at L prefill is the model's own.
    exempt_first : bool
        Run position 0 through all layers. In a batch, that takes all columns up to the one where the shortest prompt
        starts through all layers.

    Yields
    ------
    Run
        ``run.fired`` counts prefills.

    Raises
    ------
    BadInput
        If there is no such layer; inside the block, if a prompt is padded on the right or there is to be no cache.
    Refused
        If position 0 is to be exempt and the model has recurrent layers, which take up a prompt in one piece only.
    NeverFired
        If the block ends, without an exception, before a prefill.

    Notes
    -----
    A prefill returns the logits of the last token alone, ``[batch, 1, vocabulary]``. What else acts on the model sees a
    prompt in two forwards, the last token in the second: an intervention around this block that chooses by what stands
    in the prompt chooses without that token.
    """
    check_layer(depth, len(decoder_layers(lm.model)))
    prefill = _Prefill(lm, depth, exempt_first)
    with around(lm.model, prefill.lead):
        yield prefill.run
    if not prefill.run.fired:
        raise NeverFired("shallow_prefill met no prompt: run the model inside the block, with an empty cache")


class _Prefill:
    def __init__(self, lm: LM, depth: int, exempt_first: bool):
        self._lm, self._depth, self._exempt = lm, depth, exempt_first
        self._layers = len(decoder_layers(lm.model))
        self.run = Run()

    def lead(self, forward: Forward, proceed: Callable[..., Any]) -> Any:
        if forward.past:
            return proceed(**forward.arguments)
        self.run.fired += 1
        tokens = forward.real.shape[1]
        if tokens == 1 or self._depth == self._layers:
            return proceed(**forward.arguments)
        if not bool(forward.real[:, -1].all()):
            raise BadInput("shallow_prefill needs rows that end in a token: pad on the left")
        if forward.cache is None:
            forward = self._with_cache(forward, proceed)
        done = self._exempted(forward, proceed) if self._exempt else 0
        if done < tokens - 1:
            self._fill(proceed, forward, done)
        return proceed(**columns(forward, tokens - 1, tokens))

    def _with_cache(self, forward: Forward, proceed: Callable[..., Any]) -> Forward:
        """The forward with the cache handed in, as ``generate`` does it, that the model would make for itself."""
        config = self._lm.model.config.get_text_config(decoder=True)
        wanted = forward.arguments.get("use_cache")
        if not (getattr(config, "use_cache", True) if wanted is None else wanted):
            raise BadInput("shallow_prefill fills a cache: use the model with use_cache=True")
        made: list[Any] = []

        def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            made.extend(x for x in (*args, *kwargs.values()) if hasattr(x, "get_seq_length"))

        first = decoder_layers(self._lm.model)[0]
        # It is handed to the first layer; the forward ends there.
        with stop(self._lm.model, 0), first.register_forward_pre_hook(look, with_kwargs=True, prepend=True):
            proceed(**{**columns(forward, 0, 1), "use_cache": True})
        if not made:
            raise Refused("this model hands no cache to its layers, so that none can be filled early")
        name = next((name for name in CACHES if name in positional(proceed)), CACHES[0])
        return describe({**forward.arguments, name: made[0], "use_cache": True})

    def _exempted(self, forward: Forward, proceed: Callable[..., Any]) -> int:
        """Run the columns that hold a first token through all layers, the other tokens in them frozen."""
        if any(layer.kind != "attention" for layer in self._lm.anatomy.layers) or _recurs(forward.cache):
            raise Refused(
                "recurrent layers take up a prompt in one piece only, so that position 0 cannot go ahead alone: leave "
                "exempt_first out"
            )
        tokens = forward.real.shape[1]
        width = min(int(forward.first.int().argmax(-1).max()) + 1, tokens - 1)
        where = (forward.real & ~forward.first)[:, :width]
        layers = decoder_layers(self._lm.model)
        with stop(self._lm.model, self._layers), ExitStack() as hooks:
            for k, act in holding(self._depth, self._layers, lambda: where).items():
                hooks.enter_context(at_boundary(layers, k, act))
            proceed(**columns(forward, 0, width))
        return width

    def _fill(self, proceed: Callable[..., Any], forward: Forward, start: int) -> None:
        """Fill the cache with all tokens from ``start`` on but the last."""
        model_loop = loop(self._lm.model)
        core = _Core(self._lm, self._depth, forward.cache)
        with tap(self._lm, core), stop(self._lm.model, self._layers), ExitStack() as stack:
            for layer, returns in [*zip(model_loop.layers, model_loop.returns, strict=True)][self._depth :]:
                stack.enter_context(covered(layer, "forward", partial(_unchanged, layer.forward, returns)))
            proceed(**columns(forward, start, forward.real.shape[1] - 1))


def _unchanged(original: Callable[..., Any], returns: int, *args: Any, **kwargs: Any) -> Any:
    """Run a layer for what it leaves in the cache, and hand its input on."""
    state: Tensor = (args[0] if args else kwargs["hidden_states"]).clone()  # it may write into its own
    try:
        original(*args, **kwargs)
    except _Filled as caught:
        caught.__traceback__ = None  # its frames hold the layer's activations
    except _LACKING as error:
        raise Refused(f"layers of this model need more of those below than keys and values: {error}") from error
    return (state, *[None] * (returns - 1)) if returns else state


_LACKING = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What code raises where something is not there that it counts on."""


class _Core:
    """Ends a layer where it comes to attend: by then its keys and values are in the cache."""

    def __init__(self, lm: LM, depth: int, cache: Any):
        self._last = {layer.layer: layer.calls - 1 for layer in lm.anatomy.attention if layer.layer >= depth}
        self._cache = cache

    def edit(self, call: AttentionCall) -> AttentionCall:
        if call.index != self._last.get(call.layer) or _recurs(self._cache, call.layer):
            return call
        return replace(call, run=_end)


def _end(call: AttentionCall) -> Output:
    raise _Filled


class _Filled(BaseException):
    """Leaves a layer early; not an `Exception`, so that no handler on its way takes it for a fault."""


def _recurs(cache: Any, layer: int | None = None) -> bool:
    """Whether a layer, or any, keeps a recurrent state that it may come to update after it has attended."""
    kept = cache.layers if layer is None else cache.layers[layer : layer + 1]
    return any(hasattr(part, "update_recurrent_state") for part in kept)
