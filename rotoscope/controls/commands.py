"""The command line of the controls: options in, files out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rotoscope.errors import BadInput

app = typer.Typer(
    help="Small decoders that differ in nothing but how positions enter: train, show and audit them.",
    add_completion=False,
)

Set = Annotated[Path | None, typer.Argument(help="What `controls train` wrote [the set that comes with rotoscope].")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else there.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in --out.")]


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Directory for the models.")] = Path("runs/controls"),
    size: Annotated[str, typer.Option(help="small (2 M parameters) or large (27 M, for a GPU).")] = "small",
    positions: Annotated[str, typer.Option(help="Which variants.")] = "rope,learned,alibi,none",
    seeds: Annotated[str, typer.Option(help="Which seeds.")] = "0,1",
    steps: Annotated[int | None, typer.Option(help="Training steps in place of the size's own.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Models trained at a time.")] = 2,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train the set: one decoder with RoPE, a learned table, ALiBi and no positions, same seeds, rows and steps."""
    from rotoscope.controls.train import train as run

    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise BadInput(f"--seeds are whole numbers such as 0,1, not {seeds}") from None
    records = run(
        out, size, positions=positions.split(","), seeds=numbers, steps=steps, jobs=jobs, resume=resume,
        told=lambda line: typer.echo(line, err=as_json),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(records, indent=2))


@app.command()
def show(root: Set = None, as_json: Json = False) -> None:
    """List the controls: parameters, losses, what they can do, and the largest max/mean ratios of their heads."""
    from rotoscope.controls.show import rows, text

    found = rows(root)
    typer.echo(json.dumps(found, indent=2) if as_json else text(found))


@app.command()
def audit(
    root: Set = None,
    out: Annotated[Path, typer.Option(help="Directory for report, tables and claims.")] = Path("runs/controls-audit"),
    size: Annotated[str, typer.Option(help="quick, standard or full.")] = "quick",
    seed: Annotated[int, typer.Option(help="Every random choice derives from it.")] = 0,
    limit: Annotated[int | None, typer.Option(help="At most this many texts, and items of each task.")] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Run all studies on every control and write one report: with and without RoPE."""
    from rotoscope.controls.audit import audit_in
    from rotoscope.engine import Engine
    from rotoscope.report import write
    from rotoscope.studies.options import Options

    options: Any = Options(size, seed, limit=limit)
    with Engine(out, resume=resume) as engine:
        result = audit_in(engine, root, options, command=" ".join(["rotoscope", *sys.argv[1:]]))
        page = write(result, out / "report.html")
    if as_json:
        typer.echo(json.dumps(result.summary(), indent=2, ensure_ascii=False))
        return
    for claim in result.claims:
        typer.echo(f"{claim.id} {claim.verdict}: {claim.reason}")
    typer.echo(f"report: {page}")
