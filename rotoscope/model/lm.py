"""A model in hand, with its tokenizer and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rotoscope.errors import BadInput, Refused
from rotoscope.model.anatomy import Anatomy, measure_anatomy
from rotoscope.model.layers import input_device


@dataclass(frozen=True)
class LM:
    """A language model that rotoscope reaches exactly.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        The user's own object, unchanged.
    tokenizer : transformers.PreTrainedTokenizerBase or None
        None where no text is needed.
    anatomy : Anatomy
        Heads, widths, rotary planes, windows per layer, measured.
    source, revision, file_hash : str or None
        Where the model came from, for provenance.
    trained_length : int or None
        Tokens that the model was trained on; None when neither the config nor the user says.
    """

    model: Any
    tokenizer: Any
    anatomy: Anatomy
    source: str
    revision: str | None = None
    file_hash: str | None = None
    trained_length: int | None = None

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return input_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the model's parameters."""
        return self.model.dtype  # type: ignore[no-any-return]

    def encode(self, text: str) -> torch.Tensor:
        """Token ids of a text, with whatever the tokenizer puts in front, ``[tokens]``.

        Raises
        ------
        BadInput
            If the model came without a tokenizer.
        """
        if self.tokenizer is None:
            raise BadInput(f"{self.source} has no tokenizer: pass one to rotoscope.wrap(model, tokenizer)")
        return self.tokenizer(text, return_tensors="pt").input_ids[0]  # type: ignore[no-any-return]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block, every module's own mode after it: dropout is no property of attention."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module in model.modules():  # some models swap a part for another when they meet a short text
            module.training = training.get(module, model.training)


def wrap(
    model: Any,
    tokenizer: Any = None,
    *,
    source: str | None = None,
    revision: str | None = None,
    file_hash: str | None = None,
    trained_length: int | None = None,
) -> LM:
    """Take a model that the user already holds: sharded, quantized, with adapters; it is used as it is.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any causal decoder of transformers, or a wrapper around one that keeps its call signature.
    tokenizer : optional
        Needed only where text is.
    source, revision, file_hash : str, optional
        Provenance; by default the name that the model's config carries.
    trained_length : int, optional
        Tokens that the model was trained on, by default ``max_position_embeddings`` of its config.

    Returns
    -------
    LM

    Raises
    ------
    Refused
        If the model cannot be reached exactly; the sentence says why.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "get_input_embeddings"):
        raise BadInput(f"wrap needs a transformers model, not {type(model).__name__}")
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise Refused(f"{type(model).__name__} is an encoder-decoder; rotoscope reads decoder-only models")
    text = config.get_text_config(decoder=True)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    with evaluating(model):
        anatomy = measure_anatomy(model, embedding.weight.shape[0])
    return LM(
        model,
        tokenizer,
        anatomy,
        source=source or getattr(config, "name_or_path", "") or type(model).__name__,
        revision=revision,
        file_hash=file_hash,
        trained_length=trained_length or getattr(text, "max_position_embeddings", None),
    )
