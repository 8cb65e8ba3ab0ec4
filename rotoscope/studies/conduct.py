"""Runs studies: their cells through the engine, then tables, claims and provenance as one result."""

from __future__ import annotations

import hashlib
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import pandas as pd
import torch

from rotoscope.engine import Cell, Engine
from rotoscope.engine import plan as plan_cells
from rotoscope.model.lm import LM
from rotoscope.results import Result, merge, provenance
from rotoscope.studies import texts
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import BATCH_TOKENS, Options
from rotoscope.tasks.rows import is_file


class Study(Protocol):
    """One question: the cells that it needs run, and what follows from them.

    A study may have ``join(lm, options, done, tables)`` too, which gives more tables from those of all studies.
    """

    NAME: str

    def cells(self, lm: LM, options: Options) -> list[Cell]: ...

    def finish(self, lm: LM, options: Options, done: Mapping[str, Tables]) -> Result: ...


def conduct(
    studies: Sequence[Study],
    lm: LM,
    options: Options,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    progress: bool = False,
    command: str | None = None,
) -> Result:
    """Run studies on a model; cells that several of them need run once.

    Parameters
    ----------
    studies : sequence of Study
        Modules of this package, or anything shaped like them.
    lm : LM
        The model.
    options : Options
        Size, seed, texts.
    out : path, optional
        Directory for tables, claims and finished cells; by default nothing is written.
    resume : bool
        Go on with what ``out`` holds.
    progress : bool
        Show one progress bar on stderr.
    command : str, optional
        Command line for the provenance.

    Returns
    -------
    Result
    """
    with Engine(out, resume=resume, progress=progress) as engine:
        return conduct_in(engine, studies, lm, options, command)


def conduct_in(
    engine: Engine, studies: Sequence[Study], lm: LM, options: Options, command: str | None = None
) -> Result:
    """:func:`conduct` in an engine that is already open, so that its directory was checked before the model loaded."""
    started = perf_counter()
    cells = [cell for study in studies for cell in study.cells(lm, options)]
    engine.begin(fingerprint(lm, options, studies))
    done = engine.run(lm, cells)
    result = merge([study.finish(lm, options, done) for study in studies])
    for study in studies:
        if hasattr(study, "join"):
            result.tables |= study.join(lm, options, done, result.tables)
    result.tables["anatomy"] = anatomy_table(lm)
    seconds = round(perf_counter() - started, 1)
    result.decisions += engine.decisions
    made_by = provenance(seed=options.seed, command=command, seconds=seconds, **facts(lm, options))
    result.provenance = made_by | result.provenance
    if engine.out is not None:
        result.save(engine.out)
    return result


def plan(studies: Sequence[Study], lm: LM, options: Options) -> pd.DataFrame:
    """The cells that a run would take, with token-forwards and estimated seconds; nothing is run."""
    return plan_cells([cell for study in studies for cell in study.cells(lm, options)], lm)


def fingerprint(lm: LM, options: Options, studies: Sequence[Study]) -> dict[str, Any]:
    """What must be equal for a run to be resumed."""
    own = "" if options.text is None else hashlib.sha256(options.text.encode()).hexdigest()
    studied = [study.NAME for study in studies]
    weights = {} if lm.file_hash else {"weights": weights_digest(lm.model)}
    return {
        **_identity(lm), **weights, **options.facts(), "text sha256": own, "task files": _files(options.tasks),
        "studies": studied,
    }  # fmt: skip


def _files(specs: Sequence[str]) -> dict[str, str]:
    """Digests of the files that tasks are read from, by spec."""
    names = {spec: spec.partition(":")[2] for spec in specs}
    paths = {spec: Path(name).expanduser() for spec, name in names.items() if is_file(name)}
    return {spec: hashlib.sha256(path.read_bytes()).hexdigest() for spec, path in paths.items()}


def weights_digest(model: torch.nn.Module) -> str:
    """A cheap digest of a model's weights, for models that no file stands for: every parameter's sum and first value.

    Weights that an offloading library fetches when they are needed count with their shapes alone.
    """
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        for held in _held(p.detach()):
            # In half precision a sum would round small changes away, and 8-bit floats have none.
            numbers = held.view(torch.uint8) if held.dtype.itemsize == 1 else held
            total = numbers.sum(dtype=torch.float64).item()
            values = f"{total!r} {numbers.flatten()[0].item()!r}" if held.numel() else ""
            digest.update(f"{name} {tuple(held.shape)} {held.dtype} {values}".encode())
    return digest.hexdigest()


def _held(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of: quantizing libraries wrap several in one."""
    if hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            yield from _held(getattr(x, name))
    elif x.device.type != "meta":
        yield x


def facts(lm: LM, options: Options) -> dict[str, Any]:
    """What made the numbers, beyond versions and seed."""
    some = texts.texts(lm, options)
    parameters = list(lm.model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        **_identity(lm),
        "device": str(lm.device),
        "parameters": sum(p.numel() for p in parameters),
        "attention": str(getattr(lm.model.config, "_attn_implementation", None)),
        "size": options.size,
        "n_texts": len(some),
        "tokens_per_text": max(len(t.ids) for t in some),
        "tokens_of_shortest_text": min(len(t.ids) for t in some),
        "batch_size": 1,
        "task_batch_tokens": BATCH_TOKENS,
        "max_memory": options.max_memory,
        "text": "default (pydoc_data.topics)" if options.text is None else "user's",
        "chat_template": "off",
        "first_token_ids": list(some[0].ids[:16]),
        "tap_difference": lm.anatomy.tap_difference,
        "torch_threads": torch.get_num_threads(),
        "peak_memory_mb": round(peak / 2**20),
    }


def anatomy_table(lm: LM) -> pd.DataFrame:
    """One row per layer, as measured."""
    names = (
        "layer", "kind", "position", "heads", "kv_heads", "head_dim", "v_head_dim", "rotary_dims", "pairing",
        "window", "softcap", "sinks", "calls", "note",
    )  # fmt: skip
    rows = [[getattr(layer, name) for name in names] for layer in lm.anatomy.layers]
    return pd.DataFrame(rows, columns=list(names)).astype({"window": "Int64", "softcap": "Float64"})


def _identity(lm: LM) -> dict[str, Any]:
    return {
        "model": lm.source,
        "revision": lm.revision,
        "file_hash": lm.file_hash,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "trained_length": lm.trained_length,
    }
