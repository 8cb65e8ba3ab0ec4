"""Which files of a model folder, or of a repository on the hub, are read and which are refused."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rotoscope.errors import BadInput, Refused

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
)
_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def weight_files(names: Iterable[str], source: str) -> list[str]:
    """The safetensors files that hold a model's weights, sorted.

    Raises
    ------
    Refused
        If the weights are there as pickles only: reading one runs whatever code it holds.
    BadInput
        If there are none, or something else is in their place.
    """
    top = [name for name in names if "/" not in name]
    if "config.json" not in top and "adapter_config.json" in top:
        raise BadInput(f"{source} holds an adapter only: load its base model with peft and pass that to rotoscope.wrap")
    weights = _matching(top, ("model*.safetensors",))
    if weights:
        return weights
    if gguf := _matching(top, ("*.gguf",)):
        raise BadInput(f"{source} holds {gguf[0]}: give the path of that file")
    if pickles := _matching(top, _PICKLES):
        raise Refused(
            f"{source} holds its weights as a pickle ({pickles[0]}), which can run code when read: where you trust it, "
            "convert it with AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(NEW_FOLDER) "
            "and load that folder"
        )
    raise BadInput(f"{source} holds no weights: model.safetensors is missing")


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether there is a vocabulary; without one transformers makes up an empty tokenizer for some models."""
    return bool(_matching(names, _TOKENIZERS))


def wanted(names: Sequence[str], source: str, code: bool) -> list[str]:
    """What is fetched of a repository: weights, settings, tokenizer, and Python files if `code` is trusted."""
    top = [name for name in names if "/" not in name]
    python = _matching(names, ("*.py",)) if code else []
    return [*weight_files(names, source), *_matching(top, _SETTINGS), *python]


def sha256(file: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of_files(files: Sequence[Path]) -> str:
    """Of one file its own hash, of several what ``sha256sum FILE… | sha256sum`` prints in their folder."""
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(sha256, files))
    if len(hashes) == 1:
        return hashes[0]
    lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(hashes, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def names_in(folder: Path) -> list[str]:
    """Of the files at the top of a folder."""
    return [path.name for path in folder.iterdir() if path.is_file()]


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return sorted({name for name in names for pattern in patterns if fnmatch.fnmatchcase(name, pattern)})
