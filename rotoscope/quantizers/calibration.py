"""What linear layers receive while a model reads calibration texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput
from rotoscope.model.lm import evaluating
from rotoscope.model.prompts import takes
from rotoscope.quantizers.base import Linear

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

Calibration = Sequence[Sequence[int]]
"""Token ids, one sequence a forward."""


@torch.no_grad()
def watch(lm: LM, linears: Sequence[Linear], texts: Calibration, see: Callable[[str, Tensor], Any], who: str) -> None:
    """Let the model read texts, and show ``see`` the name and the input ``[1, tokens, in]`` of every layer's call.

    Raises
    ------
    BadInput
        If there are no texts, or a layer is not called once: an expert, say, that no token was sent to.
    """
    if not len(texts) or not all(len(text) for text in texts):
        raise BadInput(f"{who} needs calibration: sequences of token ids, as in calibration=[ids, …]")
    seen: set[str] = set()

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel():
                seen.add(name)
                see(name, args[0].detach())

        return before

    few = {"logits_to_keep": 1} if "logits_to_keep" in takes(lm.model) else {}
    with ExitStack() as hooks, evaluating(lm.model):
        for linear in linears:
            hooks.enter_context(linear.module.register_forward_pre_hook(hook(linear.name)))
        for text in texts:
            ids = torch.as_tensor(text, device=lm.device)[None]
            lm.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **few)
    missed = [linear.name for linear in linears if linear.name not in seen]
    if missed:
        raise BadInput(f"no token of the calibration reached {missed[0]}: give more texts, or layers without it")
