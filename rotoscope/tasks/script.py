"""A stand-in for a model that answers one prompt with one text, whatever it is asked beside that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from rotoscope.tasks.encode import answer_of, prompt_of

if TYPE_CHECKING:
    from rotoscope.model.lm import LM
    from rotoscope.tasks.base import Example

_CERTAIN = 50.0
"""Logit of what the script says next; all others have 0."""


class Script(torch.nn.Module):
    """Says the answer's tokens one after the other from the prompt's end on, then the end of the text.

    It takes and gives what transformers' causal models do, as far as scoring needs it: `forward` with left padding,
    greedy `generate`.
    """

    def __init__(self, lm: LM, example: Example, answer: str):
        super().__init__()
        self.config, self.generation_config = lm.model.config, lm.model.generation_config
        self.embedding = torch.nn.Embedding(1, 1)
        self.vocabulary = lm.model.get_input_embeddings().weight.shape[0]
        prompt = prompt_of(lm, example)
        self.prompt = len(prompt.ids)
        self.answer = [*answer_of(lm, prompt, answer), lm.tokenizer.eos_token_id or 0]

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """float32."""
        return self.embedding.weight.dtype

    def get_input_embeddings(self) -> torch.nn.Module:
        """By which the device of token ids is told."""
        return self.embedding

    def tie_weights(self) -> None:
        """There is nothing to tie."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, logits_to_keep: int = 0, **_: Any
    ) -> Any:
        """Logits of the next token, ``[batch, tokens, vocabulary]``."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, self.vocabulary)
        said = mask.cumsum(-1) - self.prompt  # tokens of the answer that stand before the next one
        for step, token in enumerate(self.answer):
            logits[..., token] += _CERTAIN * ((said == step) & mask.bool())
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """The prompts with the answer behind each."""
        answer = torch.tensor(self.answer).expand(len(input_ids), -1)
        return torch.cat([input_ids, answer], dim=1)
