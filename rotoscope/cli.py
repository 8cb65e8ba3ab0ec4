"""The command line: options in, studies run, files out. No logic lives here."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rotoscope.controls.commands import app as controls
from rotoscope.errors import BadInput, RotoscopeError

if TYPE_CHECKING:
    from rotoscope.model.lm import LM
    from rotoscope.studies import Options, Study

# The class that wrong options and arguments raise; its module differs between releases of typer.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    help="Traces what attention does in a decoder language model, layer by layer.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(controls, name="controls")

INTERRUPTED = 130

Model = Annotated[str, typer.Argument(help="demo, control:rope, a hub id, a folder, or a .gguf file.")]
Out = Annotated[Path | None, typer.Option(help="Directory for report, tables and claims [runs/COMMAND-MODEL].")]
Size = Annotated[str, typer.Option(help="quick, standard or full.")]
Seed = Annotated[int, typer.Option(help="Every random choice derives from it.")]
Limit = Annotated[int | None, typer.Option(help="At most this many texts, and items of each task.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in --out.")]
EngineName = Annotated[str, typer.Option("--engine", help="local.")]
Plan = Annotated[bool, typer.Option("--plan", help="Print cells, token-forwards and estimated time; run nothing.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="UTF-8 text to read in place of the default prose.")]
Texts = Annotated[int | None, typer.Option(help="Number of texts.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens of each text.")]
TaskSpecs = Annotated[
    list[str] | None,
    typer.Option(
        "--task", help="NAME[:PARAMETER=VALUE], NAME:FILE, jsonl:FILE or lm_eval:NAME in place of the size's tasks."
    ),
]
Disrupt = Annotated[
    list[str] | None,
    typer.Option(
        "--disrupt",
        help="An arm such as top-2:positions=all in place of those shown beside the judged ones; none: no disruption.",
    ),
]
Perturb = Annotated[
    bool, typer.Option("--perturb", help="Of the causal parts run this one: reordered text and shifted positions (P5).")
]
Replace = Annotated[bool, typer.Option("--replace", help="… the fit in place of the logits (P4).")]
Length = Annotated[bool, typer.Option("--length", help="… texts past the trained length (P6).")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method", help="A quantization such as kv-int4 or rtn:bits=4:group=32 in place of the size's own; none: none."
    ),
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option("--checkpoint", help="NAME=DIR: a quantized checkpoint of the same model, measured like a method."),
]
Prepare = Annotated[
    str | None,
    typer.Option(
        "--prepare", help="gptq: print the commands that make such a checkpoint in an environment of its own, in --out."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="With --prepare: run them.")]
MaxMemory = Annotated[
    str | None, typer.Option("--max-memory", help="What capture may take beside the model, such as 500MB or 2GB.")
]
Trained = Annotated[
    int | None, typer.Option("--trained-length", help="Tokens it was trained on, if not in its config.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout, and nothing else there.")]
EstimateOnly = Annotated[
    bool, typer.Option("--estimate", help="Load no weights; say what an audit would take in memory, and if it fits.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow a hub model to run its own code.")]


_ONLY = {
    "task": ("audit", "massive", "quantize", "depth"),
    "disrupt": ("audit", "massive"),
    **dict.fromkeys(("method", "checkpoint"), ("audit", "quantize")),
    **dict.fromkeys(("prepare", "yes"), ("quantize",)),
    **dict.fromkeys(("perturb", "replace", "length"), ("position",)),
}
"""The commands that have an option; all have those that are not named."""


def _study_command(name: str, help_text: str, default_size: str, study: str | None = None) -> None:
    """Register a command that runs one study, by default that of its name, or all of them."""

    def command(
        model: Model = "demo",
        out: Out = None,
        size: Size = default_size,
        seed: Seed = 0,
        limit: Limit = None,
        device: Device = None,
        dtype: Dtype = None,
        resume: Resume = False,
        engine: EngineName = "local",
        plan: Plan = False,
        text: TextFile = None,
        texts: Texts = None,
        tokens: Tokens = None,
        task: TaskSpecs = None,
        disrupt: Disrupt = None,
        perturb: Perturb = False,
        replace: Replace = False,
        length: Length = False,
        method: Methods = None,
        checkpoint: Checkpoints = None,
        prepare: Prepare = None,
        yes: Yes = False,
        max_memory: MaxMemory = None,
        trained_length: Trained = None,
        revision: Revision = None,
        trust_remote_code: Trust = False,
        as_json: Json = False,
    ) -> None:
        from rotoscope.studies import STUDIES, Options
        from rotoscope.studies.memory import parse_bytes
        from rotoscope.studies.options import PARTS

        if prepare or yes:
            _prepare(prepare, model, out, text, revision, yes)
            return
        if engine != "local":
            raise BadInput(f"engine {engine!r} is not available; use --engine local")
        bound = None if max_memory is None else parse_bytes(max_memory)
        parts = tuple(part for part in PARTS if {"perturb": perturb, "replace": replace, "length": length}[part])
        options = Options(
            size, seed, texts, tokens, limit, _read_text(text), bound, tuple(task or ()), tuple(disrupt or ()), parts,
            tuple(method or ()), tuple(checkpoint or ()),
        )  # fmt: skip
        chosen = list(STUDIES.values()) if name == "audit" else [STUDIES[study or name]]
        loading = {
            "device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code,
            "trained_length": trained_length,
        }  # fmt: skip
        if plan:
            _print_plan(chosen, _load(model, **loading), options, as_json)
            return
        _run(name, model, chosen, options, loading, out, resume, as_json)

    signature = inspect.signature(command, eval_str=True)
    kept = [p for p in signature.parameters.values() if name in _ONLY.get(p.name, (name,))]
    command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    command.__doc__ = help_text
    app.command(name)(command)


_study_command("audit", "Run all studies on a model and write the report.", "quick")
_study_command("position", "Are attention logits position + semantics? Claims P1-P6.", "standard")
_study_command(
    "massive", "Where do massive values sit in Q, K and V, and what breaks without them? Claims M1-M4.", "standard"
)
_study_command(
    "quantize",
    "Which quantization keeps contextual ability, and what protects it? Claim M6.",
    "standard",
    "quantization",
)
_study_command("depth", "From which layer on do earlier tokens stop mattering? Claims D1-D4.", "standard")


@app.command()
def doctor(
    model: Model = "demo",
    device: Device = None,
    dtype: Dtype = None,
    trained_length: Trained = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    estimate: EstimateOnly = False,
    as_json: Json = False,
) -> None:
    """Check that rotoscope is exact on a model; show what each layer is and what is reached. Exit 1 if it is not."""
    if estimate:
        _print_estimate(model, as_json, device=device, dtype=dtype, revision=revision)
        return
    from rotoscope.doctor import doctor as examine

    lm = _load(
        model, device=device, dtype=dtype, trained_length=trained_length, revision=revision,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    found = examine(lm)
    if as_json:
        typer.echo(json.dumps(found.summary(), indent=2))
    else:
        typer.echo(found.text())
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="A finished run.")]) -> None:
    """Rebuild the HTML report of a finished run from its tables."""
    from rotoscope.report import write
    from rotoscope.results import read

    typer.echo(f"report: {write(read(directory), directory / 'report.html')}")


@app.command("tasks")
def tasks_(
    name: Annotated[
        str | None, typer.Argument(help="Show examples of this task: NAME[:PARAMETER=VALUE], NAME:FILE.")
    ] = None,
    model: Annotated[str, typer.Option(help="Whose tokenizer counts the tokens of prompts.")] = "demo",
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of examples.")] = 3,
    seed: Seed = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Score a right and a wrong answer; exit 1 on a fault.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the tasks, show what one asks, or check that they tell right answers from wrong ones."""
    from rotoscope.tasks import TASKS, show

    data: list[dict[str, Any]]
    if check:
        lm = _load(model)
        rows = [row for task in ([name] if name else TASKS) for row in show.check(lm, task)]
        text, data = show.checked(rows), [row.summary() for row in rows]
    elif name:
        examples = show.samples(_load(model), name, n, seed)
        text, data = show.shown(examples), [vars(example) for example in examples]
    else:
        data = show.listing()
        text = show.listed(data)
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str) if as_json else text)
    if not all(row.get("ok", True) for row in data):
        raise typer.Exit(1)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all converted models.")] = False,
    as_json: Json = False,
) -> None:
    """Show the models converted from GGUF files and kept for the next run, or clear them."""
    from rotoscope.model import cache as kept

    entries = kept.entries()
    if clear:
        kept.clear()
    if as_json:
        rows = [{"name": e.name, "hash": e.hash, "bytes": e.bytes, "path": str(e.path)} for e in entries]
        typer.echo(json.dumps({"entries": rows, "cleared": clear}, indent=2))
        return
    for entry in entries:
        typer.echo(f"{entry.name}  {entry.hash[:12]}  {entry.bytes / 2**20:,.0f} MiB  {entry.path}")
    typer.echo(f"{len(entries)} converted models{', cleared' if clear else ''}")


