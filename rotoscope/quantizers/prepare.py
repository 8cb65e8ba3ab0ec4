"""Quantized checkpoints by libraries that need an environment of their own: the commands, printed and run."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from rotoscope.errors import BadInput, Refused, RotoscopeError

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

METHODS = ("gptq",)
"""What can be prepared."""
PINS = ("llmcompressor==0.14.0.1", "transformers==5.17.0", "torch==2.13.0")
"""What the environment gets: versions that are known to work together."""
SAMPLES, TOKENS = 16, 256
_CALIBRATED_ON = 0.8
_MODEL, _CALIBRATION, _ENVIRONMENT = "model", "calibration.json", "environment"


@dataclass(frozen=True)
class Command:
    """One step.

    Attributes
    ----------
    what
        What it does, in words.
    arguments
        The program and its arguments.
    """

    what: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.arguments)


def plan(
    method: str,
    model: str,
    out: str | PathLike[str],
    *,
    bits: int = 4,
    group: int = 64,
    symmetric: bool = False,
    samples: int = SAMPLES,
    tokens: int = TOKENS,
    text: str | PathLike[str] | None = None,
    revision: str | None = None,
) -> list[Command]:
    """The commands that make a quantized checkpoint of a model.

    They save the model and token ids to calibrate on, make an environment beside them, install llm-compressor in it,
    and quantize there. Nothing is run yet.

    Parameters
    ----------
    method : str
        ``gptq``.
    model : str
        As for `rotoscope.load`.
    out : str or path
        Directory for all of it.
    bits, group, symmetric
        The grid, as of `RTN`.
    samples, tokens : int
        Calibration texts and the length of each.
    text : str or path, optional
        A UTF-8 file that they are taken from: evenly spaced, from its first four fifths. By default the prose of
        ``pydoc_data.topics``.
    revision : str, optional
        Branch, tag or commit of a hub id.

    Returns
    -------
    list of Command

    Raises
    ------
    BadInput
        If there is no such method, a number is out of range, or the checkpoint is there already.
    """
    if method not in METHODS:
        raise BadInput(f"{method!r} cannot be prepared; what can is {', '.join(METHODS)}")
    if not 2 <= bits <= 8 or group < 1 or samples < 1 or tokens < 2:
        raise BadInput("bits are 2 to 8, group and samples 1 or more, tokens 2 or more")
    place, made = Path(out), checkpoint(method, out)
    if made.exists():
        raise BadInput(f"{made} is there already: use it, or prepare another in a new directory")
    environment = place / _ENVIRONMENT
    python = str(environment / "bin" / "python")
    save = [sys.executable, "-m", __name__, model, str(place)]
    save += ["--group", str(group), "--samples", str(samples), "--tokens", str(tokens)]
    save += [] if text is None else ["--text", str(text)]
    save += [] if revision is None else ["--revision", revision]
    script = Path(__file__).with_name(f"{method}_script.py")
    quantize = [python, str(script), str(place / _MODEL), str(place / _CALIBRATION), str(made)]
    quantize += ["--bits", str(bits), "--group", str(group), *(["--symmetric"] if symmetric else [])]
    return [
        Command("save the model and texts to calibrate on", tuple(save)),
        Command("make an environment", (sys.executable, "-m", "venv", str(environment))),
        Command("install llm-compressor in it", (python, "-m", "pip", "install", *PINS)),
        Command(f"quantize by {method.upper()}", tuple(quantize)),
    ]


def checkpoint(method: str, out: str | PathLike[str]) -> Path:
    """Where the commands leave the checkpoint, for `rotoscope.quantizers.checkpoint.load`."""
    return Path(out) / method


def run(commands: Sequence[Command], yes: bool = False) -> None:
    """Print commands, each under a comment that says what it does, and run them if told so.

    What they print themselves goes to stderr.

    Parameters
    ----------
    commands : sequence of Command
        What `plan` returned.
    yes : bool
        Whether to run them, too, each right after it is printed.

    Raises
    ------
    BadInput
        If one fails; those after it are not run.
    """
    for command in commands:
        print(f"# {command.what}\n{command}", flush=True)
        if yes and (code := subprocess.run(command.arguments, stdout=sys.stderr).returncode):
            raise BadInput(f"to {command.what} failed with exit code {code}: what it printed says why; then try again")


def save(lm: LM, out: str | PathLike[str], texts: Sequence[Sequence[int]], group: int = 64) -> None:
    """Write a model in hand, and token ids to calibrate on, for the commands after the first.

    Parameters
    ----------
    lm : LM
        The model, of a class of transformers, with its tokenizer.
    out : str or path
        As for `plan`.
    texts : sequence of sequences of int
        Token ids.
    group : int
        The group that weights will be quantized in.

    Raises
    ------
    BadInput
        If groups do not divide the inputs of a layer, or there are no texts.
    Refused
        If llm-compressor could not load the model: its class is not one of transformers, or it is quantized already.
    """
    from rotoscope.quantizers.base import check_group, linear_layers

    if not type(lm.model).__module__.startswith("transformers."):
        raise Refused(f"{lm.source} is no model of transformers itself, so that llm-compressor cannot load it")
    if getattr(lm.model, "is_quantized", False):
        raise Refused(f"{lm.source} is quantized already: give the model as it was before")
    check_group(group, list(linear_layers(lm)))
    if not texts or not all(texts):
        raise BadInput("there is no text to calibrate on: give a longer one")
    folder = Path(out)
    lm.model.save_pretrained(folder / _MODEL)
    lm.tokenizer.save_pretrained(folder / _MODEL)
    (folder / _CALIBRATION).write_text(json.dumps([list(map(int, text)) for text in texts]), encoding="utf-8")


def spread(ids: Sequence[int], samples: int = SAMPLES, tokens: int = TOKENS) -> list[list[int]]:
    """Evenly spaced stretches of a text's first four fifths; the rest is free to be measured on.

    Parameters
    ----------
    ids : sequence of int
        The text.
    samples, tokens : int
        How many, and how long.

    Raises
    ------
    BadInput
        If they do not fit in.
    """
    step = int(_CALIBRATED_ON * len(ids)) // samples
    if step < tokens:
        raise BadInput(f"four fifths of {len(ids):,} tokens hold no {samples} texts of {tokens}: give a longer text")
    return [list(ids[i * step : i * step + tokens]) for i in range(samples)]


def prose() -> str:
    """The text that is calibrated on by default: English that is on every machine."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def main() -> None:
    """The first of the commands."""
    parser = argparse.ArgumentParser(description="Save a model and texts for quantization in another environment.")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--revision")
    given = parser.parse_args()

    from rotoscope.model.loading import load
    from rotoscope.model.quiet import quiet

    try:
        lm = load(given.model, dtype="auto", revision=given.revision)
        text = prose() if given.text is None else given.text.read_text(encoding="utf-8")
        with quiet():
            save(lm, given.out, spread(lm.encode(text).tolist(), given.samples, given.tokens), given.group)
    except (RotoscopeError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
