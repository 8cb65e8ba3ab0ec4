"""What a study returns and what lies on disk: claims, tables, provenance.

A finished run is a directory with `summary.json` (see `docs/schema.md`) and `tables/<name>.parquet`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from rotoscope.errors import BadInput

SCHEMA = 1

Verdict = Literal["holds", "partly", "fails", "not tested"]

_POSITION = "Han & Ji 2025"
_MASSIVE = "Jin et al. 2025"
_DEPTH = "Ben-Artzy & Schwartz 2024"

CATALOGUE: dict[str, tuple[str, str]] = {
    "P1": (_POSITION, "Attention logits are close to a positional term plus a semantic term, also within each query."),
    "P2": (
        _POSITION,
        "This additivity is learned: with means removed, trained attention far exceeds the same model untrained.",
    ),
    "P3": (
        _POSITION,
        "How concentrated keys are and how far each rotary pair turns predicts every head's additivity.",
    ),
    "P4": (
        _POSITION,
        "Replacing the logits by their positional + semantic fit costs less NLL than an equal-norm random change.",
    ),
    "P5": (
        _POSITION,
        "Reordering or position jitter of up to 5 % of the tokens does minor harm, of more than 10 % clear harm.",
    ),
    "P6": (_POSITION, "Clamping distances to those seen in training keeps NLL low past the trained length."),
    "M1": (_MASSIVE, "Massive values occur in queries and keys, but not in values."),
    "M2": (_MASSIVE, "Massive values sit in the same slow rotary pairs across heads, layers and texts."),
    "M3": (_MASSIVE, "Massive values are present from the first layers on and grow with depth."),
    "M4": (
        _MASSIVE,
        "Disrupting massive values breaks tasks that read the context far more than tasks that recall learned facts.",
    ),
    "M5": (_MASSIVE, "Massive values arise only with rotary position embeddings."),
    "M6": (_MASSIVE, "Quantizers that protect massive values keep contextual ability best."),
    "D1": (
        _DEPTH,
        "Noise on previous tokens, or freezing them, does negligible harm in the top 30-50 % of the layers.",
    ),
    "D2": (_DEPTH, "Noise on previous tokens, or freezing them, low in the model brings tasks down to chance level."),
    "D3": (_DEPTH, "Another prompt's states swapped in are obeyed in the lower layers and ignored in the top third."),
    "D4": (_DEPTH, "From some layer on, attention can be skipped altogether without loss."),
}
"""Every claim that a scorecard lists, in order: id to (paper, statement)."""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, tested on one model.

    Attributes
    ----------
    id, paper, statement
        As in `CATALOGUE`.
    verdict
        What the rule says; "not tested" comes with the `reason`.
    value, interval
        The measured value and its 95 % interval, in the units that `rule` names.
    null, null_name
        The value under the null or control, and what that null is in words.
    rule
        The rule in words, thresholds included.
    reason
        Why this verdict: which condition broke, or why nothing was tested.
    n
        What the interval rests on, for example "270 heads, 4 texts".
    at_half, at_double
        The verdict at half and at double the thresholds.
    detectable
        The smallest effect that this n could have detected (80 % power, 5 % level).
    """

    id: str
    paper: str
    statement: str
    verdict: Verdict
    value: float | None = None
    interval: tuple[float, float] | None = None
    null: float | None = None
    null_name: str = ""
    rule: str = ""
    reason: str = ""
    n: str = ""
    at_half: str = ""
    at_double: str = ""
    detectable: float | None = None


def not_tested(claim_id: str, reason: str, rule: str = "") -> Claim:
    """The claim of the catalogue with verdict "not tested" and why."""
    paper, statement = CATALOGUE[claim_id]
    return Claim(claim_id, paper, statement, "not tested", rule=rule, reason=reason)


