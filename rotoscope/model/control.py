"""Small decoders that differ in nothing but how positions enter: rotary, learned table, ALiBi, or not at all.

One modeling class of transformers serves all four. Where positions are not rotary its rotation is by the angle 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.masking_utils import create_causal_mask

from rotoscope.errors import BadInput
from rotoscope.model.shipped import MODEL_TYPE, POSITIONS


class ControlConfig(LlamaConfig):
    """A decoder's configuration, and how its positions enter."""

    model_type = MODEL_TYPE
    positions: str = "rope"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.positions not in POSITIONS:
            raise BadInput(f"positions={self.positions!r} is not one of {', '.join(POSITIONS)}")
        super().__post_init__(**kwargs)


class _Unrotated(nn.Module):
    """The angle table of a rotation by nothing, ``cos`` and ``sin`` ``[batch, tokens, head_dim]``."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = x.new_ones(*position_ids.shape, self.width)
        return ones, torch.zeros_like(ones)


class ControlModel(LlamaModel):
    """The decoder without its head."""

    config_class = ControlConfig

    def __init__(self, config: ControlConfig):
        super().__init__(config)
        if config.positions != "rope":
            self.rotary_emb = _Unrotated(config.hidden_size // config.num_attention_heads)  # type: ignore[assignment]
        if config.positions == "learned":
            # Made after all other weights, so that the same seed gives all variants the same ones.
            self.position_table = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None] + past
        if self.config.positions == "learned":
            inputs_embeds = inputs_embeds + self._positions(position_ids)
        elif self.config.positions == "alibi":
            attention_mask = self._biased(inputs_embeds, attention_mask, position_ids, cache, past)
        return super().forward(
            attention_mask=attention_mask, position_ids=position_ids, cache=cache, inputs_embeds=inputs_embeds, **kwargs
        )

    def _positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        last, held = int(position_ids.max()), self.config.max_position_embeddings
        if last >= held:
            raise BadInput(f"this model's table holds positions 0 to {held - 1}; there is none for {last}")
        return self.position_table(position_ids)  # type: ignore[no-any-return]

    def _biased(
        self, x: torch.Tensor, mask: torch.Tensor | None, position_ids: torch.Tensor, cache: Any, past: int
    ) -> torch.Tensor:
        """The causal mask with ALiBi's bias on it, additive, ``[batch, heads, tokens, keys]``."""
        allowed = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=mask, cache=cache, position_ids=position_ids
        )
        length = x.shape[1]
        keys = past + length if allowed is None else allowed.shape[-1]
        distance = torch.arange(past, past + length, device=x.device)[:, None] - torch.arange(keys, device=x.device)
        slopes = torch.tensor(alibi_slopes(self.config.num_attention_heads), dtype=x.dtype, device=x.device)
        bias = -slopes[:, None, None] * distance.clamp_min(0).to(x.dtype)
        least = torch.finfo(x.dtype).min
        if allowed is None:
            return bias.masked_fill(distance < 0, least)[None]
        if allowed.dtype == torch.bool:
            return bias.masked_fill(~allowed, least)
        return torch.where(allowed < 0, least, bias)


class ControlForCausalLM(LlamaForCausalLM):
    """The decoder with its head."""

    config_class = ControlConfig

    def __init__(self, config: ControlConfig):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = ControlModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head (Press et al. 2022, section 3 and its released code for other counts than 2ⁿ)."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return [*slopes, *between][:heads]


AutoConfig.register(MODEL_TYPE, ControlConfig, exist_ok=True)
AutoModelForCausalLM.register(ControlConfig, ControlForCausalLM, exist_ok=True)
