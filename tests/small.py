"""A tiny model with a tokenizer of single characters, in a folder as a user would have it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tiny import VOCABULARY, tiny
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast


def characters() -> PreTrainedTokenizerFast:
    """One id for each printable character; everything else is unknown."""
    known = ["<pad>", "<bos>", "<unk>", *string.printable[:94]]
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(known[:VOCABULARY])}, unk_token="<unk>"))
    words.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>")


def small(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Save a tiny model and its tokenizer; return the folder."""
    tiny(family, **overrides).save_pretrained(folder)
    characters().save_pretrained(folder)
    return folder
