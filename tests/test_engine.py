"""The engine keeps finished work: through kills, full disks and interruptions, down to the byte."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rotoscope import engine as engine_module
from rotoscope import progress, results
from rotoscope.engine import Cell, Engine, plan
from rotoscope.errors import BadInput

CALLS: list[int] = []


def draw(lm: Any, *, seed: int, rows: int = 4, pause: float = 0.0) -> dict[str, pd.DataFrame]:
    CALLS.append(seed)
    time.sleep(pause)
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"layer": np.arange(rows, dtype=np.int32), "r": rng.normal(size=rows).astype(np.float32)})
    return {"values": table, "a_note": pd.DataFrame({"text": [f"cell {seed}"]}, index=[7])}


def nothing(lm: Any) -> dict[str, pd.DataFrame]:
    CALLS.append(-1)
    return {}


def name_of_model(lm: Any) -> dict[str, pd.DataFrame]:
    return {"model": pd.DataFrame({"name": [lm]})}


def stop(lm: Any, *, error: type[BaseException]) -> dict[str, pd.DataFrame]:
    raise error


def draws(count: int, **arguments: Any) -> list[Cell]:
    return [Cell(f"draw/text-{seed}", draw, {"seed": seed, **arguments}, cost=10.0) for seed in range(count)]


def tables_on_disk(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.parquet"))}


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


@pytest.mark.parametrize("in_memory", [False, True])
def test_run_returns_every_cell_s_tables_in_order(in_memory: bool, tmp_path: Path) -> None:
    cells = [*draws(2), Cell("empty", nothing, {}, 0.0), Cell("model", name_of_model, {}, 1.0)]
    with Engine(None if in_memory else tmp_path / "run", progress=False) as engine:
        found = engine.run("the model", cells)
    assert list(found) == ["draw/text-0", "draw/text-1", "empty", "model"]
    assert found["empty"] == {}
    assert found["model"]["model"]["name"].tolist() == ["the model"]
    assert list(found["draw/text-1"]) == ["values", "a_note"]
    expected = np.random.default_rng(1).normal(size=4).astype(np.float32)
    values = found["draw/text-1"]["values"]
    assert values.dtypes.tolist() == [np.int32, np.float32]
    np.testing.assert_array_equal(values["r"], expected)
    if not in_memory:
        on_disk = pd.read_parquet(BytesIO(tables_on_disk(tmp_path)["run/cells/draw/text-1/values.parquet"]))
        pd.testing.assert_frame_equal(on_disk, values)


def test_memory_and_disk_give_equal_tables(tmp_path: Path) -> None:
    kept, written = (Engine(out, progress=False).run(None, draws(2)) for out in (None, tmp_path / "run"))
    for name, tables in kept.items():
        for table, frame in tables.items():
            pd.testing.assert_frame_equal(frame, written[name][table])


def test_cells_of_one_name_run_once() -> None:
    found = Engine(None, progress=False).run(None, draws(2) + draws(3))
    assert CALLS == [0, 1, 2]
    assert len(found) == 3


@pytest.mark.parametrize(
    "cells",
    [
        [Cell("a", draw, {"seed": 0}, 1), Cell("a", draw, {"seed": 1}, 1)],
        [Cell("a", draw, {}, 1), Cell("a", nothing, {}, 1)],
        [Cell("a/b/c", nothing, {}, 1), Cell("a/b", draw, {"seed": 0}, 1)],
    ],
)
def test_cells_that_would_overwrite_each_other_are_a_mistake(cells: list[Cell]) -> None:
    with pytest.raises(ValueError, match=r"two different cells|is the folder of"):
        Engine(None, progress=False).run(None, cells)
    assert CALLS == []


@pytest.mark.parametrize("name", ["", "/a", "a//b", "../a", "a/..", ".a", "a b", "a\\b", "é"])
def test_cell_names_are_safe_paths(name: str) -> None:
    with pytest.raises(ValueError, match="cell name"):
        Cell(name, draw, {}, 1)


def test_cells_need_functions_that_other_processes_can_import() -> None:
    with pytest.raises(ValueError, match="module-level"):
        Cell("a", lambda lm: {}, {}, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_resume_skips_finished_cells_and_gives_the_same_bytes(error: type[BaseException], tmp_path: Path) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    three = draws(3)
    with Engine(stopped, progress=False) as engine, pytest.raises(error):
        engine.run(None, [*three[:2], Cell("stop", stop, {"error": error}, 1.0), three[2]])
    assert CALLS == [0, 1]
    with Engine(stopped, resume=True, progress=False) as engine:
        resumed = engine.run(None, three)
    assert CALLS == [0, 1, 2]
    with Engine(whole, progress=False) as engine:
        undisturbed = engine.run(None, three)
    assert tables_on_disk(stopped) == tables_on_disk(whole)
    assert len(tables_on_disk(whole)) == 6
    for name in undisturbed:
        pd.testing.assert_frame_equal(resumed[name]["values"], undisturbed[name]["values"])


def test_an_interruption_while_writing_leaves_no_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with Engine(out, progress=False) as engine:
        engine.run(None, draws(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: stop(None, error=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.run(None, draws(2))
    assert [path.name for path in (out / "cells" / "draw").iterdir()] == ["text-0"]


def test_what_a_killed_run_left_half_written_is_cleared(tmp_path: Path) -> None:
    with Engine(tmp_path, progress=False) as engine:
        engine.run(None, draws(1))
    half = tmp_path / "cells" / "draw" / ".text-1.tmp"
    half.mkdir()
    (half / "values.parquet").write_bytes(b"PAR1")
    (tmp_path / ".summary.json.1.tmp").write_text("{")
    with Engine(tmp_path, resume=True, progress=False) as engine:
        assert len(engine.run(None, draws(2))["draw/text-1"]["values"]) == 4
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_an_unwritable_out_is_bad_input(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"cannot write .*--out"):
        Engine(tmp_path / "file" / below)
    with pytest.raises(BadInput, match=r"cannot write .*--out"):
        Engine(Path("/proc/rotoscope") / below)


def test_an_existing_out_needs_resume(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Engine(tmp_path / "empty").close()
    with Engine(tmp_path / "run", progress=False) as engine:
        engine.run(None, draws(1))
    with pytest.raises(BadInput, match="exists; add --resume"):
        Engine(tmp_path / "run")
    Engine(tmp_path / "run", resume=True).close()
    Engine(tmp_path / "not-yet", resume=True).close()
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("")
    with pytest.raises(BadInput, match="no run to resume"):
        Engine(tmp_path / "papers", resume=True)
    assert os.listdir(tmp_path / "papers") == ["thesis.tex"]


def test_resume_with_another_fingerprint_names_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"model": "demo", "seed": 0, "texts": ("a", "b"), "dtype": np.float32(1)}
    with Engine(tmp_path, progress=False) as engine:
        engine.begin(asked)
        engine.run(None, draws(1))
    recorded = (tmp_path / "run.json").read_bytes()
    for change, named in [({"seed": 1}, "seed = 0, now it is 1"), ({"layers": 3}, "layers = None, now it is 3")]:
        with Engine(tmp_path, resume=True) as engine, pytest.raises(BadInput, match=named):
            engine.begin(asked | change)
    with Engine(tmp_path, resume=True) as engine, pytest.raises(BadInput, match="dtype"):
        engine.begin({key: value for key, value in asked.items() if key != "dtype"})
    with Engine(tmp_path, resume=True) as engine:
        engine.begin(asked)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "versions", lambda: {**results.versions(), "torch": "0.1"})
        with Engine(tmp_path, resume=True) as engine, pytest.raises(BadInput, match="torch version"):
            engine.begin(asked)
    assert (tmp_path / "run.json").read_bytes() == recorded


def test_a_damaged_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with Engine(tmp_path, progress=False) as engine:
        engine.run(None, draws(1))
    table = tmp_path / "cells" / "draw" / "text-0" / "values.parquet"
    table.write_bytes(table.read_bytes()[:50])
    with (
        Engine(tmp_path, resume=True, progress=False) as engine,
        pytest.raises(BadInput, match=r"text-0.*damaged.*delete"),
    ):
        engine.run(None, draws(1))
    (tmp_path / "run.json").write_text("{")
    with Engine(tmp_path, resume=True) as engine, pytest.raises(BadInput, match=r"run.json cannot be read"):
        engine.begin({})


def test_two_runs_into_one_directory_are_refused(tmp_path: Path) -> None:
    with Engine(tmp_path), pytest.raises(BadInput, match="another run"):
        Engine(tmp_path, resume=True)
    Engine(tmp_path, resume=True).close()


KILLED = 50
ARGUMENTS = {"rows": 20_000, "pause": 0.01}


def test_sigkill_at_any_moment_loses_no_finished_cell(tmp_path: Path) -> None:
    out, whole = tmp_path / "killed", tmp_path / "whole"
    rng = np.random.default_rng(0)
    done: set[Path] = set()
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, __file__, str(out)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(BadInput, match="another run"):
            Engine(out, resume=True)
        names = [out / "cells" / cell.name / "cell.json" for cell in draws(KILLED)]
        while sum(name.exists() for name in names) <= len(done):  # how fast it is depends on who else works here
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        finished = {path.parent for path in out.rglob("cell.json") if not path.parent.name.startswith(".")}
        assert finished >= done
        for path in finished:
            assert sorted(os.listdir(path)) == ["a_note.parquet", "cell.json", "values.parquet"]
            assert len(pd.read_parquet(path / "values.parquet")) == ARGUMENTS["rows"]
        done = finished
    assert 0 < len(done) < KILLED
    with Engine(out, resume=True, progress=False) as engine:
        resumed = engine.run(None, draws(KILLED, **ARGUMENTS))
    assert len(CALLS) == KILLED - len(done)
    with Engine(whole, progress=False) as engine:
        undisturbed = engine.run(None, draws(KILLED, **ARGUMENTS))
    assert tables_on_disk(out) == tables_on_disk(whole)
    for name, tables in undisturbed.items():
        pd.testing.assert_frame_equal(resumed[name]["values"], tables["values"])


def test_plan_lists_each_cell_once_and_touches_nothing() -> None:
    class Parameter:
        def numel(self) -> int:
            return 270_000_000

    class Model:
        def parameters(self) -> list[Parameter]:
            return [Parameter()]

    class LM:
        model = Model()

    demo, twice_as_large = plan(draws(2) + draws(1)), plan(draws(2), LM())
    assert demo["cell"].tolist() == ["draw/text-0", "draw/text-1"]
    assert demo["token_forwards"].tolist() == [10, 10]
    np.testing.assert_allclose(twice_as_large["seconds"], 2 * demo["seconds"])
    assert CALLS == []


def test_progress_is_on_stderr_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Engine(tmp_path / "run").run(None, draws(3))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(part in shown.err for part in ("draw/text-2", "100 %", "left"))
    Engine(None, progress=False).run(None, draws(3))
    assert capsys.readouterr().err == ""


def test_time_left_follows_the_pace_of_finished_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    clock = progress.Clock(pace=2.0, remaining=30)
    assert clock.left() == 60
    clock.start(10)
    now[0] += 5
    assert clock.left() == 55
    now[0] += 25
    assert clock.left() == 40  # overran its 20 s; the 20 units after it still take 40 s
    clock.finish()
    assert clock.left() == 60  # 30 s for 10 units, 20 units left
    clock.start(20)
    now[0] += 60
    clock.finish()
    assert clock.left() == 0


if __name__ == "__main__":
    with Engine(Path(sys.argv[1]), resume=True, progress=False) as child_engine:
        print("ready", flush=True)
        child_engine.run(None, draws(KILLED, **ARGUMENTS))
