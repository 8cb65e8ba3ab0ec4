"""What a model's attention looks like, measured from the tensors of short probe runs.

Nothing here is read from config keys but the trained length, the one fact that no tensor holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rotoscope.errors import Refused
from rotoscope.model.call import AttentionCall
from rotoscope.model.layers import decoder_layers, input_device
from rotoscope.model.rotary import Rotation, measure, why_not
from rotoscope.model.tap import tap_model

PROBE_TOKENS = 32
INTEGER_FLOOR = 5e-2
# Largest differences that rounding explains, relative to the largest value; anything above is a fault.
FLOOR = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class LayerAnatomy:
    """One decoder layer.

    Attributes
    ----------
    layer : int
        Counted from 0.
    kind : str
        ``attention``, or ``none`` where the layer computes no softmax attention (recurrent and linear layers).
    position : str
        How positions enter: ``rotary``, ``none``, ``learned``, ``alibi``, ``unknown``, or ``""`` without attention.
    heads, kv_heads, head_dim, v_head_dim : int
        Query heads, key/value heads, width of queries and keys, width of values.
    rotary_dims, pairing
        Rotated dims and how they pair (``half-split`` or ``interleaved``).
    window, softcap, sinks
        Sliding window in tokens, logit bound, whether learned sinks take part in the softmax.
    scaling : float
        Factor of ``q · k``.
    calls : int
        Attention calls per forward.
    slopes : tuple of float or None
        ALiBi: what each token of distance takes from the logits of each head, after all factors; None elsewhere.
    rotation : Rotation or None
        How to undo the rotary embedding; None where it is not reached.
    note : str
        Why something is not reached.
    """

    layer: int
    kind: str
    position: str = ""
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    rotary_dims: int = 0
    pairing: str = ""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scaling: float = 0.0
    calls: int = 0
    slopes: tuple[float, ...] | None = None
    rotation: Rotation | None = field(default=None, repr=False)
    note: str = ""


@dataclass(frozen=True)
class Anatomy:
    """All layers of a model, and how far the tapped model's logits were from the untouched one's."""

    layers: tuple[LayerAnatomy, ...]
    hidden: int
    vocabulary: int
    tap_difference: float
    causal_difference: float

    @property
    def attention(self) -> tuple[LayerAnatomy, ...]:
        """The layers that compute softmax attention."""
        return tuple(layer for layer in self.layers if layer.kind == "attention")

    @property
    def rotary(self) -> tuple[LayerAnatomy, ...]:
        """The layers whose queries and keys rotate and can be un-rotated."""
        return tuple(layer for layer in self.attention if layer.position == "rotary")

    def theta(self, layer: int) -> torch.Tensor:
        """Angle per token of each pair of a layer ``[pairs]``, radians."""
        rotation = self.layers[layer].rotation
        if rotation is None or rotation.theta is None:
            raise Refused(f"layer {layer} has no rotary angles to speak of")
        return torch.from_numpy(rotation.theta)


def rounding_floor(model: torch.nn.Module, dtype: torch.dtype) -> float:
    """The largest relative difference that rounding explains in this model.

    Kernels for integer weights round activations too, by scales or outlier columns chosen over all tokens at once, so
    that tokens and rows touch each other through rounding.
    """
    floor = FLOOR.get(dtype, FLOOR[torch.float32])
    integer = any(not p.is_floating_point() and not p.is_complex() for p in model.parameters())
    return max(floor, INTEGER_FLOOR) if integer else floor


class _Recorder:
    """Keeps the calls of one short probe."""

    def __init__(self) -> None:
        self.calls: dict[int, list[AttentionCall]] = {}

    def observe(self, call: AttentionCall) -> None:
        self.calls.setdefault(call.layer, []).append(call)


@torch.no_grad()
def measure_anatomy(model: torch.nn.Module, vocabulary: int) -> Anatomy:
    """Probe a model and describe every layer.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model; three forwards over at most 32 tokens are run on it.
    vocabulary : int
        Rows of the input embedding.

    Returns
    -------
    Anatomy

    Raises
    ------
    Refused
        If no attention call is reached, one is over something else than tokens, the tap changes the logits, or a later
        token changes earlier logits.
    """
    name = type(model).__name__
    layers = decoder_layers(model)
    ids = probe_ids(model, vocabulary)
    try:
        plain = logits(model, ids)
    except Exception as error:
        raise Refused(f"{name} does not run on {ids.shape[1]} token ids: {error}") from error
    seen, tapped = _tapped(model, ids)
    if not seen:
        raise Refused(
            f"{name} has no softmax attention, or computes it neither through transformers' attention interface nor as "
            "a product, a softmax and a product that could be followed: no query, key or value can be reached"
        )
    for i, calls in seen.items():
        for call in calls:
            if (call.q.shape[2], call.k.shape[2]) != (ids.shape[1], ids.shape[1]):
                raise Refused(
                    f"{name}: layer {i} attends with {call.q.shape[2]} queries to {call.k.shape[2]} keys where the "
                    f"text has {ids.shape[1]} tokens, so that a key is not a token's"
                )
    floor = rounding_floor(model, plain.dtype)
    difference = relative(tapped, plain)
    if difference > floor:
        raise Refused(f"{name}: the tap would change its logits by {difference:.1e} of their range, so it is not used")
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocabulary
    causal = relative(logits(model, changed)[:, :-1], plain[:, :-1])
    if causal > floor:
        raise Refused(f"{name} lets a later token change earlier logits (by {causal:.1e}): it is not a causal decoder")
    with _one_state(layers, ids.shape[1]) as stream:
        alike, _ = _tapped(model, ids[:, :1].expand_as(ids).contiguous())
    learned = stream.spread > floor
    described = tuple(_describe(i, seen.get(i, []), alike.get(i, []), learned, floor) for i in range(len(layers)))
    return Anatomy(described, stream.width, vocabulary, (tapped - plain).abs().max().item(), causal)


def probe_ids(model: torch.nn.Module, vocabulary: int, tokens: int = PROBE_TOKENS) -> torch.Tensor:
    """A row of ordinary token ids spread over the vocabulary, ``[1, tokens]``, on the device of the embedding."""
    start, step = vocabulary // 3, max(1, vocabulary // (3 * tokens))
    ids = (start + step * torch.arange(tokens)) % vocabulary
    return ids[None].to(input_device(model))


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one plain forward without a cache, ``[batch, tokens, vocabulary]``."""
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return out  # type: ignore[no-any-return]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value of ``b``; NaN counts as infinite."""
    value = ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()
    return value if value == value else float("inf")


