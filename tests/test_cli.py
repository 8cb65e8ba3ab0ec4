"""The command line: one line and exit 2 for what a user can mend, JSON alone on stdout, runs that resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small import small
from typer.testing import CliRunner

import rotoscope as rs
from rotoscope import cli

FEW = ["--texts", "2", "--tokens", "60"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def audited(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "audit"
    done = run("audit", model, "--out", out, *FEW)
    assert done.returncode == 0, done.stderr
    assert f"report: {out / 'report.html'}" in done.stdout
    return out


def run(*arguments: Any, **extra: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "rotoscope.cli", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that a bad input gets, in this process."""
    monkeypatch.setattr(sys, "argv", ["rotoscope", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert end.value.code == 2, err
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_an_audit_writes_report_tables_and_claims(audited: Path) -> None:
    summary = json.loads((audited / "summary.json").read_text())
    assert {c["id"] for c in summary["claims"]} >= {"P1", "P2", "P3", "M1", "M2", "M3", "D4"}
    assert summary["provenance"]["command"].startswith("rotoscope audit")
    assert (audited / "report.html").stat().st_size > 500_000
    assert {"heads", "massive", "layers"} <= {p.stem for p in (audited / "tables").iterdir()}
    assert json.loads((audited / "run.json").read_text())
    assert rs.read(audited).tables["heads"].form1.notna().all()


def test_json_is_all_that_stands_on_stdout(model: Path, tmp_path: Path) -> None:
    done = run("massive", model, "--out", tmp_path / "m", "--size", "quick", "--json", *FEW)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "m/summary.json").read_text())


def test_a_report_is_rebuilt_from_tables(audited: Path) -> None:
    before = (audited / "report.html").read_text()
    (audited / "report.html").unlink()
    done = CliRunner().invoke(cli.app, ["report", str(audited)])
    assert done.exit_code == 0
    assert (audited / "report.html").read_text() == before


def test_an_existing_run_is_neither_lost_nor_mixed(
    audited: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in sorted(audited.rglob("*.parquet"))}
    assert "--resume" in refused(monkeypatch, capsys, "audit", model, "--out", audited, *FEW)
    line = refused(monkeypatch, capsys, "audit", model, "--out", audited, "--resume", "--seed", 3, *FEW)
    assert "seed" in line
    assert {p: p.read_bytes() for p in sorted(audited.rglob("*.parquet"))} == before
    resumed = run("audit", model, "--out", audited, "--resume", *FEW)
    assert resumed.returncode == 0
    assert {p: p.read_bytes() for p in sorted(audited.rglob("*.parquet"))} == before


def test_a_plan_runs_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["audit", str(model), "--plan", *FEW])
    assert done.exit_code == 0
    assert "19 cells" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_what_is_reached(model: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", str(model), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["model"] == str(model)
    assert [(row["qkv"], row["logits"], row["pre_rope"]) for row in found["layers"]] == [("exact",) * 3] * 3
    assert {row["verdict"] for row in found["checks"]} == {"exact", "rounding"}
    table = CliRunner().invoke(cli.app, ["doctor", str(small(tmp_path, "gpt2"))])
    assert table.exit_code == 0
    assert "- layers 0-2: learned positions" in table.stdout
    assert table.stdout.rstrip().endswith("exact here")
    assert max(map(len, table.stdout.splitlines())) <= 100 + len(str(tmp_path))


def test_doctor_exits_with_1_when_something_is_wrong(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rotoscope.model import tap as module

    attend = module._Wiring.attend

    def wrong(self: Any, layer: int, base: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = attend(self, layer, base, *args, **kwargs)
        return (out * 1.001 if layer == 2 else out), weights

    lm = rs.load(model)
    monkeypatch.setattr(module._Wiring, "attend", wrong)
    monkeypatch.setattr(cli, "_load", lambda *a, **k: lm)
    done = CliRunner().invoke(cli.app, ["doctor", "x"])
    assert done.exit_code == 1
    assert "! tapped = untouched [33 tokens]: off by" in done.stdout
    assert "something is wrong" in done.stdout
    told = CliRunner().invoke(cli.app, ["doctor", "x", "--json"])
    assert told.exit_code == 1
    assert any("tapped = untouched" in reason for reason in json.loads(told.stdout)["reasons"])


def test_help_waits_for_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['rotoscope', '--help']\nfrom rotoscope import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'numpy', 'altair', 'rich'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    for name in ("audit", "position", "massive", "depth", "tasks", "doctor", "report", "cache"):
        assert name in out


def test_interruption_keeps_what_is_finished_and_exits_with_130(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rotoscope.studies import observe

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(observe, "random_twin", interrupt)
    monkeypatch.setattr(sys, "argv", ["rotoscope", "audit", str(model), "--out", str(tmp_path / "r"), *FEW])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert "--resume" in capsys.readouterr().err
    assert len(list((tmp_path / "r/cells").rglob("cell.json"))) == 2
    assert not (tmp_path / "r/summary.json").exists()
