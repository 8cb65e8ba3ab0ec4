"""The commands that prepare a quantized checkpoint, and what the first of them leaves."""

from __future__ import annotations

import argparse
import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rotoscope as rs
from rotoscope.errors import BadInput, Refused
from rotoscope.model import loading
from rotoscope.model.lm import LM
from rotoscope.quantizers import gptq_script, prepare
from rotoscope.quantizers.prepare import Command
from tests.tiny import tiny


class Tokenizer:
    """Bytes of a text, and a file that says that it was saved."""

    def __call__(self, text: str, return_tensors: str) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([[ord(letter) % 97 for letter in text]]))

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture(scope="module")
def lm() -> LM:
    return rs.wrap(tiny("llama", layers=2), Tokenizer(), source="tiny")


def test_the_commands_hand_on_what_each_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a folder"
    save, make, install, quantize = prepare.plan("gptq", "demo", out, bits=3, group=32, symmetric=True, samples=5)
    assert save.arguments[:5] == (sys.executable, "-m", "rotoscope.quantizers.prepare", "demo", str(out))
    assert save.arguments[5:] == ("--group", "32", "--samples", "5", "--tokens", "256")
    assert make.arguments == (sys.executable, "-m", "venv", str(out / "environment"))
    own = str(out / "environment" / "bin" / "python")
    assert install.arguments[:4] == (own, "-m", "pip", "install")
    assert "llmcompressor==0.14.0.1" in install.arguments
    assert quantize.arguments[0] == own
    assert shlex.split(str(quantize)) == list(quantize.arguments)
    # the script takes what it is given
    seen: dict[str, Any] = {}
    monkeypatch.setattr(sys, "argv", list(quantize.arguments[1:]))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", spy(argparse.ArgumentParser.parse_args, seen))
    with pytest.raises(Stop):
        gptq_script.main()
    folders = {"model": out / "model", "calibration": out / "calibration.json", "out": out / "gptq"}
    assert seen == {**folders, "bits": 3, "group": 32, "symmetric": True}
    assert prepare.checkpoint("gptq", out) == out / "gptq"


class Stop(Exception):
    pass


def spy(parse: Any, seen: dict[str, Any]) -> Any:
    def stop(self: argparse.ArgumentParser) -> None:
        seen.update(vars(parse(self)))
        raise Stop

    return stop


def test_the_script_runs_where_there_is_no_rotoscope() -> None:
    tree = ast.parse(Path(gptq_script.__file__).read_text())
    roots = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    roots |= {(n.module or ".").partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    there = {"transformers", "datasets", "llmcompressor", "compressed_tensors"}
    assert roots - set(sys.stdlib_module_names) == there
    helped = subprocess.run([sys.executable, "-I", gptq_script.__file__, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0
    assert "CALIBRATION" in helped.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "awq"}, "'awq' cannot be prepared; what can is gptq"),
        ({"bits": 1}, "bits are 2 to 8"),
        ({"group": 0}, "group and samples 1 or more"),
    ],
)
def test_what_cannot_be_planned(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        prepare.plan(**{"method": "gptq", "model": "demo", "out": tmp_path, **arguments})


def test_a_checkpoint_is_not_made_twice(tmp_path: Path) -> None:
    (tmp_path / "gptq").mkdir()
    with pytest.raises(BadInput, match="is there already"):
        prepare.plan("gptq", "demo", tmp_path)


def test_commands_are_printed_and_run_only_if_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "it ran"
    commands = [
        touch(file, "make a file"),
        Command("fail", (sys.executable, "-c", "print('why'); raise SystemExit(3)")),
        touch(tmp_path / "later", "go on"),
    ]
    prepare.run(commands)
    assert not file.exists()
    printed = capfd.readouterr()
    assert printed.out == "".join(f"# {c.what}\n{c}\n" for c in commands)
    with pytest.raises(BadInput, match="to fail failed with exit code 3"):
        prepare.run(commands, yes=True)
    assert [path.name for path in tmp_path.iterdir()] == ["it ran"]
    printed = capfd.readouterr()
    assert printed.err == "why\n"
    assert "why\n" not in printed.out.splitlines(keepends=True)


def touch(file: Path, what: str) -> Command:
    return Command(what, (sys.executable, "-c", f"import pathlib; pathlib.Path({str(file)!r}).touch()"))


def test_calibration_is_spread_and_leaves_a_fifth() -> None:
    texts = prepare.spread(range(1000), samples=4, tokens=50)
    assert texts == [list(range(start, start + 50)) for start in (0, 200, 400, 600)]
    assert prepare.spread(range(1000), samples=4, tokens=200)[-1][-1] == 799
    with pytest.raises(BadInput, match="hold no 4 texts of 201"):
        prepare.spread(range(1000), samples=4, tokens=201)


def test_what_is_saved_is_the_model(lm: LM, tmp_path: Path) -> None:
    prepare.save(lm, tmp_path, [[5, 6, 7], torch.tensor([8, 9]).tolist()], group=32)
    assert json.loads((tmp_path / "calibration.json").read_text()) == [[5, 6, 7], [8, 9]]
    assert (tmp_path / "model" / "tokenizer.json").exists()
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(3, 20)[None]
    assert torch.equal(again(ids).logits, lm.model(ids).logits)


def test_what_cannot_be_saved(lm: LM, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"groups of 64 do not divide the 96 inputs of .*down_proj; .* is 32"):
        prepare.save(lm, tmp_path, [[1, 2]], group=64)
    with pytest.raises(BadInput, match="no text to calibrate on"):
        prepare.save(lm, tmp_path, [], group=32)
    with pytest.raises(Refused, match="no model of transformers itself"):
        prepare.save(rs.load("control:rope"), tmp_path, [[1, 2]], group=32)
    assert not any(tmp_path.iterdir())


def test_the_first_command_says_in_one_line_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = prepare.plan("gptq", "control:rope", tmp_path / "out")[0]
    monkeypatch.setattr(sys, "argv", list(command.arguments[2:]))
    with pytest.raises(SystemExit, match="2"):
        prepare.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: control:rope is no model of transformers itself")


def test_the_first_command_writes_what_the_last_reads(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.write_text("ab" * 100, encoding="utf-8")
    save, _, _, quantize = prepare.plan(
        "gptq", "any", tmp_path / "out", group=32, samples=2, tokens=20, text=text, revision="main"
    )
    asked: dict[str, Any] = {}

    def load(model: str, **given: Any) -> LM:
        asked.update(model=model, **given)
        return lm

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(sys, "argv", list(save.arguments[2:]))
    prepare.main()
    assert asked == {"model": "any", "dtype": "auto", "revision": "main"}
    model, calibration = map(Path, quantize.arguments[2:4])
    assert (model / "model.safetensors").exists()
    assert json.loads(calibration.read_text()) == [[ord("a") % 97, ord("b") % 97] * 10] * 2