def _load(model: str, **loading: Any) -> LM:
    from rotoscope.model.loading import load

    return load(model, **loading)


def _run(
    name: str, model: str, chosen: Sequence[Study], options: Options, loading: dict[str, Any], out: Path | None,
    resume: bool, as_json: bool,
) -> None:  # fmt: skip
    from rotoscope import terminal
    from rotoscope.engine import Engine
    from rotoscope.report import write
    from rotoscope.studies.conduct import conduct_in

    out = out or _default_out(name, model)
    with Engine(out, resume=resume) as engine:
        lm = _load(model, **loading)
        result = conduct_in(engine, chosen, lm, options, command=" ".join(["rotoscope", *sys.argv[1:]]))
        page = write(result, out / "report.html")
    if as_json:
        typer.echo(json.dumps(result.summary(), indent=2, ensure_ascii=False))
    else:
        terminal.show(result, page)


def _prepare(
    method: str | None, model: str, out: Path | None, text: Path | None, revision: str | None, yes: bool
) -> None:
    from rotoscope.quantizers import prepare

    if method is None:
        raise BadInput("--yes runs what --prepare prints: add --prepare gptq")
    folder = out or _default_out(method, model)
    prepare.run(prepare.plan(method, model, folder, text=text, revision=revision), yes)
    made = f"rotoscope quantize {model} --checkpoint {method}={prepare.checkpoint(method, folder)}"
    typer.echo(f"# then\n{made}" if yes else f"# to run these, add --yes; then\n{made}")


