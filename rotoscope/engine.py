"""Runs named cells of work: each finished cell is kept, so that a stopped run goes on where it was.

What a cell returned is always read back from Parquet, so that a resumed run goes on with the same bytes as an
undisturbed one.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, Self

import pandas as pd
from filelock import FileLock, Timeout

from rotoscope.errors import BadInput, Refused
from rotoscope.progress import Bar
from rotoscope.results import SCHEMA, parquet_bytes, plain, versions, write_atomic, write_through, writing

Tables = dict[str, pd.DataFrame]

# Measured with the demo model on two idle cores; other models scale with their parameters. It serves `plan`, and the
# time left until a first cell has finished.
_SECONDS_PER_TOKEN = 270 / 160_000
_DEMO_PARAMETERS = 135e6

_NAME = re.compile(r"\w[\w.+=-]*", re.ASCII)
_DONE = "cell.json"

REFUSED = "refused"
"""The one table, with the column reason, of an optional cell that could not be run."""


@dataclass(frozen=True)
class Cell:
    """One piece of work that is done whole or not at all.

    Attributes
    ----------
    name
        Unique path-like name, for example "observe/trained/text-0". Cells of one name are the same work and run once.
    function
        A module-level function, called as `function(lm, **arguments)`, that returns its tables by name (possibly none).
        All its randomness comes from its arguments.
    arguments
        Plain values, so that they compare and can travel to another process.
    cost
        Token-forwards, for `plan` and the progress bar.
    at_once
        How much of its work (layers, rows of a batch) the function takes at once, which costs memory and changes no
        result. It is passed on as the argument of that name, and halved whenever memory runs out.
    optional
        The run goes on without it where the function raises `Refused` or its memory does not suffice: its only table
        is then `REFUSED`. Resuming tries it again.
    """

    name: str
    function: Callable[..., Tables]
    arguments: Mapping[str, Any]
    cost: float
    at_once: int | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if not all(_NAME.fullmatch(part) for part in self.name.split("/")):
            raise ValueError(f"{self.name!r} is no cell name: letters, digits and _.+=- in parts joined by /")
        if "<" in getattr(self.function, "__qualname__", "<"):
            raise ValueError(f"cell {self.name!r} needs a module-level function, got {self.function!r}")

    def run(self, lm: Any) -> Tables:
        """What the function returns."""
        at_once = {} if self.at_once is None else {"at_once": self.at_once}
        return self.function(lm, **self.arguments, **at_once)

    def smaller(self) -> Cell | None:
        """The same work with half as much at once; None where that is not possible."""
        return None if self.at_once in (None, 1) else replace(self, at_once=self.at_once // 2)


def plan(cells: Sequence[Cell], lm: Any = None) -> pd.DataFrame:
    """What `Engine.run` would do: one row per cell with columns cell, token_forwards, seconds (estimated).

    Without `lm` the time is that of the demo model. Nothing is run or written.
    """
    pace = _pace(lm)
    rows = [(cell.name, cell.cost, cell.cost * pace) for cell in _unique(cells)]
    return pd.DataFrame(rows, columns=["cell", "token_forwards", "seconds"])


class Engine:
    """Runs cells into a directory, or in memory.

    Use it as a context manager, or call `close`: the directory is locked against a second run until then. The lock
    is the operating system's, so a killed run leaves none behind.

    Parameters
    ----------
    out
        Where `run.json` and `cells/` are written; None keeps everything in memory.
    resume
        Go on with what `out` holds. Otherwise `out` must be new or empty.
    progress
        Show one progress bar on stderr.

    Attributes
    ----------
    decisions
        What the cells that ran or were read back had to do without, each with its reason; for `Result.decisions`.

    Raises
    ------
    BadInput
        If `out` exists and `resume` is off, is no run, cannot be written, or is in use by another run.
    """

    def __init__(self, out: Path | str | None, *, resume: bool = False, progress: bool = True) -> None:
        self.out = None if out is None else Path(out)
        self._progress = progress
        self.decisions: list[dict[str, str]] = []
        self._begun = False
        self._fits: dict[Callable[..., Tables], int] = {}
        self._lock: FileLock | None = None
        self._store: _Store = _Memory()
        if self.out is not None:
            self._lock = _claim(self.out, resume)
            self._store = _Directory(self.out / "cells")

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Record the arguments that determine results in `run.json`, or compare them with those recorded there.

        Versions of rotoscope and of what computes its numbers are added. Call it before `run`.

        Raises
        ------
        BadInput
            If `out` was begun with another fingerprint; the message names the first key that differs.
        """
        self._begun = True
        if self.out is None:
            return
        path = self.out / "run.json"
        now = plain({**fingerprint, **{f"{name} version": version for name, version in versions().items()}})
        if not path.exists():
            write_atomic(path, json.dumps({"schema": SCHEMA, "fingerprint": now}, indent=2) + "\n")
            return
        try:
            then = json.loads(path.read_text("utf-8"))["fingerprint"]
            changed = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f"{path} cannot be read; choose another --out") from None
        if changed:
            key = changed[0]
            raise BadInput(
                f"{self.out} was begun with {key} = {_short(then.get(key))}, now it is {_short(now.get(key))}; "
                "use the same or choose another --out"
            )

    def run(self, lm: Any, cells: Sequence[Cell]) -> dict[str, Tables]:
        """Run the cells that are not finished yet, in order; return the tables of all, by cell name.

        Parameters
        ----------
        lm
            The model, handed to each cell's function as it is.

        Raises
        ------
        ValueError
            If two different cells share a name, or a name is the folder of another.
        BadInput
            If a cell cannot be written, or its memory does not suffice however little it takes at once. Cells finished
            before are kept, also when anything else is raised.
        """
        cells = _unique(cells)
        if not self._begun:
            self.begin({})
        waiting = [cell for cell in cells if not self._store.has(cell.name)]
        total, remaining = (sum(cell.cost for cell in some) for some in (cells, waiting))
        shown = self._progress and bool(waiting)
        refused: dict[str, Tables] = {}
        with Bar(total=total, remaining=remaining, pace=_pace(lm), shown=shown) as bar:
            for cell in waiting:
                try:
                    self._store.put(cell.name, self._files(lm, cell, bar))
                except Refused as error:
                    if not cell.optional:
                        raise
                    bar.say(f"{cell.name} is left out: {error}")
                    self._decide(f"{cell.name} is left out", str(error))
                    refused[cell.name] = {REFUSED: pd.DataFrame({"reason": [str(error)]})}
                bar.finish()
        return {cell.name: refused.get(cell.name) or self._read(cell.name) for cell in cells}

    def _files(self, lm: Any, cell: Cell, bar: Bar) -> dict[str, bytes]:
        """The files of one cell, run with as much at once as memory allows."""
        asked = cell.at_once
        fits = self._fits.get(cell.function, asked)  # what was too much for one cell is too much for the next
        if asked is not None and fits is not None and fits < asked:
            cell = replace(cell, at_once=fits)
        while True:
            bar.start(cell.name, cell.cost)
            started = perf_counter()
            try:
                return _to_files(cell, cell.run(lm), perf_counter() - started, asked)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            smaller = cell.smaller()  # outside the handler, whose traceback holds on to what the cell had allocated
            if smaller is None:
                raise (Refused if cell.optional else BadInput)(
                    f"{cell.name} needs more memory than there is, however little it takes at once; finished cells are "
                    "kept: free some memory and add --resume, or use a smaller --dtype or fewer --tokens"
                )
            cell = smaller
            assert cell.at_once is not None
            self._fits[cell.function] = cell.at_once
            bar.say(f"{cell.name}: out of memory, going on with {cell.at_once} at once")
            _release()

    def _read(self, name: str) -> Tables:
        try:
            files = self._store.get(name)
            done = json.loads(files[_DONE])
            tables = {table: pd.read_parquet(BytesIO(files[f"{table}.parquet"])) for table in done["tables"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"cell {name} of {self.out} is damaged ({type(error).__name__}); delete its folder and add --resume"
            ) from error
        if "asked_at_once" in done:
            self._decide(f"{name}: {done['at_once']} at once, not {done['asked_at_once']}", "out of memory")
        return tables

    def _decide(self, decision: str, reason: str) -> None:
        entry = {"decision": decision, "reason": reason}
        if entry not in self.decisions:
            self.decisions.append(entry)

    def close(self) -> None:
        """Let other runs use the directory."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, numpy's, or torch's on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return any(said in text for said in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "_status_alloc_failed")


def _release() -> None:
    """Give back what a failed attempt had allocated."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _claim(out: Path, resume: bool) -> FileLock:
    """Make and lock the directory of a run, and clear away what a killed run left half-written."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        held = [path.name for path in out.iterdir() if path.name != ".lock" and not _is_temporary(path)]
        if held and not resume:
            raise BadInput(f"{out} exists; add --resume to continue it or choose another --out")
        if held and "run.json" not in held:
            raise BadInput(f"{out} holds no run to resume; choose another --out")
        lock = FileLock(out / ".lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise BadInput(f"another run is writing into {out}; wait for it or choose another --out") from None
        for path in sorted(out.rglob(".*.tmp")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return lock


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.suffix == ".tmp"


class _Store(Protocol):
    """Keeps the files of finished cells."""

    def has(self, name: str) -> bool: ...

    def put(self, name: str, files: Mapping[str, bytes]) -> None: ...

    def get(self, name: str) -> Mapping[str, bytes]: ...


class _Memory:
    def __init__(self) -> None:
        self._cells: dict[str, Mapping[str, bytes]] = {}

    def has(self, name: str) -> bool:
        return name in self._cells

    def put(self, name: str, files: Mapping[str, bytes]) -> None:
        self._cells[name] = files

    def get(self, name: str) -> Mapping[str, bytes]:
        return self._cells[name]


class _Directory:
    """One directory per cell; it gets its final name when every file in it is on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, name: str) -> bool:
        return (self._root / name / _DONE).is_file()

    def put(self, name: str, files: Mapping[str, bytes]) -> None:
        final = self._root / name
        temporary = final.with_name(f".{final.name}.tmp")
        with writing(final, "finished cells are kept: make room or access, then add --resume"):
            try:
                temporary.mkdir(parents=True)
                for file, data in files.items():
                    write_through(temporary / file, data)
                if final.exists():  # damaged from outside: without its marker it does not count as finished
                    shutil.rmtree(final)
                os.replace(temporary, final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def get(self, name: str) -> Mapping[str, bytes]:
        return {path.name: path.read_bytes() for path in (self._root / name).iterdir()}


def _to_files(cell: Cell, tables: Tables, seconds: float, asked: int | None) -> dict[str, bytes]:
    bad = [name for name in tables if not _NAME.fullmatch(name)]
    if bad:
        raise ValueError(f"cell {cell.name!r} returned a table named {bad[0]!r}: letters, digits and _.+=- only")
    done = {"cell": cell.name, "tables": list(tables), "token_forwards": cell.cost, "seconds": round(seconds, 3)}
    if cell.at_once != asked:
        done |= {"at_once": cell.at_once, "asked_at_once": asked}
    files = {f"{name}.parquet": parquet_bytes(table) for name, table in tables.items()}
    return files | {_DONE: json.dumps(done).encode()}


def _unique(cells: Iterable[Cell]) -> list[Cell]:
    """Each name once, in order of first appearance."""
    known: dict[str, Cell] = {}
    for cell in cells:
        first = known.setdefault(cell.name, cell)
        if first.function is not cell.function or first.arguments != cell.arguments:
            raise ValueError(f"two different cells are named {cell.name!r}")
    for name in known:
        parts = name.split("/")
        folders = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        if clash := next((folder for folder in folders if folder in known), None):
            raise ValueError(f"cell {clash!r} is the folder of cell {name!r}")
    return list(known.values())


def _pace(lm: Any) -> float:
    """Expected seconds per token-forward."""
    model = getattr(lm, "model", None)
    if model is None:
        return _SECONDS_PER_TOKEN
    parameters: int = sum(parameter.numel() for parameter in model.parameters())
    return _SECONDS_PER_TOKEN * parameters / _DEMO_PARAMETERS


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
