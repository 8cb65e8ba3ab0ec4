"""SIGKILL at random moments of an audit, then ``--resume``: the same bytes as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from small import small

FEW = ["--size", "quick", "--texts", "3", "--tokens", "60"]
PATIENCE = 120.0
CELLS = [*(f"observe/trained/text-{i}" for i in range(3)), *(f"observe/random/seed-{i}" for i in range(3))]


def audit(arguments: list[str], log: str) -> None:
    """The command, in a process that was forked when everything was imported already: imports would be most of it."""
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    from rotoscope import cli

    sys.argv = ["rotoscope", "audit", *arguments]
    cli.main()


class Runs:
    """Starts audits of one tiny model."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = small(folder / "model")
        self._context = multiprocessing.get_context("forkserver")
        heavy = ["rotoscope.studies", "rotoscope.report", "transformers.models.llama.modeling_llama", "small"]
        self._context.set_forkserver_preload(heavy)

    def start(self, out: Path, *, resume: bool = False) -> ForkServerProcess:
        arguments = [str(self.model), "--out", str(out), *FEW, *(["--resume"] if resume else [])]
        process = self._context.Process(target=audit, args=(arguments, str(self.folder / "log")))
        process.start()
        return process

    def finish(self, out: Path, *, resume: bool = False) -> None:
        process = self.start(out, resume=resume)
        process.join(PATIENCE)
        assert process.exitcode == 0, (self.folder / "log").read_text()[-2000:]


def wait(until: Callable[[], bool], process: ForkServerProcess) -> None:
    end = time.monotonic() + PATIENCE
    while not until() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.002)


def finals(out: Path) -> dict[str, bytes]:
    """Every file under its final name; each must be whole."""
    found = {}
    for path in sorted(out.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(out).parts)
        if path.is_dir() or hidden:
            continue
        found[str(path.relative_to(out))] = path.read_bytes()
        if path.suffix == ".parquet":
            pd.read_parquet(path)
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            assert path.name == "report.html", path
            assert path.read_bytes().rstrip().endswith(b"</html>")
    return found


def tables(out: Path) -> dict[str, bytes]:
    """Every table but those that hold seconds."""
    timed = ("prefill.parquet", "depth_cost.parquet")
    return {name: data for name, data in finals(out).items() if name.endswith(".parquet") and not name.endswith(timed)}


def claims(out: Path) -> object:
    return json.loads((out / "summary.json").read_text())["claims"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("kills"))


def cells(out: Path) -> int:
    return sum((out / "cells" / name / "cell.json").exists() for name in CELLS)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> tuple[Path, list[float]]:
    """An undisturbed run, and the seconds that each of its stages took: every cell, then tables and report."""
    out, times = runs.folder / "whole", []
    process = runs.start(out)
    wait((out / "run.json").exists, process)
    for done in range(1, len(CELLS) + 1):
        times.append(time.monotonic())
        wait(lambda done=done: cells(out) >= done, process)  # type: ignore[misc]
    times.append(time.monotonic())
    process.join(PATIENCE)
    assert process.exitcode == 0, (runs.folder / "log").read_text()[-2000:]
    assert cells(out) == len(CELLS)
    return out, [float(x) for x in np.diff([*times, time.monotonic()])]


@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_audit_resumes_to_the_same_bytes(kills: int, runs: Runs, whole: tuple[Path, list[float]]) -> None:
    undisturbed, seconds = whole
    expected = tables(undisturbed)
    assert len([name for name in expected if name.startswith("tables/")]) >= 10
    rng = np.random.default_rng(kills)
    fell: list[int] = []
    for trial in range(3 * kills):  # a kill that comes when the run has ended is none, and is made up for
        out = runs.folder / f"{kills}-{trial}"
        stages = np.sort(rng.integers(0, len(CELLS) + 1, 2 if trial % 3 == 2 else 1))  # every third is killed twice
        for number, stage in enumerate(stages):
            process = runs.start(out, resume=number > 0)
            wait(lambda out=out, stage=stage: (out / "run.json").exists() and cells(out) >= stage, process)  # type: ignore[misc]
            time.sleep(rng.uniform(0, seconds[stage]))
            process.kill()
            process.join()
            finals(out)
            if process.exitcode == -signal.SIGKILL:
                fell.append(cells(out))
        runs.finish(out, resume=True)
        assert tables(out) == expected
        assert claims(out) == claims(undisturbed)
        assert not list(out.rglob(".*.tmp"))
        if len(fell) >= kills:
            break
    print(f"{len(fell)} kills fell inside a run, with {sorted(fell)} of {len(CELLS)} cells finished")
    assert len(fell) >= kills
    assert len(set(fell)) >= 3, "the kills all came at the same moment"
