"""What a model would take in memory, found without loading a weight.

The model is built from its config out of tensors that have a shape and no content, and its own forward is run on them,
so that sizes come from the modeling code rather than from config keys.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rotoscope.errors import Refused
from rotoscope.model.anatomy import LayerAnatomy
from rotoscope.model.call import AttentionCall
from rotoscope.model.classes import auto_class
from rotoscope.model.quiet import in_short, quiet
from rotoscope.model.tap import tap_model

TOKENS = 1024


@dataclass(frozen=True)
class Sizes:
    """What a model takes.

    Attributes
    ----------
    model : str
        Its class.
    dtype : torch.dtype
    parameters, weight_bytes : int
    tokens : int
        Length of the text that the forward was tried with.
    forward_bytes : int
        Most that one forward without a cache holds at a time, beside the weights.
    cache_bytes : int
        Keys and values of that text in all layers.
    layers : tuple of LayerAnatomy
        The layers that compute attention, with their shapes; nothing is known of how they rotate.
    """

    model: str
    dtype: torch.dtype
    parameters: int
    weight_bytes: int
    tokens: int
    forward_bytes: int
    cache_bytes: int
    layers: tuple[LayerAnatomy, ...]


def sizes(config: Any, source: str, dtype: torch.dtype, tokens: int = TOKENS) -> Sizes:
    """Parameters, weights, and one forward of a model with this configuration.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
    source : str
        How messages name the model.
    dtype : torch.dtype
        Of weights and activations.
    tokens : int
        Length of the text.

    Raises
    ------
    Refused
        If it is no decoder, or its forward cannot be followed without numbers.
    """
    kind = auto_class(config, source)
    try:
        return _followed(kind, config, dtype, dtype, tokens)
    except Exception as error:  # whatever a modeling file, or a look at a number that is not there, leads to
        failed = error
    try:  # some kernels, those of experts above all, can be followed in their usual type only
        return _followed(kind, config, dtype, torch.bfloat16, tokens)
    except Exception:
        raise Refused(f"{source} cannot be estimated without its weights: {in_short(failed)}") from failed


def _followed(kind: Any, config: Any, dtype: torch.dtype, tried: torch.dtype, tokens: int) -> Sizes:
    """The sizes at one type from a forward in another: what it holds grows with the width of a number."""
    calls = _Shapes()
    with quiet(), _silent(), torch.no_grad(), FakeTensorMode():
        model = _empty(kind, config, tried)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with Allocations(model) as held:
            model(input_ids=ids, use_cache=False)
        with tap_model(model, (calls,)):
            model(input_ids=ids, use_cache=False)
        # by storage: tied weights count once
        parameters = {p.untyped_storage()._cdata: p.numel() for p in model.parameters()}
    if not calls.layers:
        raise ValueError("its forward makes no attention call that is reached")
    wider = dtype.itemsize / tried.itemsize
    return Sizes(
        type(model).__name__, dtype, sum(parameters.values()), sum(parameters.values()) * dtype.itemsize, tokens,
        round(wider * held.peak), round(wider * sum(calls.cache_bytes.values())),
        tuple(calls.layers[i] for i in sorted(calls.layers)),
    )  # fmt: skip


@contextmanager
def _silent() -> Iterator[None]:
    """Without torch's report of an operation that cannot be followed, which is told in one line or tried again."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors made inside the block: ``now`` alive, ``peak`` at most.

    Parameters
    ----------
    model : torch.nn.Module, optional
        Its parameters and buffers do not count.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.now = self.peak = 0
        held = () if model is None else (*model.parameters(), *model.buffers())
        self._known = {tensor.untyped_storage()._cdata for tensor in held}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class _Shapes:
    """Notes the shapes of every layer's attention calls."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAnatomy] = {}
        self.cache_bytes: dict[int, int] = {}

    def observe(self, call: AttentionCall) -> None:
        i = call.layer
        before = self.layers[i].calls if i in self.layers else 0
        # How a layer rotates takes numbers to find out; counted as rotary it takes the most that it can.
        self.layers[i] = LayerAnatomy(
            i, "attention", "rotary", call.q.shape[1], call.k.shape[1], call.q.shape[-1], call.v.shape[-1],
            calls=before + 1,
        )  # fmt: skip
        self.cache_bytes[i] = call.k.nbytes + call.v.nbytes


def _empty(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    from transformers.initialization import no_init_weights

    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantized")
    with no_init_weights():
        model = kind.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval()
