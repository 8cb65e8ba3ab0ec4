"""From text to rows of token ids: a tokenizer, training rows, and rows that are never trained on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rotoscope.controls import corpus, lines
from rotoscope.results import write_atomic

BEGIN, END = "<s>", "</s>"
LENGTH = 256
VOCABULARY = 2048
HELD_OUT_ROWS = 64
TEXTS, PROMPTS = 1500, 40_000
"""What the tokenizer is made from."""


@dataclass(frozen=True)
class Rows:
    """Token ids ``[rows, 256]``, the first of each row the beginning mark.

    Attributes
    ----------
    trained
        Each begins with one key-value, known-value or passkey prompt and its answers, and goes on with text. The prompt
        stands alone before it: amid the numbers of others, none of the models learned to copy one.
    held_out
        Text alone, of files that are not trained on.
    """

    trained: np.ndarray
    held_out: np.ndarray


def prepare(folder: Path, rows: int) -> tuple[Any, Rows]:
    """The tokenizer and so many training rows, made once and kept in a folder with the manifest of their sources."""
    from transformers import PreTrainedTokenizerFast

    kept = folder / "rows.npz"
    if not kept.exists():
        found = corpus.sources()
        trained = corpus.shuffled([text for source in found for text in source.trained])
        held_out = corpus.shuffled([text for source in found for text in source.held_out])
        _tokenizer(trained).save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        made = _rows(tokenizer, trained, held_out, rows)
        corpus.write_manifest(folder, found)
        buffer = BytesIO()
        np.savez(buffer, trained=made.trained, held_out=made.held_out)
        write_atomic(kept, buffer.getvalue())
    held = Rows(**np.load(kept))
    if len(held.trained) != rows:
        kept.unlink()
        return prepare(folder, rows)
    return PreTrainedTokenizerFast.from_pretrained(folder), held


def _tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level BPE of the text and the lines; digits come in pairs, so that numbers are few tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[0-9]{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    some = islice(lines.documents(random.Random(0)), PROMPTS)
    bpe.train_from_iterator([*texts[:TEXTS], *some], trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, bpe.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, pad_token=END)


def _rows(tokenizer: Any, trained: Sequence[str], held_out: Sequence[str], rows: int) -> Rows:
    prompts = list(islice(_encoded(tokenizer, lines.documents(random.Random(1))), rows))
    out = _filled(tokenizer, trained, rows)
    text = out[:, 1:].ravel()
    at = 0
    for row, prompt in zip(out[:, 1:], prompts, strict=True):
        prompt = prompt[: len(row)]
        missing = len(row) - len(prompt)
        row[:] = [*prompt, *text[at : at + missing]]
        at += missing
    return Rows(out, _filled(tokenizer, held_out, HELD_OUT_ROWS))


def _filled(tokenizer: Any, texts: Sequence[str], rows: int) -> np.ndarray:
    """Rows filled from one text after another, from the first again where they do not suffice."""
    width = LENGTH - 1
    parts: list[np.ndarray] = []
    missing = rows * width
    while missing > 0:
        for ids in _encoded(tokenizer, texts):
            parts.append(np.array(ids[:missing], dtype=np.uint16))
            missing -= len(parts[-1])
            if not missing:
                break
    return _begun(tokenizer, np.concatenate(parts or [np.empty(0)]).reshape(rows, width))


def _encoded(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    end = tokenizer.eos_token_id
    texts = iter(texts)
    while batch := list(islice(texts, 256)):
        for ids in tokenizer(batch, add_special_tokens=False).input_ids:
            yield [*ids, end]


def _begun(tokenizer: Any, rows: np.ndarray) -> np.ndarray:
    first = np.full((len(rows), 1), tokenizer.bos_token_id)
    return np.concatenate([first, rows], axis=1).astype(np.uint16)
