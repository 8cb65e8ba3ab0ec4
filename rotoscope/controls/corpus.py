"""What the controls are trained on: Python sources of the standard library and of packages that rotoscope installs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotoscope.errors import BadInput
from rotoscope.results import write_atomic

STANDARD = "python"
MANIFEST = "manifest.json"
PACKAGES = ("jinja2", "networkx", "pandas", "rich", "scipy")
HELD_OUT = 50
"""One file in so many is never trained on, chosen by the hash of its name."""
_NOT_TEXT = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
# The default prose of all studies, which no control may have seen.
_NOT_TEXT |= {"pydoc_data"}


@dataclass(frozen=True)
class Source:
    """The files of one package, and what identifies them.

    Attributes
    ----------
    name, version : str
    trained, held_out : tuple of str
        Texts of its files, sorted by path.
    sha256 : str
        Over the names and contents of all of them.
    """

    name: str
    version: str
    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    sha256: str

    def facts(self) -> dict[str, Any]:
        """Its line of the manifest."""
        characters = sum(map(len, self.trained))
        return {
            "name": self.name, "version": self.version, "files": len(self.trained), "held_out": len(self.held_out),
            "characters": characters, "sha256": self.sha256,
        }  # fmt: skip


def sources() -> list[Source]:
    """Everything there is to train on, in a fixed order."""
    folders = {STANDARD: (Path(sysconfig.get_paths()["stdlib"]), platform.python_version())}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise BadInput(f"the controls are trained on the sources of {name}, which is not installed")
        folders[name] = (Path(spec.submodule_search_locations[0]), importlib.metadata.version(name))
    return [_source(name, folder, version) for name, (folder, version) in folders.items()]


def manifest(found: list[Source]) -> dict[str, Any]:
    """What was trained on, to compare with what another machine has."""
    return {"sources": [source.facts() for source in found]}


def differences(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """The sources that are not the recorded ones, in words."""
    here = {s["name"]: s for s in found["sources"]}
    there = {s["name"]: s for s in recorded["sources"]}
    return [
        f"{name} {here[name]['version'] if name in here else 'missing'} (recorded: {source['version']})"
        for name, source in there.items()
        if name not in here or here[name]["sha256"] != source["sha256"]
    ]


def shuffled(texts: list[str]) -> list[str]:
    """The texts of all packages among each other, in an order that is the same everywhere."""
    return random.Random(0).sample(texts, len(texts))


def write_manifest(folder: Path, found: list[Source]) -> None:
    write_atomic(folder / MANIFEST, json.dumps(manifest(found), indent=2) + "\n")


def _source(name: str, folder: Path, version: str) -> Source:
    files = dict(_files(folder))
    digest = hashlib.sha256()
    for path, text in files.items():
        digest.update(f"{path} {hashlib.sha256(text.encode()).hexdigest()}\n".encode())
    held = {path: text for path, text in files.items() if _fraction(f"{name}/{path}") == 0}
    trained = tuple(text for path, text in files.items() if path not in held)
    return Source(name, version, trained, tuple(held.values()), digest.hexdigest())


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.py"), key=lambda p: p.relative_to(folder).as_posix()):
        inside = path.relative_to(folder)
        if _NOT_TEXT.isdisjoint(inside.parts) and not any(part.startswith("config-") for part in inside.parts):
            text = path.read_bytes().decode("utf-8", errors="ignore")
            if text.strip():
                yield inside.as_posix(), text


def _fraction(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % HELD_OUT
