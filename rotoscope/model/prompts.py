"""Prompts side by side, with the answers that are scored behind them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput


@dataclass(frozen=True)
class Prompts:
    """Rows of token ids, each a prompt and, behind it, an answer or none.

    Attributes
    ----------
    ids
        Token ids ``[batch, tokens]``.
    mask
        Which of them are no padding ``[batch, tokens]``: prompts are padded on the left, answers on the right.
    prompt : int
        Columns that the prompts take.

    Raises
    ------
    BadInput
        If a prompt is padded on the right, or they take less than two columns.
    """

    ids: Tensor
    mask: Tensor
    prompt: int

    def __post_init__(self) -> None:
        if not 2 <= self.prompt <= self.ids.shape[1]:
            raise BadInput(f"prompts need two tokens or more; {self.prompt} of {self.ids.shape[1]} columns are theirs")
        if not bool(self.mask[:, self.prompt - 1].all()):
            raise BadInput("prompts must be padded on the left, so that the last token of each is in the same column")

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]] | None = None, padding: int = 0
    ) -> Prompts:
        """Lay out rows of different lengths.

        Parameters
        ----------
        prompts : sequence of sequences of int
            Token ids of each prompt.
        answers : sequence of sequences of int, optional
            Token ids that stand behind each: of an answer of ``m`` tokens the first ``m - 1`` suffice to score it.
        padding : int
            The id that fills the rest.
        """
        answers = answers or [()] * len(prompts)
        width, rest = max(map(len, prompts)), max(map(len, answers))
        ids = torch.full((len(prompts), width + rest), padding)
        mask = torch.zeros_like(ids)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            at = slice(width - len(prompt), width + len(answer))
            ids[row, at] = torch.tensor([*prompt, *answer])
            mask[row, at] = 1
        return cls(ids, mask, width)

    def to(self, device: torch.device) -> Prompts:
        """The same on another device."""
        return Prompts(self.ids.to(device), self.mask.to(device), self.prompt)

    @property
    def last(self) -> int:
        """Columns from the last prompt token on; they run as ever while the tokens before them are changed."""
        return self.ids.shape[1] - self.prompt + 1

    @property
    def first(self) -> Tensor:
        """Which token is position 0 of its row, boolean ``[batch, tokens]``."""
        real = self.mask.bool()
        return real & (real.cumsum(-1) == 1)

    @property
    def previous(self) -> Tensor:
        """Which tokens are real and stand before the last prompt token, boolean ``[batch, tokens]``."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        return self.mask.bool() & (columns < self.prompt - 1)

    def arguments(self, model: nn.Module, start: int = 0, stop: int | None = None, past: bool = True) -> dict[str, Any]:
        """What a model's forward takes for the columns from ``start`` to ``stop``.

        Parameters
        ----------
        model
            The model. Positions follow the mask where its forward takes them.
        start, stop
            The columns, by default all.
        past
            Whether the columns before ``start`` are attended to, from a cache.
        """
        stop = self.ids.shape[1] if stop is None else stop
        given = {"input_ids": self.ids[:, start:stop], "attention_mask": self.mask[:, 0 if past else start : stop]}
        if "position_ids" in takes(model):
            given["position_ids"] = (self.mask.cumsum(-1) - 1).clamp_min(0)[:, start:stop]
        return given


def takes(model: nn.Module) -> frozenset[str]:
    """The arguments of a model's forward by name; of the model inside where adapters are wrapped around it."""
    inner: Any = getattr(model, "get_base_model", lambda: model)
    return frozenset(inspect.signature(inner().forward).parameters)
