"""The user's cache of converted models: where it is, what it holds, how an entry comes to be."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from rotoscope.errors import BadInput

PROVENANCE = "rotoscope.json"
"""Name of the file in each entry that says what it was made from."""

_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Entry:
    """One converted model.

    Attributes
    ----------
    name : str
        Name of the file that it was converted from; "(unfinished)" where a conversion was killed, "(damaged)" where
        the entry's own record cannot be read.
    hash : str
        sha256 of that file, "" when unfinished.
    bytes : int
        Space taken on disk.
    path : Path
        The folder, which transformers loads like any other.
    quantization : dict of str to int
        How many tensors of each storage type the original file held, such as ``{"Q4_1": 210, "F32": 61}``. Weights
        that were 4-bit stay on their 4-bit grid after conversion: they are no full-precision original.
    """

    name: str
    hash: str
    bytes: int
    path: Path
    quantization: dict[str, int]


def root() -> Path:
    """The cache folder: ``$ROTOSCOPE_CACHE``, else ``rotoscope`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("ROTOSCOPE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rotoscope"


def entries() -> list[Entry]:
    """What the cache holds, by name; conversions that were killed midway are listed too."""
    folder = _models()
    if not folder.is_dir():
        return []
    return sorted((_entry(path) for path in folder.iterdir() if path.is_dir()), key=lambda entry: entry.name)


def find(file_hash: str) -> Entry | None:
    """The entry converted from the file with this sha256, if there is one."""
    return next((entry for entry in entries() if entry.hash == file_hash), None)


def clear() -> int:
    """Remove every entry.

    Returns
    -------
    int
        Bytes freed.
    """
    freed = 0
    for entry in entries():
        shutil.rmtree(entry.path)
        freed += entry.bytes
    return freed


def obtain(key: str, make: Callable[[Path], None]) -> Path:
    """The folder of an entry, made first if it is missing.

    Nothing is ever seen half made: the entry is built under another name and renamed. Where two processes build the
    same one, the first to finish is used by both.

    Parameters
    ----------
    key : str
        Name of the entry's folder.
    make : callable
        Fills an empty folder. If it raises, the folder goes and the error is passed on.

    Raises
    ------
    BadInput
        If the cache cannot be written.
    """
    final = _models() / key
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        building = Path(mkdtemp(prefix=_UNFINISHED, dir=final.parent))
    except OSError as error:
        raise BadInput(f"the cache {root()} cannot be written ({error.strerror}): set ROTOSCOPE_CACHE") from error
    try:
        make(building)
        try:
            building.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final


def _models() -> Path:
    return root() / "models"


def _entry(path: Path) -> Entry:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if path.name.startswith(_UNFINISHED):
        return Entry("(unfinished)", "", size, path, {})
    try:
        made_from = json.loads((path / PROVENANCE).read_text(encoding="utf-8"))
        return Entry(made_from["source"], made_from["sha256"], size, path, made_from["quantization"])
    except (OSError, ValueError, KeyError, TypeError):
        return Entry("(damaged)", "", size, path, {})