def _default_out(name: str, model: str) -> Path:
    return Path("runs") / f"{name}-{Path(model).name or 'model'}"


def _print_estimate(model: str, as_json: bool, **options: Any) -> None:
    from rotoscope.studies.estimate import estimate

    found = estimate(model, **options)
    typer.echo(json.dumps(found.summary(), indent=2) if as_json else "\n".join(found.lines()))


def _print_plan(chosen: Sequence[Study], lm: LM, options: Options, as_json: bool) -> None:
    from rotoscope.studies import plan

    cells = plan(chosen, lm, options)
    if as_json:
        typer.echo(cells.to_json(orient="records", indent=2))
        return
    typer.echo(cells.to_string(index=False, float_format=lambda x: f"{x:,.0f}"))
    typer.echo(f"{len(cells)} cells, {cells.token_forwards.sum():,.0f} token-forwards, {cells.seconds.sum():,.0f} s")


def _read_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        if path.is_char_device() or path.is_block_device():
            raise BadInput(f"{path} is a device without an end; give a text file with --text")
        return path.read_text("utf-8-sig")  # the mark that some editors put in front is no part of the text
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; give a text file with --text") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; convert it first") from None


def _quiet() -> None:
    """What optional packages say of their own kernels when they are imported is nothing that a user could mend here."""
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


def lm_eval() -> None:
    """Entry point of `rotoscope-lm-eval`: lm-eval's own command line, where the model `rotoscope` is known."""
    _quiet()
    from rotoscope.tasks.lm_eval import main

    main()


def main() -> None:
    """Entry point: one line and exit 2 for what a user can mend, 130 when interrupted."""
    # Threads that spin while they wait make every step many times slower on cores that others use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _quiet()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path, which need not be UTF-8, or a terminal that is not
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        code = app(standalone_mode=False)
    except RotoscopeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except _UsageError as error:
        typer.echo(f"error: {error.format_message()}; see rotoscope --help", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        typer.echo("interrupted: finished cells are kept; add --resume to go on", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
