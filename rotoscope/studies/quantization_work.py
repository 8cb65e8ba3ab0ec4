"""The cells of the quantization study: which ones a size takes on a model, and what they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
from torch import Tensor

from rotoscope.engine import Cell
from rotoscope.model.lm import LM
from rotoscope.quantizers import low_bit_grid
from rotoscope.quantizers.base import linear_layers
from rotoscope.studies import quantization_cache_cells as cache_cells
from rotoscope.studies import quantization_cells as weight_cells
from rotoscope.studies import texts
from rotoscope.studies.arms import CLEAN, JUDGED, grid
from rotoscope.studies.disruption import SCORED, cell_name, score
from rotoscope.studies.items import Asked, asked, slug
from rotoscope.studies.memory import layers_at_once
from rotoscope.studies.options import BATCH_TOKENS, Options
from rotoscope.studies.quantization_plan import CACHE, SEEDS, Method, Plan, method, methods
from rotoscope.studies.quantization_tables import PLAIN

GRID_CELL, REFERENCE_CELL = "quantization/grid", "quantization/reference"
METHOD, PROTECTED, LAYER = "quantization/methods", "quantization/protected", "quantization/layers"
CACHE_TASK, CACHE_TEXTS = "quantization/cache/tasks", "quantization/cache/texts"
MASSIVE, RANDOM, LAYERS, RANDOM_LAYERS = "massive", "random", "layers", "random-layers"
# The second pass of an item: the last token of its prompt, and those of its answer but one.
_SECOND_PASS = 3


@dataclass(frozen=True)
class Work:
    """What is to be done on a model at a size."""

    lm: LM
    options: Options
    plan: Plan

    def cells(self) -> Iterator[Cell]:
        if self.plain_weights:
            yield Cell(GRID_CELL, weight_cells.grid, {}, 1.0)
        given = {"some": self.texts, "effect_tokens": self.plan.effect_tokens, "seed": self.options.seed}
        cost = self.text_cost + self.effect_cost
        yield Cell(REFERENCE_CELL, weight_cells.reference, given, cost, self.layers_at_once)
        yield from (self.reference_items(task) for task in self.tasks)
        yield from self._weights(given)
        yield from self._caches()
        yield from self._protected()
        yield from self._layers()

    @cached_property
    def texts(self) -> list[list[int]]:
        return self._split[0]

    @cached_property
    def _split(self) -> tuple[list[list[int]], list[list[int]]]:
        """Texts that are measured, and others to calibrate on."""
        count = min(self.options.texts or self.plan.texts, self.options.limit or 10**9)
        tokens = min(self.options.n_tokens, self.plan.tokens)
        wanted = replace(self.options, texts=count + self.plan.calibration, tokens=tokens, limit=None)
        some = [list(text.ids) for text in texts.texts(self.lm, wanted)]
        return some[:count], some[count:]

    @cached_property
    def _asked(self) -> tuple[list[Asked], dict[str, str]]:
        return asked(self.lm, self.plan.tasks, self.options.seed)

    @property
    def tasks(self) -> list[Asked]:
        return self._asked[0]

    @property
    def unasked(self) -> dict[str, str]:
        """Why tasks are left out, by spec."""
        return self._asked[1]

    @cached_property
    def methods(self) -> list[Method]:
        return methods(self.lm, self.plan.methods)

    @cached_property
    def checkpoints(self) -> dict[str, str]:
        return {name: path for name, _, path in (text.partition("=") for text in self.options.checkpoints)}

    @cached_property
    def caches(self) -> list[Method]:
        return [m for m in self.methods if m.kind == CACHE]

    @cached_property
    def plain_weights(self) -> bool:
        """Whether the linear layers hold their weights as they are: not quantized, not offloaded."""
        weights = [linear.weight for linear in linear_layers(self.lm)]
        return bool(weights) and all(
            type(w) is Tensor and w.is_floating_point() and w.device.type != "meta" for w in weights
        )

    @cached_property
    def on_grid(self) -> dict[str, str]:
        """Why methods of few bits cannot be ranked on this model, by name."""
        found = low_bit_grid(self.lm).bits if self.plain_weights else pd.Series(dtype="Int64")
        if found.notna().mean() < 0.5 or found.empty:
            return {}
        bits = int(found.max())
        every = {m.label: m for m in (*self.methods, *(method(self.lm, w) for w in self.plan.weight_widths))}
        why = f"the weights lie on a {bits}-bit grid already, so that methods of {{}} bits cannot be ranked on them"
        return {name: why.format(m.bits) for name, m in every.items() if m.bits is not None and bits <= m.bits <= 4}

    @property
    def layers_at_once(self) -> int:
        tokens = min(self.plan.effect_tokens, len(self.texts[0]))
        return layers_at_once(self.lm.anatomy.attention, tokens, self.options.max_memory)

    @property
    def asked(self) -> dict[str, int]:
        return {task.spec: task.n for task in self.tasks}

    @property
    def task_cost(self) -> float:
        return float(sum(task.tokens for task in self.tasks))

    @property
    def text_cost(self) -> float:
        return 1.5 * sum(map(len, self.texts))  # norm and head once more, for the divergence

    @property
    def effect_cost(self) -> float:
        return float(min(self.plan.effect_tokens, len(self.texts[0])))

    def reference_items(self, task: Asked) -> Cell:
        """The model as it is on a task: the disruption grid's own cell where that has the same items."""
        spec, n, seed = task.spec, task.n, self.options.seed
        arguments = {"spec": spec, "n": n, "take": n, "seed": seed, "how": None}
        of_grid = grid(self.options)
        wanted = self.plan.tasks[spec]
        shared = of_grid is not None and of_grid.tasks.get(spec) == of_grid.judged.get(spec) == wanted
        name = cell_name(SCORED, spec, JUDGED[0]) if shared else f"quantization/items/{slug(spec)}/{CLEAN}"
        return Cell(name, score, arguments, float(task.tokens), BATCH_TOKENS, optional=True)

    def _weights(self, given: Mapping[str, Any]) -> Iterator[Cell]:
        cost = self.text_cost + self.effect_cost + self.task_cost
        arguments = {**given, "asked": self.asked}
        for m in self.methods:
            if m.kind != CACHE:
                own = {**arguments, "spec": m.spec, "calibration": self._split[1] if self.plan.calibration else []}
                name = f"{METHOD}/{slug(m.label)}"
                yield Cell(name, weight_cells.weights, own, cost, self.layers_at_once, optional=True)
        for label, path in self.checkpoints.items():
            own = {**arguments, "path": path}
            yield Cell(f"{METHOD}/{slug(label)}", weight_cells.stored, own, cost, self.layers_at_once, optional=True)

    def _caches(self) -> Iterator[Cell]:
        ways = [[m.label, m.spec, PLAIN, -1, 0] for m in self.caches]
        for width in (method(self.lm, name) for name in self.plan.cache_widths):
            ways += [] if width in self.caches else [[width.label, width.spec, PLAIN, -1, 0]]
            ways += [[width.label, width.spec, *arm] for arm in self.arms(width)]
        arguments: dict[str, Any]
        for task in self.tasks if ways else []:
            arguments = {
                "spec": task.spec, "n": task.n, "seed": self.options.seed, "variants": ways, "some": self.texts[:2],
            }  # fmt: skip
            cost = float(task.tokens + _SECOND_PASS * task.n * len(ways))
            name = f"{CACHE_TASK}/{slug(task.spec)}"
            yield Cell(name, cache_cells.answers, arguments, cost, BATCH_TOKENS, optional=True)
        if self.caches:
            specs = {m.label: m.spec for m in self.caches}
            cost = sum(len(ids) for ids in self.texts) * (0.5 + 0.75 * (1 + len(specs)))
            yield Cell(
                CACHE_TEXTS, cache_cells.likelihoods, {"some": self.texts, "methods": specs}, cost, optional=True
            )

    def arms(self, width: Method) -> list[tuple[str, int, int]]:
        """What is left exact in turn at a width: arm, seed, and how many layers."""
        out = [(MASSIVE, -1, 0), *((RANDOM, draw, 0) for draw in range(SEEDS))]
        of_caches = width.kind == CACHE
        first = self.plan.cache_widths[0] if of_caches else self.weight_widths[0].label
        wanted = self.plan.protect_layers if of_caches else self.plan.protect_weight_layers
        layers = len(self.lm.anatomy.attention)
        count = max(1, layers // 4)
        if wanted and width.label == first and layers > 2 * count:  # else there are not as many others
            out += [(LAYERS, -1, count), *((RANDOM_LAYERS, draw, count) for draw in range(SEEDS))]
        return out

    @property
    def weight_widths(self) -> list[Method]:
        """Those that can be ranked."""
        return [method(self.lm, width) for width in self.plan.weight_widths if width not in self.on_grid]

    def protected_name(self, width: Method, arm: str, draw: int) -> str:
        return f"{PROTECTED}/{slug(width.label)}/{arm if draw < 0 else f'{arm}-{draw}'}"

    def _protected(self) -> Iterator[Cell]:
        for width in self.weight_widths:
            for arm, draw, count in self.arms(width):
                arguments = {
                    "spec": width.spec, "arm": arm, "draw": draw, "count": count, "some": self.texts[:2],
                    "asked": self.asked, "take": self.plan.weight_items, "seed": self.options.seed,
                }  # fmt: skip
                cost = sum(task.tokens * min(1.0, self.plan.weight_items / task.n) for task in self.tasks)
                name = self.protected_name(width, arm, draw)
                yield Cell(name, weight_cells.protect, arguments, cost, BATCH_TOKENS, optional=True)

    def _layers(self) -> Iterator[Cell]:
        some = [ids[: self.plan.layer_tokens] for ids in self.texts[: self.plan.layer_texts]]
        tokens = sum(map(len, some))
        for m in methods(self.lm, self.plan.layers):
            arguments: dict[str, Any] = {"spec": m.spec, "some": some}
            if m.kind == CACHE:
                chosen = _spread([a.layer for a in self.lm.anatomy.attention])
                own = {**arguments, "chosen": chosen}
                cost = tokens * (0.5 + 0.75 * (1 + len(chosen)))
                yield Cell(f"{LAYER}/{slug(m.label)}/all", cache_cells.layers, own, cost, optional=True)
                continue
            for layer in _spread(weight_cells.quantizable(self.lm)):
                own = {**arguments, "layer": layer}
                name = f"{LAYER}/{slug(m.label)}/{layer}"
                yield Cell(name, weight_cells.sensitivity, own, 1.5 * tokens, optional=True)


def _spread(layers: Sequence[int]) -> list[int]:
    """At most 32 of them, spread evenly."""
    return list(layers[:: max(1, -(-len(layers) // 32))])
