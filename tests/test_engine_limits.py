"""Where memory or the disk does not suffice: less is taken at once, or the run ends in a line and keeps its work."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_engine import CALLS, draw, draws, stop, tables_on_disk

from rotoscope.engine import REFUSED, Cell, Engine, out_of_memory
from rotoscope.errors import BadInput, Refused


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def rows(lm: Any, *, n: int, fits: int, error: Exception, at_once: int) -> dict[str, pd.DataFrame]:
    """Numbers made a few at a time, where no more than `fits` of them have room at once."""
    CALLS.append(at_once)
    parts = []
    for start in range(0, n, at_once):
        some = np.arange(start, min(n, start + at_once))
        if len(some) > fits:
            raise error
        parts.append(pd.DataFrame({"x": some / 7}))
    return {"rows": pd.concat(parts, ignore_index=True)}


def no_room(lm: Any, *, reason: str) -> dict[str, pd.DataFrame]:
    CALLS.append(0)
    raise Refused(reason)


def raised(call: Callable[[], Any]) -> Exception:
    """What is raised where there is really no room."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        call()
    return caught.value


CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.2 GiB is free"
)
SAID = {
    "cpu": raised(lambda: torch.empty(2**60, dtype=torch.uint8)),
    "numpy": raised(lambda: np.empty(2**59)),
    "python": MemoryError(),
    "cuda": torch.OutOfMemoryError(CUDA),
    "cuda driver": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1 GB)"),
}


@pytest.mark.parametrize("device", SAID)
def test_out_of_memory_halves_what_is_taken_at_once(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"n": 13, "fits": 3, "error": SAID[device]}
    cells = [Cell(f"rows/{i}", rows, arguments, 1.0, at_once=10) for i in range(2)]
    with Engine(tmp_path / "short", progress=False) as engine:
        engine.run(None, cells)
        assert CALLS == [10, 5, 2, 2]  # the second cell starts where the first one fitted
        err = capsys.readouterr().err
        assert err.splitlines() == [f"rows/0: out of memory, going on with {n} at once" for n in (5, 2)]
        decisions = engine.decisions
    assert decisions == [{"decision": f"rows/{i}: 2 at once, not 10", "reason": "out of memory"} for i in range(2)]
    with Engine(tmp_path / "roomy", progress=False) as engine:
        engine.run(None, [Cell(c.name, rows, {**arguments, "fits": 13}, 1.0, at_once=13) for c in cells])
        assert engine.decisions == []
    assert tables_on_disk(tmp_path / "short") == tables_on_disk(tmp_path / "roomy")
    with Engine(tmp_path / "short", resume=True, progress=False) as engine:
        engine.run(None, cells)
        assert engine.decisions == decisions


def test_what_does_not_fit_at_all_ends_in_one_line_with_finished_cells_kept(tmp_path: Path) -> None:
    large = Cell("large", rows, {"n": 4, "fits": 0, "error": SAID["cpu"]}, 1.0, at_once=4)
    whole = Cell("whole", stop, {"error": MemoryError}, 1.0)
    for cell in (large, whole):
        out = tmp_path / cell.name
        with Engine(out, progress=False) as engine, pytest.raises(BadInput, match=r"more memory.*--resume") as refusal:
            engine.run(None, [*draws(1), cell])
        assert cell.name in str(refusal.value)
        assert [path.parent.name for path in out.rglob("cell.json")] == ["text-0"]
    assert CALLS == [0, 4, 2, 1, 0]


def test_other_errors_are_no_lack_of_memory(tmp_path: Path) -> None:
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory of mine")):
        cell = Cell("rows", rows, {"n": 4, "fits": 0, "error": error}, 1.0, at_once=4)
        with Engine(None, progress=False) as engine, pytest.raises(type(error)):
            engine.run(None, [cell])
    assert CALLS == [4, 4]
    assert not out_of_memory(RuntimeError("the memory format option is only supported by strided tensors"))


def test_an_optional_cell_that_cannot_run_is_left_out_and_tried_again(tmp_path: Path) -> None:
    cell = Cell("twin", no_room, {"reason": "needs 28 GB"}, 1.0, optional=True)
    huge = Cell("huge", rows, {"n": 4, "fits": 0, "error": MemoryError()}, 1.0, at_once=1, optional=True)
    with Engine(tmp_path, progress=False) as engine:
        found = engine.run(None, [cell, huge, *draws(1)])
        assert engine.decisions[0] == {"decision": "twin is left out", "reason": "needs 28 GB"}
    assert found["twin"][REFUSED].reason.tolist() == ["needs 28 GB"]
    assert "more memory" in found["huge"][REFUSED].reason[0]
    assert len(found["draw/text-0"]["values"]) == 4
    with Engine(tmp_path, resume=True, progress=False) as engine:
        engine.run(None, [cell, *draws(1)])
    assert CALLS == [0, 1, 0, 0]
    with Engine(None, progress=False) as engine, pytest.raises(Refused, match="28 GB"):
        engine.run(None, [Cell("twin", no_room, {"reason": "needs 28 GB"}, 1.0)])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_ends_in_one_line_with_finished_cells_kept(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes at whichever system call the disk chooses: making the folder, flushing, renaming."""
    for number, call in enumerate(["mkdir", "fsync", "replace"]):
        out = tmp_path / str(number)
        with Engine(out, progress=False) as engine:
            engine.run(None, draws(1))

            def refuse(*_: Any, **__: Any) -> None:
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse)
                with pytest.raises(BadInput, match=f"{os.strerror(code)}.*--resume") as refusal:
                    engine.run(None, draws(2))
            assert "\n" not in str(refusal.value)
        assert os.listdir(out / "cells" / "draw") == ["text-0"]
        with Engine(out, resume=True, progress=False) as engine:
            assert len(engine.run(None, draws(2))) == 2


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root mounts a small disk")
def test_a_disk_that_is_truly_full_or_read_only(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no mounts here")
    try:
        large = Cell("large", draw, {"seed": 1, "rows": 50_000}, 1.0)
        with Engine(disk / "run", progress=False) as engine, pytest.raises(BadInput, match=r"No space left.*--resume"):
            engine.run(None, [*draws(1), large])
        assert os.listdir(disk / "run" / "cells") == ["draw"]
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for out, resume in ((disk / "run", True), (disk / "new", False)):
            with pytest.raises(BadInput, match="Read-only file system"):
                Engine(out, resume=resume)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The operating system refuses to let a file grow beyond this many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_in_one_line_with_finished_cells_kept(tmp_path: Path) -> None:
    small, large = Cell("small", draw, {"seed": 0}, 1.0), Cell("large", draw, {"seed": 1, "rows": 50_000}, 1.0)
    with Engine(tmp_path, progress=False) as engine, largest_file(50_000), pytest.raises(BadInput) as refusal:
        engine.run(None, [small, large])
    assert "large" in str(refusal.value)
    assert "--resume" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert os.listdir(tmp_path / "cells") == ["small"]
    with Engine(tmp_path, resume=True, progress=False) as engine:
        engine.run(None, [small, large])
    assert CALLS == [0, 1, 1]
