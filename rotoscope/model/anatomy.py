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
from rotoscope.model.layers import decoder_layers
from rotoscope.model.rotary import Rotation, measure
from rotoscope.model.tap import AttentionCall, tap_model

PROBE_TOKENS = 32
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
        If no attention call is reached, the tap changes the logits, or a later token changes earlier logits.
    """
    name = type(model).__name__
    layers = decoder_layers(model)
    ids = probe_ids(model, vocabulary)
    plain = logits(model, ids)
    seen, tapped = _tapped(model, ids)
    if not seen:
        raise Refused(
            f"{name} does not route its attention through transformers' attention interface, so no query, key or "
            "value can be reached; rotoscope has no adapter for it"
        )
    floor = FLOOR.get(plain.dtype, FLOOR[torch.float32])
    difference = relative(tapped, plain)
    if difference > floor:
        raise Refused(f"{name}: the tap would change its logits by {difference:.1e} of their range, so it is not used")
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocabulary
    causal = relative(logits(model, changed)[:, :-1], plain[:, :-1])
    if causal > floor:
        raise Refused(f"{name} lets a later token change earlier logits (by {causal:.1e}): it is not a causal decoder")
    positions = _positions(model, layers, ids, floor)
    described = tuple(_describe(i, seen.get(i, []), positions.get(i)) for i in range(len(layers)))
    return Anatomy(described, _hidden(model, layers, ids), vocabulary, (tapped - plain).abs().max().item(), causal)


def probe_ids(model: torch.nn.Module, vocabulary: int, tokens: int = PROBE_TOKENS) -> torch.Tensor:
    """A row of ordinary token ids spread over the vocabulary, ``[1, tokens]``, on the device of the embedding."""
    start, step = vocabulary // 3, max(1, vocabulary // (3 * tokens))
    ids = (start + step * torch.arange(tokens)) % vocabulary
    return ids[None].to(model.get_input_embeddings().weight.device)  # type: ignore[operator]


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


def _positions(
    model: torch.nn.Module, layers: torch.nn.ModuleList, ids: torch.Tensor, floor: float
) -> dict[int, tuple[Rotation | None, bool]]:
    """Per layer: its rotation, and whether absolute positions are part of the hidden states."""
    same = ids[:, :1].expand_as(ids).contiguous()
    with _one_state(layers) as absolute:
        seen, _ = _tapped(model, same)
    learned = bool(absolute) and absolute[0] > floor
    return {i: (measure(c[0].q, c[0].k, c[0].table, floor), learned) for i, c in seen.items()}


@contextmanager
def _one_state(layers: torch.nn.ModuleList) -> Iterator[list[float]]:
    """Give every token of a layer's input the first token's state, so that only position can tell queries apart."""
    spread: list[float] = []

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else kwargs["hidden_states"]
        one = x[..., :1, :].expand_as(x).contiguous()
        if not spread:
            spread.append(relative(x, one))
        return ((one, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": one})

    hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield spread
    finally:
        for handle in hooks:
            handle.remove()


def _hidden(model: torch.nn.Module, layers: torch.nn.ModuleList, ids: torch.Tensor) -> int:
    width: list[int] = []
    handle = layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: width.append((args[0] if args else kwargs["hidden_states"]).shape[-1]), with_kwargs=True
    )
    try:
        logits(model, ids[:, :1])
    finally:
        handle.remove()
    return width[0]


def _describe(layer: int, calls: list[AttentionCall], at: tuple[Rotation | None, bool] | None) -> LayerAnatomy:
    if not calls or at is None:
        return LayerAnatomy(layer, "none", note="no softmax attention call")
    call = calls[0]
    rotation, learned = at
    note = ""
    if rotation is None:
        position, note = "unknown", "queries turn with position, but no angle table that the layer received explains it"
    elif rotation.pairs:
        position = "rotary"
    elif _biased(call):
        position = "alibi"
    else:
        position = "learned" if learned else "none"
    return LayerAnatomy(
        layer, "attention", position, call.q.shape[1], call.k.shape[1], call.q.shape[-1], call.v.shape[-1],
        rotary_dims=rotation.rotary_dims if rotation else 0, pairing=rotation.pairing if rotation else "",
        window=call.window, softcap=call.softcap, sinks=call.sinks is not None, scaling=call.scaling,
        calls=len(calls), rotation=rotation, note=note,
    )  # fmt: skip


def _biased(call: AttentionCall) -> bool:
    """Whether a position bias rides on the mask, or beside it."""
    bias = call.extra.get("position_bias")
    if bias is not None:
        return True
    if call.mask is None or call.mask.dtype == torch.bool:
        return False
    return bool(call.mask[call.allowed().expand_as(call.mask)].abs().max() > 0)
