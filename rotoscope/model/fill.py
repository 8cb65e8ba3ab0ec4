"""Layers that do no more than put keys and values into a cache.

By the time a layer updates its cache, the keys and values of its tokens have been computed and nothing else has but
the queries. So an exception raised from there ends the layer, whatever it calls its projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from rotoscope.model.forwards import covered
from rotoscope.model.layers import bypass, loop


@contextmanager
def filling(model: nn.Module, layers: Iterable[int], cache: Any) -> Iterator[None]:
    """Let some layers only fill the cache with the keys and values of the state that they get, and hand it on as it is.

    A layer that never updates the cache through ``cache.update`` runs as a whole, and its output is dropped.

    Parameters
    ----------
    model
        A causal language model.
    layers
        Decoder layers, counted from 0.
    cache
        The cache that the forwards in the block are given.
    """
    model_loop, filled = loop(model), _Filled()
    inside = False

    def update(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if inside:
            raise filled
        return out

    def fill(run: Callable[..., Any], hand_on: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            run(*args, **kwargs)
        except _Filled as caught:
            caught.__traceback__ = None  # its frames hold the layer's activations
        finally:
            inside = False
        return hand_on(*args, **kwargs)

    original = cache.update
    with ExitStack() as stack:
        stack.enter_context(covered(cache, "update", update))
        for index in layers:
            layer = model_loop.layers[index]
            run = layer.forward
            stack.enter_context(bypass(layer, model_loop.returns[index]))
            stack.enter_context(covered(layer, "forward", partial(fill, run, layer.forward)))
        yield


class _Filled(BaseException):
    """Leaves a layer early; not an `Exception`, so that no handler on its way takes it for a fault."""
