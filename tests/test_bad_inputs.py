"""What users may get wrong: each gets one line that says what and how to mend it, or is simply handled."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import characters, small
from test_cli import refused, run
from tiny import tiny

import rotoscope as rs
from rotoscope import cli
from rotoscope.studies.arms import grid
from rotoscope.studies.options import Options
from rotoscope.tasks import find

pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer")

TINY = ["--size", "quick", "--texts", "1", "--tokens", "20"]


class Place:
    """A tiny model, a finished run of it, and a folder in which a case makes what it needs."""

    def __init__(self, tmp: Path, model: Path, finished: Path):
        self.tmp, self.model, self.finished = tmp, model, finished
        self.out = ["--out", tmp / "new", *TINY]

    def file(self, name: str, content: bytes | str) -> Path:
        path = self.tmp / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def text(self, content: bytes | str) -> list[Any]:
        """An audit of that text."""
        return ["audit", self.model, *self.out, "--text", self.file("text.txt", content)]

    def audit(self, *more: Any, model: Any = None) -> list[Any]:
        return ["audit", self.model if model is None else model, *self.out, *more]

    def copy(self, name: str = "changed") -> Path:
        return Path(shutil.copytree(self.model, self.tmp / name))

    def config(self, **changes: Any) -> list[Any]:
        """An audit of the model with another configuration."""
        folder = self.copy()
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return self.audit(model=folder)

    def replaced(self, name: str, content: bytes | str | None) -> list[Any]:
        """An audit of the model with one file changed, or without it."""
        folder = self.copy()
        (folder / name).unlink()
        if content is not None:
            self.file(f"changed/{name}", content)
        return self.audit(model=folder)

    def weights(self, change: Callable[[dict[str, torch.Tensor]], Any]) -> list[Any]:
        folder = self.copy()
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        return self.audit(model=folder)

    def sharded(self) -> list[Any]:
        """An audit of a model of two files, one of which is not there."""
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        folder = self.copy()
        held = list(load_file(folder / "model.safetensors").items())
        (folder / "model.safetensors").unlink()
        save_file(dict(held[::2]), folder / names[0], metadata={"format": "pt"})
        where = {name: names[i % 2] for i, (name, _) in enumerate(held)}
        self.file("changed/model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": where}))
        return self.audit(model=folder)

    def saved(self, family: str) -> list[Any]:
        tiny(family).save_pretrained(self.tmp / family)
        return self.audit(model=self.tmp / family)

    def run(self, name: str, content: bytes | str, command: str = "audit") -> list[Any]:
        """The finished run with one of its files changed, resumed or reported."""
        out = Path(shutil.copytree(self.finished, self.tmp / "run"))
        (out / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return ["report", out] if command == "report" else ["audit", self.model, "--out", out, "--resume", *TINY]

    def loop(self) -> Path:
        path = self.tmp / "loop"
        path.symlink_to(path)
        return path


def _half(held: dict[str, torch.Tensor]) -> None:
    for name in list(held)[::2]:
        del held[name]


def _nan(held: dict[str, torch.Tensor]) -> None:
    held["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan)


CELL = "cells/observe/trained/text-0"
Case = Callable[[Place], list[Any]]

# Each with a word that its line must hold.
REFUSED: dict[str, tuple[Case, str]] = {
    # the model's name
    "no such model": (lambda p: p.audit(model="no/such-model"), "no/such-model"),
    "no such folder": (lambda p: p.audit(model=p.tmp / "nowhere"), "nowhere"),
    "model is empty": (lambda p: p.audit(model=p.tmp), "holds no weights"),
    "model is no name at all": (lambda p: p.audit(model="a b/c?d"), "a b/c?d"),
    "model's name is too long": (lambda p: p.audit(model="m" * 5000), "mmm"),
    "model is a symlink loop": (lambda p: p.audit(model=p.loop()), "loop"),
    "model is a text": (lambda p: p.audit(model=p.file("short.txt", "text")), "short.txt"),
    "model is a device": (lambda p: p.audit(model="/dev/null"), "/dev/null"),
    "two models": (lambda p: p.audit("another"), "another"),
    # what the folder holds
    "encoder-decoder": (lambda p: p.saved("t5"), "encoder-decoder"),
    "encoder": (lambda p: p.saved("bert"), "is an encoder"),
    "config is no JSON": (lambda p: p.replaced("config.json", '{"model_type": "lla'), "config.json"),
    "config is a list": (lambda p: p.replaced("config.json", "[]"), "model_type"),
    "config is not UTF-8": (lambda p: p.replaced("config.json", b"\xff\xfe{}"), "config.json"),
    "config is missing": (lambda p: p.replaced("config.json", None), "config.json"),
    "model type unknown": (lambda p: p.config(model_type="frobnicate"), "frobnicate"),
    "config says no layers": (lambda p: p.config(num_hidden_layers=0), "layers"),
    "config of negative heads": (lambda p: p.config(num_attention_heads=-4), "changed"),
    "config of words": (lambda p: p.config(hidden_size="big"), "hidden_size"),
    "config of another width": (lambda p: p.config(hidden_size=128, head_dim=32), "changed"),
    "weights are missing": (lambda p: p.replaced("model.safetensors", None), "holds no weights"),
    "weights are cut short": (
        lambda p: p.replaced("model.safetensors", (p.model / "model.safetensors").read_bytes()[:20_000]), "changed"
    ),
    "weights are empty": (lambda p: p.replaced("model.safetensors", ""), "changed"),
    "weights lack tensors": (lambda p: p.weights(_half), "lacks the weights"),
    "weights are NaN": (lambda p: p.weights(_nan), "logits"),
    "shard is missing": (lambda p: p.sharded(), "model-00002-of-00002.safetensors"),
    "tokenizer is no JSON": (lambda p: p.replaced("tokenizer.json", "{"), "tokenizer"),
    "tokenizer has no vocabulary": (lambda p: p.replaced("tokenizer.json", None), "no tokenizer"),
    "tokenizer of a larger vocabulary": (
        lambda p: p.audit(model=small(p.tmp / "few", vocab_size=40)), "ids up to"
    ),
    # GGUF files
    "GGUF is cut short": (lambda p: p.audit(model=p.file("cut.gguf", b"GGUF" + bytes(40))), "cut.gguf"),
    "GGUF is text": (lambda p: p.audit(model=p.file("text.gguf", "GG")), "not a GGUF file"),
    "GGUF is missing": (lambda p: p.audit(model=p.tmp / "no.gguf"), "no such file"),
    # texts
    "text is empty": (lambda p: p.text(""), "0 tokens"),
    "text is blank": (lambda p: p.text(" \n\t "), "0 tokens"),
    "text is short": (lambda p: p.text("Fifteen letters"), "15 tokens"),
    "text is Latin-1": (lambda p: p.text("naïve".encode("latin-1")), "UTF-8"),
    "text is UTF-16": (lambda p: p.text(("words " * 20).encode("utf-16")), "UTF-8"),
    "text holds a lone surrogate": (lambda p: p.text(b"words " * 20 + b"\xed\xa0\x80"), "UTF-8"),
    "text is binary": (lambda p: p.text((p.model / "model.safetensors").read_bytes()), "UTF-8"),
    "text is missing": (lambda p: p.audit("--text", p.tmp / "no.txt"), "no.txt"),
    "text is a folder": (lambda p: p.audit("--text", p.tmp), "directory"),
    "text is a symlink loop": (lambda p: p.audit("--text", p.loop()), "loop"),
    "text is an endless device": (lambda p: p.audit("--text", "/dev/zero"), "/dev/zero"),
    # where results go
    "out is unwritable": (lambda p: ["audit", p.model, "--out", "/proc/none/out"], "/proc/none"),
    "out is a file": (lambda p: ["audit", p.model, "--out", p.file("file", "")], "file"),
    "out is below a file": (lambda p: ["audit", p.model, "--out", p.file("file", "") / "out"], "file"),
    "out exists": (lambda p: ["audit", p.model, "--out", p.model], "--resume"),
    "out is a symlink loop": (lambda p: ["audit", p.model, "--out", p.loop()], "loop"),
    "out is a device": (lambda p: ["audit", p.model, "--out", "/dev/null"], "/dev/null"),
    "out's name is too long": (lambda p: ["audit", p.model, "--out", p.tmp / ("o" * 300)], "too long"),
    # resumed runs
    "resumed as another command": (
        lambda p: ["massive", p.model, "--out", p.finished, "--resume", *TINY], "studies"
    ),
    "resumed with another seed": (
        lambda p: ["audit", p.model, "--out", p.finished, "--resume", "--seed", 3, *TINY], "seed"
    ),
    "resumed what is no run": (lambda p: ["audit", p.model, "--out", p.model, "--resume"], "no run to resume"),
    "run.json is cut short": (lambda p: p.run("run.json", "{"), "run.json cannot be read"),
    "run.json is a list": (lambda p: p.run("run.json", "[]"), "run.json cannot be read"),
    "run.json is binary": (lambda p: p.run("run.json", b"\xff\x00"), "run.json cannot be read"),
    "a cell's table is cut short": (lambda p: p.run(f"{CELL}/heads.parquet", b"PAR1"), "damaged"),
    "a cell's table is empty": (lambda p: p.run(f"{CELL}/heads.parquet", b""), "damaged"),
    "a cell's record is cut short": (lambda p: p.run(f"{CELL}/cell.json", "{"), "damaged"),
    "a cell's record is a list": (lambda p: p.run(f"{CELL}/cell.json", "[1]"), "damaged"),
    # reports
    "report of nothing": (lambda p: ["report", p.tmp / "nowhere"], "nowhere"),
    "report of a file": (lambda p: ["report", p.file("file", "")], "file"),
    "summary is cut short": (lambda p: p.run("summary.json", "{", "report"), "cannot be read"),
    "summary is a list": (lambda p: p.run("summary.json", "[]", "report"), "cannot be read"),
    "summary of another time": (lambda p: p.run("summary.json", '{"schema": 99}', "report"), "schema"),
    "a table is cut short": (lambda p: p.run("tables/heads.parquet", b"PAR1", "report"), "cannot be read"),
    # options
    "size": (lambda p: p.audit("--size", "huge"), "huge"),
    "seed below 0": (lambda p: p.audit("--seed", "-1"), "seed"),
    "seed beyond 32 bits": (lambda p: p.audit("--seed", "1" + "0" * 30), "seed"),
    "seed of too many digits": (lambda p: p.audit("--seed", "9" * 5000), "seed"),
    "seed is no number": (lambda p: p.audit("--seed", "x"), "seed"),
    "no texts": (lambda p: p.audit("--texts", "0"), "texts"),
    "half a text": (lambda p: p.audit("--texts", "1.5"), "texts"),
    "limit 0": (lambda p: p.audit("--limit", "0"), "limit"),
    "few tokens": (lambda p: p.audit("--tokens", "5"), "16"),
    "negative tokens": (lambda p: p.audit("--tokens", "-20"), "tokens"),
    "trained length 0": (lambda p: p.audit("--trained-length", "0"), "trained-length"),
    "trained length negative": (lambda p: p.audit("--trained-length", "-5"), "trained-length"),
    "trained length beyond all": (lambda p: p.audit("--trained-length", "1" + "0" * 30), "trained-length"),
    "dtype unknown": (lambda p: p.audit("--dtype", "float12"), "float12"),
    "dtype of integers": (lambda p: p.audit("--dtype", "int8"), "int8"),
    "dtype too narrow to compute in": (lambda p: p.audit("--dtype", "float8_e4m3fn"), "float8_e4m3fn"),
    "dtype is a class": (lambda p: p.audit("--dtype", "Tensor"), "Tensor"),
    "device unknown": (lambda p: p.audit("--device", "abacus"), "abacus"),
    "device is not there": (lambda p: p.audit("--device", "cuda:99"), "cuda:99"),
    "device without numbers": (lambda p: p.audit("--device", "meta"), "meta"),
    "device is empty": (lambda p: p.audit("--device", ""), "device"),
    "engine unknown": (lambda p: p.audit("--engine", "cloud"), "local"),
    "memory is a word": (lambda p: p.audit("--max-memory", "much"), "max-memory"),
    "memory is empty": (lambda p: p.audit("--max-memory", ""), "max-memory"),
    "memory holds no layer": (lambda p: p.audit("--max-memory", "1kB"), "does not hold one layer"),
    "no such command": (lambda p: ["divine"], "divine"),
    "no such option": (lambda p: p.audit("--divine"), "--divine"),
    # tasks
    "fewer than no examples": (lambda p: ["tasks", "arithmetic", "-n", "-1"], "--n"),
    "no task of that name": (lambda p: ["tasks", "capitols"], "capitols"),
    "disruption and none": (lambda p: p.audit("--disrupt", "none", "--disrupt", "top-2"), "none leaves the grid out"),
    # the doctor and the cache
    "estimate of nothing": (lambda p: ["doctor", p.tmp / "nowhere", "--estimate"], "nowhere"),
    "estimate of an encoder": (lambda p: ["doctor", *p.saved("bert")[1:2], "--estimate"], "is an encoder"),
    "estimate of a broken config": (
        lambda p: ["doctor", *p.replaced("config.json", "{")[1:2], "--estimate"], "config.json"
    ),
    "estimate in integers": (lambda p: ["doctor", p.model, "--estimate", "--dtype", "int8"], "int8"),
    "doctor of nothing": (lambda p: ["doctor", p.tmp / "nowhere"], "nowhere"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    done = run("audit", model, "--out", out, *TINY)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def place(tmp_path: Path, model: Path, finished: Path) -> Place:
    return Place(tmp_path, model, finished)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_line_and_exit_2(
    case: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, word = REFUSED[case]
    arguments = make(place)
    capsys.readouterr()
    line = refused(monkeypatch, capsys, *arguments)
    assert word in line
    assert len(line) < 1000
    assert not list(place.tmp.glob("new/summary.json"))


@pytest.mark.parametrize(
    "case",
    [
        "no such model",
        "encoder-decoder",
        "out is unwritable",
        "text is binary",
        "weights are cut short",
        "seed is no number",
    ],
)
def test_bad_input_in_a_process_of_its_own(case: str, place: Place) -> None:
    done = run(*REFUSED[case][0](place))
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)


def handled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """What a command prints that goes well."""
    monkeypatch.setattr(sys, "argv", ["rotoscope", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert not end.value.code, err
    return out


SCRIPT = "<script>alert(1)</script>"
PROSE = "Some words that are repeated, line by line.\n" * 30
TEXTS: dict[str, bytes] = {
    "emoji only": "🦊🚀".encode() * 50,
    "NUL bytes": b"words\0and\0zeros\0" * 20,
    "one megabyte on one line": b"abcdefghij" * 100_000,
    "a script": f"{SCRIPT} and words. ".encode() * 20,
    "right to left and combining": "שלום a\u0301\u200f\u202e ".encode() * 20,
}


@pytest.mark.parametrize("kind", TEXTS)
def test_odd_texts_are_read(
    kind: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = handled(monkeypatch, capsys, *place.text(TEXTS[kind]), "--json")
    assert json.loads(out)["provenance"]["tokens_per_text"] == 20
    kept = rs.read(place.tmp / "new").tables["texts"]
    assert kept.tokens.tolist() == [20]
    assert kept.start[0] == TEXTS[kind].decode()[:80]
    assert SCRIPT not in (place.tmp / "new/report.html").read_text()


@pytest.mark.parametrize("written", [b"\xef\xbb\xbf" + PROSE.encode(), PROSE.replace("\n", "\r\n").encode()])
def test_marks_of_other_systems_are_no_part_of_a_text(
    written: bytes, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("plain", PROSE.encode()), ("marked", written)):
        arguments = ["massive", place.model, "--out", place.tmp / name, *TINY, "--tokens", "100"]
        handled(monkeypatch, capsys, *arguments, "--text", place.file("text.txt", content))
    plain, marked = (rs.read(place.tmp / name).tables["texts"].sha256[0] for name in ("plain", "marked"))
    assert plain == marked


@pytest.mark.parametrize("name", [SCRIPT.replace("/", "∕"), "ünï cødé 模型", "a'b\"c$(d)"])
def test_odd_names_are_printed_as_they_are_and_harm_nothing(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = place.copy(name), place.tmp / f"out {name}"
    said = json.loads(handled(monkeypatch, capsys, "massive", folder, "--out", out, *TINY, "--json"))
    assert said == json.loads((out / "summary.json").read_text())
    assert said["model"].startswith(str(place.tmp))
    page = (out / "report.html").read_text()
    assert "<script>alert" not in page
    assert "ünï cødé 模型" in page or not name.startswith("ü")
    handled(monkeypatch, capsys, "massive", folder, "--out", out, *TINY, "--resume")
    handled(monkeypatch, capsys, "report", out)


def test_names_that_are_not_utf8_are_printed_somehow(place: Place) -> None:
    name = os.fsdecode(b"not utf-8 \xff")
    done = run("massive", place.model, "--out", place.tmp / name, *TINY)
    assert done.returncode == 0, done.stderr
    assert "not utf-8" in done.stdout
    refusal = run("massive", place.copy(f"model, {name}"), *place.out)
    assert refusal.returncode == 2
    assert re.fullmatch(r"error: [^\n]+UTF-8[^\n]*\n", refusal.stderr)


def test_large_numbers_end_where_the_text_and_the_model_end(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = place.file("text.txt", PROSE)
    large = ["--texts", 10**20, "--tokens", 10**20, "--limit", 10**20, "--max-memory", "999TB", "--size", "quick"]
    cells = json.loads(handled(monkeypatch, capsys, "audit", place.model, *large, "--text", text, "--plan", "--json"))
    trained = [cell["token_forwards"] for cell in cells if "trained" in cell["cell"]]
    assert trained == [128] * (len(PROSE) // 128)
    longer = ["--trained-length", 2 * 10**9, "--texts", 1, "--tokens", 200]
    handled(monkeypatch, capsys, "massive", place.model, *longer, "--text", text, "--out", place.tmp / "new")
    assert rs.read(place.tmp / "new").tables["texts"].tokens.tolist() == [200]


def test_a_cell_without_its_record_is_run_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = place.run(f"{CELL}/heads.parquet", b"half")
    (place.tmp / "run" / CELL / "cell.json").unlink()
    handled(monkeypatch, capsys, *arguments)
    for path in place.finished.rglob("*.parquet"):
        assert (place.tmp / "run" / path.relative_to(place.finished)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("content", ["{", "[]", "{}", None])
def test_a_damaged_cache_entry_is_listed_and_can_be_cleared(
    content: str | None, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROTOSCOPE_CACHE", str(place.tmp / "cache"))
    entry = place.tmp / "cache/models/abc-1"
    entry.mkdir(parents=True)
    if content is not None:
        (entry / "rotoscope.json").write_text(content)
    assert "damaged" in handled(monkeypatch, capsys, "cache")
    handled(monkeypatch, capsys, "cache", "--clear")
    assert not entry.exists()


@pytest.mark.parametrize("name", ["tasks", "disrupt"])
def test_names_given_in_python_may_be_one_or_a_list(name: str) -> None:
    for given in ("none", ["none"], ("none", "none"), {"none": 1}):
        assert getattr(Options(**{name: given}), name) == ("none",)
    assert grid(Options(disrupt=["none"])) is None  # type: ignore[arg-type]
    for wrong in (find("passkey"), [find("passkey")], [3], None):
        with pytest.raises(rs.BadInput, match=rf"{name} are texts such as '"):
            Options(**{name: wrong})  # type: ignore[arg-type]


def test_tokens_beyond_the_vocabulary_are_named(place: Place) -> None:
    lm = rs.wrap(tiny("llama", vocab_size=40), characters())
    with pytest.raises(rs.BadInput, match=r"ids up to \d+ .* 40"):
        rs.studies.massive.run(lm, size="quick", texts=1, tokens=20)
