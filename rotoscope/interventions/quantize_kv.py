"""QuantizeKV: a quantized cache of keys and values, with protected channels (compare KIVI, Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rotoscope.errors import BadInput
from rotoscope.interventions.base import Intervention, Layers, Run, chosen_layers
from rotoscope.interventions.kv_cache import Before, Cache
from rotoscope.interventions.kv_grid import AXES, KINDS, dividing, known, quantized
from rotoscope.model.forwards import around
from rotoscope.model.tap import tap

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

__all__ = ["QuantizeKV", "quantized"]


@dataclass(frozen=True)
class QuantizeKV(Intervention):
    """Keep keys and values in a quantized cache.

    As in every such cache, a forward attends to its own keys and values as they are and reads those of earlier
    forwards quantized. A prompt counts as two passes even where it comes in one forward, or together with its answer:
    what comes before its last ``fresh`` columns is the first pass, and all columns from there on read it quantized.
    So one forward without a cache computes what a prefill and a second forward with the cache would.

    Parameters
    ----------
    kind : str
        ``int2`` … ``int8``, asymmetric from the least to the largest value of a group; ``fp8``, float8_e4m3fn with one
        scale for a row's keys and one for its values, measured in the first pass. (The fp8 cache of transformers hands
        later passes even their own tokens back rounded; here they are exact, whatever the kind.)
    keys, values : str
        ``token``: groups are ``group`` dims of one token and head (all of them where there are fewer). ``channel``: one
        dim of a head in ``group`` tokens, from the row's first on. Such a group is quantized where one pass brings all
        of its tokens; others stay exact, the tokens of decode steps among them.
    group : int
        Values that share a scale.
    targets : str
        ``K``, ``V`` or ``KV``.
    layers
        One layer, several, or None for all that have attention.
    keep : mapping of int to torch.Tensor, optional
        By layer, dims of keys that stay exact and have no part in the scales, boolean ``[kv_heads, head_dim]``.
    first : int
        Tokens at the start of each row that stay exact, position 0 first.
    fresh : int
        Last columns of the prompt that count as the next pass. It needs ``on(lm, prompt=P)``: without it every forward
        is one pass, and a single one reads nothing quantized.

    Notes
    -----
    ``run.fired`` counts attention calls in which something was read quantized. ``run.measured`` sums over the chosen
    layers and real tokens, keys and values alike: ``values`` and ``bits`` (stored for them: with 16 for each scale,
    each zero point and each value that stays exact), and over quantized values ``error`` (``Σ (x′ − x)²``) and
    ``energy`` (``Σ x²``).

    Observers behind it see keys and values as the last columns of the call read them.
    """

    name: ClassVar[str] = "quantize-kv"
    kind: str = "int4"
    keys: str = "token"
    values: str = "token"
    group: int = 64
    targets: str = "KV"
    layers: Layers = None
    keep: Mapping[int, Tensor] | None = field(default=None, repr=False)
    first: int = 0
    fresh: int = 1

    def __post_init__(self) -> None:
        known("kind", self.kind, KINDS)
        known("keys", self.keys, AXES)
        known("values", self.values, AXES)
        if self.targets not in ("K", "V", "KV"):
            raise BadInput(f"targets are K, V or KV, not {self.targets!r}")
        if self.group < 1 or self.first < 0 or self.fresh < 0:
            raise BadInput("group is 1 or more, first and fresh are 0 or more")
        if self.kind == "fp8" and "channel" in (self.keys, self.values):
            raise BadInput("fp8 has one scale for all keys of a row: channels have none of their own")
        if self.keep is not None and not (isinstance(self.keep, Mapping) and "K" in self.targets):
            raise BadInput("keep maps layers to dims of keys [kv_heads, head_dim], where keys are a target")

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        shapes = {a.layer: a for a in lm.anatomy.attention}
        layers = chosen_layers(self.layers, shapes, "layers of attention")
        if self.keep:
            chosen_layers(self.keep, shapes, "layers of attention")
        for layer in layers:
            shape = shapes[layer]
            for name, width in (("K", shape.head_dim), ("V", shape.v_head_dim)):
                if name in self.targets and self.kind != "fp8" and self.axis(name) == "token":
                    dividing(self.group, width)
            keep = (self.keep or {}).get(layer)
            if keep is not None and (keep.dtype, *keep.shape) != (torch.bool, shape.kv_heads, shape.head_dim):
                wanted = f"[{shape.kv_heads}, {shape.head_dim}]"
                raise BadInput(f"keep of layer {layer} must be boolean {wanted}, not {keep.dtype} {list(keep.shape)}")
        cache = Cache(self, run, layers)
        stack.enter_context(around(lm.model, cache.follow))
        stack.enter_context(tap(lm, Before(cache), cache))

    def axis(self, name: str) -> str:
        """Along what keys (``K``) or values (``V``) are grouped."""
        return self.keys if name == "K" else self.values
