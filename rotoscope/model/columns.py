"""The arguments of a forward, cut or lengthened along its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotoscope.model.forwards import Forward

PER_TOKEN = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids", "cache_position")
"""What has one entry per token of a forward along its last axis. The mask has one per token of the cache besides."""


def columns(forward: Forward, start: int, stop: int) -> dict[str, Any]:
    """The arguments for tokens ``start`` to ``stop`` of a forward, for when the cache holds those before them."""
    out = dict(forward.arguments)
    for name in PER_TOKEN:
        if isinstance(out.get(name), Tensor):
            out[name] = out[name][..., start:stop]
    if out.get("inputs_embeds") is not None:
        out["inputs_embeds"] = out["inputs_embeds"][:, start:stop]
    if out.get("attention_mask") is not None:
        out["attention_mask"] = out["attention_mask"][:, : forward.past + stop]
    out.pop("logits_to_keep", None)  # it counts tokens, too
    return out


def with_one_before(forward: Forward, ids: Tensor) -> dict[str, Any]:
    """The arguments for the tokens of a forward and the one before each row, ``ids`` ``[batch, 1]``."""
    out = dict(forward.arguments)
    for name in PER_TOKEN:
        given = out.get(name)
        if isinstance(given, Tensor):
            first = given[..., :1]
            before = {"input_ids": ids, "position_ids": first - 1, "cache_position": first - 1}.get(name, first)
            out[name] = torch.cat([before, given], -1)
    return out