def _tapped(model: torch.nn.Module, ids: torch.Tensor) -> tuple[dict[int, list[AttentionCall]], torch.Tensor]:
    recorder = _Recorder()
    with tap_model(model, (recorder,)):
        out = logits(model, ids)
    return recorder.calls, out


@dataclass
class _Stream:
    """What goes into the first layer: its width, and how far its tokens are apart though their ids are the same."""

    width: int = 0
    spread: float = 0.0


@contextmanager
def _one_state(layers: torch.nn.ModuleList, tokens: int) -> Iterator[_Stream]:
    """Give every token of a layer's input the first token's state, so that only position can tell queries apart."""
    stream = _Stream()

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else kwargs["hidden_states"]
        # Where a token has several states they stand before the tokens in some files and behind them in others.
        axis = next((i for i in range(x.ndim - 1) if x.shape[i] == tokens), None)
        if axis is None:
            raise Refused(f"{type(module).__name__} carries states of shape {tuple(x.shape)} for {tokens} tokens")
        one = x.narrow(axis, 0, 1).expand_as(x).contiguous()
        if not stream.width:
            stream.width, stream.spread = x.shape[-1], relative(x, one)
        return ((one, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": one})

    hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield stream
    finally:
        for handle in hooks:
            handle.remove()


def _describe(
    layer: int, calls: list[AttentionCall], alike: list[AttentionCall], learned: bool, floor: float
) -> LayerAnatomy:
    """One layer, from its calls on ordinary tokens and from those on tokens that all have the same state."""
    if not calls or not alike:
        return LayerAnatomy(layer, "none", note="no softmax attention call")
    call = calls[0]
    found = [measure(c.q, c.k, c.table, floor) for c in alike]
    slopes = None
    rotation = found[0] if len({r and (r.pairs, r.pairing, r.start, r.columns, r.sign) for r in found}) == 1 else None
    note = "" if rotation else why_not(alike[0].q, alike[0].table, floor)
    if rotation is None:
        position = "unknown"
    elif rotation.pairs:
        position = "rotary"
    elif call.bias is not None:
        position, note = "unknown", "a learned bias of each query over distances stands beside q · k"
    elif _biased(call):
        slopes = _slopes(call)
        position = "unknown" if slopes is None else "alibi"
        note = "a bias that does not fall evenly with distance stands beside q · k" if slopes is None else ""
    else:
        position = "learned" if learned else "none"
    if len(calls) > 1:
        note = "; ".join(filter(None, [note, f"{len(calls)} attention calls; tables count on the heads of later ones"]))
    return LayerAnatomy(
        layer, "attention", position, call.q.shape[1], call.k.shape[1], call.q.shape[-1], call.v.shape[-1],
        rotary_dims=rotation.rotary_dims if rotation else 0, pairing=rotation.pairing if rotation else "",
        window=call.window, softcap=call.softcap, sinks=call.sinks is not None, scaling=call.scaling,
        calls=len(calls), slopes=slopes, rotation=rotation, note=note,
    )  # fmt: skip


def _biased(call: AttentionCall) -> bool:
    """Whether a position bias rides on the mask."""
    if call.mask is None or call.mask.dtype == torch.bool:
        return False
    return bool(call.mask[call.allowed().expand_as(call.mask)].abs().max() > 0)


def _slopes(call: AttentionCall) -> tuple[float, ...] | None:
    """By how much each head's bias falls per token of distance; None where it does not fall evenly."""
    assert call.mask is not None
    heads, length = call.q.shape[1:3]
    bias = call.mask[0].double().expand(heads, length, length)
    slopes = (bias[:, -1, -1] - bias[:, -1, 0]) / (length - 1)
    distance = torch.arange(length, device=bias.device)
    distance = distance[:, None] - distance
    # Each query's own key stands for distance 0: what a query adds to all its keys is no bias of distance.
    fallen = bias.diagonal(dim1=-2, dim2=-1)[..., None] - bias
    uneven = (fallen - slopes[:, None, None] * distance).tril().abs().amax((-1, -2))
    # Some files round every bias to bfloat16, by up to 1/256 of it.
    return tuple(slopes.tolist()) if bool((uneven <= slopes.abs() * length / 128).all()) else None
