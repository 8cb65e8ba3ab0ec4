"""What rotoscope says of every model of the zoo, and the page that shows it.

python tests/census.py            writes docs/models.md, prints the counts
python tests/census.py llama mpt  prints what it says of some names
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import torch
import transformers
import zoo

import rotoscope as rs
from rotoscope.model.anatomy import LayerAnatomy
from rotoscope.model.quiet import quiet

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
EXACT, PARTLY, REFUSED = "exact", "exact on its attention layers", "refused"
DIFFERS, NOT_BUILT = "differs", "not built"
VERDICTS = {
    EXACT: "queries, keys, values and logits of every layer are those of the untouched model",
    PARTLY: "the same; some layers compute no softmax attention, and nothing is said of them",
    REFUSED: "`rs.wrap` says in a sentence why the model cannot be reached exactly",
    DIFFERS: "`rs.doctor` found a difference",
    NOT_BUILT: "the zoo has no tiny model of the name",
}


@dataclass(frozen=True)
class Record:
    """One name: its verdict, why (where it is not exact), its layers and what the doctor notes."""

    name: str
    model: str
    verdict: str
    reason: str = ""
    layers: tuple[LayerAnatomy, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def positions(self) -> str:
        """Runs of layers that are alike, in words."""
        kinds = (_kind(layer) for layer in self.layers)
        return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(kinds))


@cache
def examine(name: str) -> Record:
    """Build, wrap and doctor one name; what raises anything but a refusal raises here."""
    try:
        with quiet():
            model = zoo.build(name)
    except zoo.NotBuilt as error:
        return Record(name, zoo.CLASSES[name], NOT_BUILT, str(error))
    kind = type(model).__name__
    try:
        lm = rs.wrap(model)
    except rs.Refused as error:
        return Record(name, kind, REFUSED, str(error).removeprefix(kind).lstrip(": "))
    report = rs.doctor(lm)
    layers = lm.anatomy.layers
    notes = tuple(dict.fromkeys([*(x.note for x in layers if x.kind == "attention" and x.note), *report.notes]))
    if not report.ok:
        return Record(name, kind, DIFFERS, "; ".join(report.reasons), layers, notes)
    return Record(name, kind, PARTLY if any(x.kind == "none" for x in layers) else EXACT, "", layers, notes)


def counts(records: Sequence[Record]) -> Counter[str]:
    """How many names have each verdict."""
    return Counter(record.verdict for record in records)


def page(records: Sequence[Record]) -> str:
    """The table of all names as Markdown."""
    return "\n".join(_lines(records)) + "\n"


def _lines(records: Sequence[Record]) -> Iterator[str]:
    total = counts(records)
    built = len(records) - total[NOT_BUILT]
    yield "# Models"
    yield ""
    yield (
        f"One row for each of the {len(records)} names in transformers' registry of causal language models, {built} of "
        "them built as a tiny model with random weights (`tests/zoo.py`), wrapped, and put through every check of "
        "`rs.doctor` in float32."
    )
    yield ""
    yield "| verdict | names | meaning |"
    yield "|---|---|---|"
    for verdict, meaning in VERDICTS.items():
        yield f"| {verdict} | {total[verdict]} | {meaning} |"
    attention = [x for record in records for x in record.layers if x.kind == "attention"]
    unknown = sum(any(x.position == "unknown" for x in record.layers) for record in records)
    yield ""
    yield (
        f"{len(attention)} attention layers were reached. How positions enter is known for all of them but some in "
        f"{unknown} families, whose notes say why; there queries and keys before rotation are not given. *Learned* "
        "stands for any positions that are part of the hidden states, sines included; *none* for layers that see the "
        "order of tokens through the mask alone."
    )
    yield ""
    yield (
        f"Made by `python tests/census.py` with rotoscope {rs.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__.split('+')[0]}. Names by which a model comes are those of its config's `model_type`."
    )
    yield ""
    yield "| name | class | verdict | layers of the tiny model | notes |"
    yield "|---|---|---|---|---|"
    for record in records:
        notes = _cell("; ".join(filter(None, [record.reason, *record.notes])))
        yield f"| {record.name} | {record.model} | {record.verdict} | {record.positions} | {notes} |"


def _kind(layer: LayerAnatomy) -> str:
    if layer.kind == "none":
        return "without attention"
    turning = f"rotary ({layer.rotary_dims} of {layer.head_dim}, {layer.pairing})"
    words = [turning if layer.position == "rotary" else layer.position]
    words += [f"window {layer.window}"] if layer.window else []
    words += ["softcap"] if layer.softcap else []
    words += ["sinks"] if layer.sinks else []
    return " ".join(words)


def _cell(text: str, longest: int = 400) -> str:
    text = " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
    return text if len(text) <= longest else text[: longest - 2] + " …"


def main(names: Sequence[str]) -> None:
    records = []
    for name in names or zoo.NAMES:
        records.append(record := examine(name))
        why = "; ".join(filter(None, [record.reason, *record.notes]))
        print(f"{name}: {record.verdict}  {record.positions}  {why}"[: None if names else 150], flush=True)
    print(dict(counts(records)))
    if not names:
        PAGE.write_text(page(records), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
