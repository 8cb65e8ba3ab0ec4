"""README's examples run as they stand, and the commands it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rotoscope as rs
from rotoscope import cli

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run(example: str, demo: rs.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rs, "load", lambda source: demo)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["rs"] is rs


def test_commands_and_options_are_those_of_the_command_line() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"]).stdout
    for name in set(re.findall(r"^rotoscope (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^  {name} ", shown, re.MULTILINE), name
    options = CliRunner().invoke(cli.app, ["audit", "--help"]).stdout
    paragraph = README.split("`MODEL` is")[1].split("\n\n")[0]
    for option in set(re.findall(r"`(--[\w-]+)", paragraph)):
        assert option in options, option


def test_every_linked_page_exists() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