@dataclass
class Result:
    """Tables and claims of one study, or of several merged.

    Attributes
    ----------
    tables
        Name to table; each becomes `tables/<name>.parquet`.
    claims
        The claims this result speaks about.
    headline
        A flat mapping of the few numbers worth reading first.
    provenance
        What made these numbers, see `provenance`; its "model" names the model.
    decisions
        Choices that were taken on the way, each a flat mapping of strings.
    """

    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    headline: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, str]] = field(default_factory=list)

    def scorecard(self) -> list[Claim]:
        """All claims of the catalogue in order; those this result lacks are "not tested"."""
        known = {claim.id: claim for claim in self.claims}
        return [known.get(claim_id) or not_tested(claim_id, "not run") for claim_id in CATALOGUE]

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds, as plain JSON values (`docs/schema.md`)."""
        return {
            "schema": SCHEMA,
            "model": plain(self.provenance.get("model")),
            "provenance": plain(self.provenance),
            "claims": [_to_json(claim) for claim in self.scorecard()],
            "decisions": plain(self.decisions),
            "headline": plain(self.headline),
        }

    def save(self, out: Path | str) -> None:
        """Write `tables/*.parquet` and then `summary.json` into `out`, each file atomically.

        Raises
        ------
        BadInput
            If `out` cannot be written.
        """
        out = Path(out)
        for name, table in self.tables.items():
            write_atomic(out / "tables" / f"{name}.parquet", parquet_bytes(table))
        # Last, since its presence says that the run is finished.
        write_atomic(out / "summary.json", json.dumps(self.summary(), indent=2, ensure_ascii=False) + "\n")


def read(out: Path | str) -> Result:
    """Tables and claims of a finished run.

    Raises
    ------
    BadInput
        If `out` is no finished run of this version.
    """
    out = Path(out)
    try:
        summary = json.loads((out / "summary.json").read_text("utf-8"))
        if summary["schema"] != SCHEMA:
            raise BadInput(f"{out} has summary schema {summary['schema']}, this version reads {SCHEMA}; run it again")
        result = Result(
            claims=[_from_json(claim) for claim in summary["claims"]],
            headline=summary["headline"],
            provenance=summary["provenance"],
            decisions=summary["decisions"],
        )
        result.tables = {path.stem: pd.read_parquet(path) for path in sorted((out / "tables").glob("*.parquet"))}
    except FileNotFoundError:
        raise BadInput(f"{out} holds no finished run (no summary.json); run `rotoscope audit --out {out}`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{out} cannot be read as a run ({type(error).__name__}: {error}); run it again") from error
    return result


def merge(results: Sequence[Result]) -> Result:
    """Several studies of one model as one result.

    Tables of one name are joined on their shared columns when their columns differ, and stacked when they do not;
    equal tables appear once. A tested claim replaces an untested one. For headline and provenance the first
    result that has a key gives its value.

    Raises
    ------
    ValueError
        If two tables of one name contradict each other, or two results disagree on a tested claim.
    """
    merged = Result()
    claims: dict[str, Claim] = {}
    for result in results:
        for name, table in result.tables.items():
            merged.tables[name] = _join(name, merged.tables[name], table) if name in merged.tables else table
        for claim in result.claims:
            known = claims.get(claim.id)
            if known is None or known.verdict == "not tested":
                claims[claim.id] = claim
            elif claim.verdict != "not tested" and claim != known:
                raise ValueError(f"two results disagree on claim {claim.id}")
        merged.headline = result.headline | merged.headline
        merged.provenance = result.provenance | merged.provenance
        merged.decisions += [decision for decision in result.decisions if decision not in merged.decisions]
    merged.claims = [claims[claim_id] for claim_id in CATALOGUE if claim_id in claims]
    return merged


def provenance(*, seed: int, command: str | None = None, **facts: Any) -> dict[str, Any]:
    """What made a result: versions, platform, threads, time (UTC), command, seed, and the caller's facts.

    Parameters
    ----------
    seed
        The seed that every random choice of the run derives from.
    command
        The command line; by default the one of this process.
    **facts
        What only the caller knows: `model` (its name), `revision` or `file_hash`, `dtype`, `first_token_ids`, …
    """
    torch = sys.modules.get("torch")
    argv = [Path(sys.argv[0]).name, *sys.argv[1:]]
    made: dict[str, Any] = {
        "versions": versions(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads() if torch is not None else os.cpu_count(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(argv) if command is None else command,
        "seed": seed,
    }
    return made | facts


def versions() -> dict[str, str]:
    """Versions of what computes the numbers; nothing heavy is imported."""
    found = {"python": platform.python_version()}
    for package in ("rotoscope", "torch", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_atomic(path: Path | str, content: bytes | str) -> None:
    """Write a file so that its final name only ever shows the whole content; parents are made.

    Raises
    ------
    BadInput
        If the place cannot be written (read-only, no such device, full).
    """
    path = Path(path)
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    # Not `tempfile`: its files are private to the user, and a result should follow the umask.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_through(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_through(path: Path, data: bytes) -> None:
    """Write a file and wait for the disk, so that a name given later never precedes the content."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing(path: Path, mend: str = "mend that or choose another --out") -> Iterator[None]:
    """Turn an operating system's refusal to write at `path` into a sentence for the user."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"cannot write {path} ({error.strerror or error}); {mend}") from error


def parquet_bytes(table: pd.DataFrame) -> bytes:
    """The table as a Parquet file; equal tables give equal bytes. The index is not kept."""
    buffer = BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()


def plain(value: Any) -> Any:
    """The value in JSON's own types; NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def _join(name: str, left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    if left.equals(right):
        return left
    if set(left.columns) == set(right.columns):
        return pd.concat([left, right], ignore_index=True)
    shared = [column for column in left.columns if column in right.columns]
    joined = left.merge(right, on=shared, how="outer", validate="one_to_one")
    if len(joined) > max(len(left), len(right)):
        raise ValueError(f"two tables {name!r} disagree in their shared columns {shared}")
    return joined


def _to_json(claim: Claim) -> dict[str, Any]:
    record: dict[str, Any] = plain(asdict(claim))
    if record["interval"] is not None and None in record["interval"]:
        record["interval"] = None
    return record


def _from_json(record: Mapping[str, Any]) -> Claim:
    known = {name: record[name] for name in (f.name for f in fields(Claim)) if name in record}
    if known["interval"] is not None:
        low, high = known["interval"]
        known["interval"] = (float(low), float(high))
    return Claim(**known)
