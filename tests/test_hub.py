"""Hub ids, against a hub on this machine: what is fetched, what is refused before it is, what works offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny import tiny

import rotoscope as rs
from rotoscope.model.files import wanted

COMMIT = "0123456789abcdef0123456789abcdef01234567"

_LOAD = """
import json, sys, warnings
import rotoscope as rs
warnings.simplefilter("ignore")
for source in sys.argv[1:]:
    try:
        lm = rs.load(source)
        print(json.dumps([lm.source, lm.revision, len(lm.anatomy.layers)]))
    except rs.RotoscopeError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


class _Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download needs; `repositories` maps an id to its folder."""

    repositories: dict[str, Path]
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        for name, folder in self.repositories.items():
            files = sorted(path.name for path in folder.iterdir())
            if self.path.startswith(f"/api/models/{name}/tree/"):
                sizes = [(file, (folder / file).stat().st_size) for file in files]
                return self._json([{"type": "file", "path": f, "size": size, "oid": COMMIT} for f, size in sizes])
            if self.path.startswith(f"/api/models/{name}"):
                return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
            if self.path.startswith(f"/{name}/resolve/"):
                return self._answer(200, (folder / self.path.rsplit("/", 1)[1]).read_bytes())
        return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        described = {"Content-Length": str(len(body)), "ETag": f'"{hash(body):x}"', "X-Repo-Commit": COMMIT}
        for key, value in {**described, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, type[_Hub]]]:
    """Its address, and its handler, which knows two repositories and notes what it was asked."""
    good, pickled = tmp_path / "good", tmp_path / "pickled"
    tiny("llama").save_pretrained(good)
    (good / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    (good / "own.py").write_text("raise RuntimeError")
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"never read")

    class Handler(_Hub):
        repositories = {"team/good": good, "team/pickled": pickled}  # noqa: RUF012
        asked: list[str] = []  # noqa: RUF012

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    server.shutdown()
    server.server_close()
    thread.join()


def _loaded(home: Path, address: str, *sources: str) -> list[list[object]]:
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", _LOAD, *sources]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=home)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hub_ids(hub: tuple[str, type[_Hub]], tmp_path: Path) -> None:
    address, handler = hub
    home = tmp_path / "home"
    home.mkdir()
    good, pickled, absent = _loaded(home, address, "team/good", "team/pickled", "team/absent")
    assert good == ["team/good", COMMIT, 3]
    assert pickled[0] == "Refused"
    assert "pytorch_model.bin" in str(pickled[1])
    assert absent == ["BadInput", absent[1]]
    assert "no such model on the hub" in str(absent[1])
    fetched = {path.rsplit("/", 1)[1] for path in handler.asked if "/resolve/" in path}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}
    nobody = "http://127.0.0.1:9"
    assert _loaded(home, nobody, "team/good") == [good]


def test_hub_that_cannot_be_reached_is_told_quickly(tmp_path: Path) -> None:
    began = time.perf_counter()
    ((kind, message),) = _loaded(tmp_path, "http://127.0.0.1:9", "no/such-model")
    assert time.perf_counter() - began < 20
    assert kind == "BadInput"
    assert str(message).startswith("no/such-model: no such file or folder")
    assert "cannot be reached" in str(message)


@pytest.mark.parametrize("source", ["a b", "a/b/c", "owner/model:tag"])
def test_names_that_no_model_can_have(source: str) -> None:
    with pytest.raises(rs.BadInput, match="no hub id"):
        rs.load(source)


def test_what_is_fetched() -> None:
    names = ["config.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"]
    names += ["tokenizer.model", "vocab.txt", "chat_template.jinja"]
    rest = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors", "original/x.json"]
    code = ["modeling.py", "parts/rotary.py"]
    assert sorted(wanted(names + rest + code, "x", code=False)) == sorted(names)
    assert sorted(wanted(names + rest + code, "x", code=True)) == sorted(names + code)
