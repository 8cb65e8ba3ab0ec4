"""Which quantization keeps contextual ability, and do channels with massive values explain it? (Jin et al. 2025)

Weights, activations and caches are quantized one method at a time, each put on the model once; what it costs is
measured on texts and on tasks whose answers are in the weights or in the prompt. A cache is judged in two passes, as it
is used. Claim M6 compares quantizers that leave massive channels exact with such as spare random ones, at equal bits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from rotoscope.engine import REFUSED, Cell
from rotoscope.model.lm import LM
from rotoscope.results import Result, not_tested
from rotoscope.studies import quantization_claim, quantization_tables
from rotoscope.studies.conduct import conduct
from rotoscope.studies.items import slug
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import Options
from rotoscope.studies.quantization_plan import ACTIVATIONS, CACHE, REFERENCE, WEIGHTS, Method, plan
from rotoscope.studies.quantization_tables import PLAIN, Measured
from rotoscope.studies.quantization_work import (
    CACHE_TASK,
    CACHE_TEXTS,
    GRID_CELL,
    LAYER,
    METHOD,
    PROTECTED,
    REFERENCE_CELL,
    Work,
)

NAME = "quantization"
MOST = 0.5
"""Share of linear layers from which on a checkpoint that rounds their inputs is one of activations."""
RULES = {"M6": quantization_claim.RULE}


def run(
    lm: LM, *, out: Path | str | None = None, resume: bool = False, progress: bool = False, **options: Any
) -> Result:
    """Run this study alone; see :func:`rotoscope.studies.conduct` and, for ``**options``, ``Options``."""
    return conduct([sys.modules[__name__]], lm, Options(**options), out=out, resume=resume, progress=progress)


def cells(lm: LM, options: Options) -> list[Cell]:
    """What the study needs run."""
    of_size = plan(options)
    if of_size is None or not lm.anatomy.attention:
        return []
    return list(Work(lm, options, of_size).cells())


def finish(lm: LM, options: Options, done: Mapping[str, Tables]) -> Result:
    """Tables and claims from the finished cells."""
    of_size = plan(options)
    if of_size is None or not lm.anatomy.attention:
        why = "no layer has attention" if of_size else "quantization was left out (methods none)"
        return Result({}, [not_tested("M6", why, RULES["M6"])], {}, {})
    return _Found(Work(lm, options, of_size), done).result()


@dataclass(frozen=True)
class _Found:
    """What the cells gave."""

    work: Work
    done: Mapping[str, Tables]

    def result(self) -> Result:
        work, seed = self.work, self.work.options.seed
        every = [self._reference(), *map(self._method, work.methods), *map(self._checkpoint, work.checkpoints)]
        tables = {"quantization": quantization_tables.quantization(self.clean, every, seed)}
        items, bits = self._protected()
        if len(items):
            tables["protected"] = quantization_tables.protected(self.clean, items, bits)
        tables |= self._beside()
        by_method = [of.items.assign(method=of.method.label) for of in every if of.items is not None]
        claim, headline = quantization_claim.m6(
            self.clean, items, _joined(by_method), work.on_grid, seed, self._why_not(),
        )  # fmt: skip
        return Result({name: table for name, table in tables.items() if len(table)}, [claim], headline, {})

    @cached_property
    def clean(self) -> pd.DataFrame:
        found = [
            self.done[cell.name]["items"].assign(spec=task.spec)
            for task in self.work.tasks
            if (cell := self.work.reference_items(task)).name in self.done and REFUSED not in self.done[cell.name]
        ]
        return _joined(found)

    def _reference(self) -> Measured:
        of = self.done[REFERENCE_CELL]
        items = self.clean if len(self.clean) else None
        return Measured(Method(REFERENCE, REFERENCE, ""), dict(of["facts"].iloc[0]), of["texts"], items)

    def _method(self, m: Method) -> Measured:
        if m.kind == CACHE:
            return self._cache(m)
        return self._weights(m, self.work.on_grid.get(m.label, ""))

    def _checkpoint(self, name: str) -> Measured:
        of = self._weights(Method(name, WEIGHTS, ""), "")
        rounds_inputs = of.facts.get("share_rounding", 0.0) >= MOST
        return replace(of, method=Method(name, ACTIVATIONS, "")) if rounds_inputs else of

    def _weights(self, m: Method, note: str) -> Measured:
        of = self.done[f"{METHOD}/{slug(m.label)}"]
        if REFUSED in of:
            return Measured(m, note=f"not tested: {of[REFUSED].reason[0]}")
        return Measured(m, dict(of["facts"].iloc[0]), of["texts"], of["items"], note)

    def _cache(self, m: Method) -> Measured:
        of = self.done[CACHE_TEXTS]
        items = self._cache_items()
        own = items[(items.method == m.label) & (items.arm == PLAIN)] if len(items) else None
        if REFUSED in of:
            return Measured(m, {}, None, own, note=f"not tested: {of[REFUSED].reason[0]}")
        facts = of["facts"].set_index("method").bits
        size = float(self.done[REFERENCE_CELL]["facts"].bytes[0])
        return Measured(
            m, {"bits": float(facts[m.label]), "bytes": size}, of["texts"][of["texts"].method == m.label], own
        )

    def _cache_items(self, table: str = "items") -> pd.DataFrame:
        folder = f"{CACHE_TASK}/"
        return _joined([of[table] for name, of in self.done.items() if name.startswith(folder) and table in of])

    def _protected(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Items and bits of every width and of what was left exact, by method, arm and draw."""
        work = self.work
        items, facts = self._cache_items(), self._cache_items("facts")
        if len(items):
            items = items[items.method.isin(work.plan.cache_widths)]
        every_items, every_facts = [items], [facts]
        for width in work.weight_widths:
            label = {"method": width.label}
            plain = self.done.get(f"{METHOD}/{slug(width.label)}", {})
            if "items" in plain:
                every_items.append(plain["items"].assign(**label, arm=PLAIN, draw=-1))
                every_facts.append(plain["facts"].assign(**label, arm=PLAIN, draw=-1))
            for arm, draw, _ in work.arms(width):
                of = self.done[work.protected_name(width, arm, draw)]
                if REFUSED not in of:
                    every_items.append(of["items"].assign(**label, arm=arm, draw=draw))
                    every_facts.append(of["facts"].assign(**label, arm=arm, draw=draw))
        return _joined(every_items), _joined(every_facts)

    def _beside(self) -> Tables:
        """The tables that stand beside: errors of logits, what was re-measured, layers, the grid."""
        work = self.work
        found = {m.label: self.done[f"{METHOD}/{slug(m.label)}"] for m in work.methods if m.kind != CACHE}
        found |= {name: self.done[f"{METHOD}/{slug(name)}"] for name in work.checkpoints}
        found = {name: of for name, of in found.items() if REFUSED not in of}
        caches = self.done.get(CACHE_TEXTS, {})
        errors = [of["logits"].assign(method=name) for name, of in found.items()]
        effects = {name: of["effects"] for name, of in found.items()}
        if "logits" in caches:
            errors.append(caches["logits"])
            effects |= {str(name): of for name, of in caches["effects"].groupby("method", sort=False)}
        tables = {
            "quantization_logits": _joined(errors),
            "quantization_effects": quantization_tables.effects(self.done[REFERENCE_CELL]["effects"], effects),
            "quantization_layers": quantization_tables.layers(self.done, LAYER, [slug(m) for m in work.plan.layers]),
        }
        if GRID_CELL in self.done:
            tables["quantization_grid"] = self.done[GRID_CELL]["grid"]
        return tables

    def _why_not(self) -> str:
        """Why a claim could not be judged, where a task or a cell was left out."""
        refused = [
            str(of[REFUSED].reason[0])
            for name, of in self.done.items()
            if name.startswith((CACHE_TASK, PROTECTED)) and REFUSED in of
        ]
        return next(iter((*self.work.unasked.values(), *refused)), "")


def _joined(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    some = [table for table in tables if len(table)]
    return pd.concat(some, ignore_index=True) if some else pd.DataFrame()
