"""What breaks without massive values: tasks, attention and additivity under every arm. Claim M4 (Jin et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch

from rotoscope.engine import Cell
from rotoscope.interventions import Disrupt, Intervention, Run
from rotoscope.interventions.base import chosen_layers
from rotoscope.model.call import AttentionCall
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.residual import stop
from rotoscope.model.tap import tap
from rotoscope.observers.entropy import Entropy, probabilities
from rotoscope.studies import texts
from rotoscope.studies.arms import DOSES, JUDGED, Arm, Grid, grid
from rotoscope.studies.items import Asked, asked, slug
from rotoscope.studies.memory import layers_at_once, split
from rotoscope.studies.observe import Tables, observe
from rotoscope.studies.options import BATCH_TOKENS, Options
from rotoscope.studies.texts import Text
from rotoscope.tasks import evaluate, find
from rotoscope.tasks.forward import generate
from rotoscope.tasks.score import begins_with

OUTPUT_TOKENS = 12
SCORED, LAYER, DOSE = "disrupt/items", "disrupt/layers", "disrupt/dose"
ATTENTION, ADDITIVITY, OUTPUTS = "disrupt/attention", "disrupt/additivity", "disrupt/outputs"


def cells(lm: LM, options: Options) -> list[Cell]:
    """Every arm on its tasks, and what else the size runs."""
    of_size = grid(options)
    if of_size is None or not lm.anatomy.attention:
        return []
    arms = (*JUDGED, *of_size.arms)
    tasks = {task.spec: task for task in asked(lm, of_size.tasks, options.seed)[0]}
    out = []
    for arm in arms:
        out += [_scored(tasks[spec], arm, options, n) for spec, n in of_size.items(arm).items() if spec in tasks]
    for spec, n in of_size.curves.items():
        some = [(LAYER, arm) for arm in layer_arms(lm)] + [(DOSE, arm) for arm in DOSE_ARMS]
        out += [_scored(tasks[spec], arm, options, n, folder) for folder, arm in some if spec in tasks]
    if not tasks:
        return out
    return [*out, *_attention(lm, options, of_size, arms), *_outputs(list(tasks.values()), options, of_size)]


def layer_arms(lm: LM) -> list[Arm]:
    """The massive arm in one layer alone, for at most 32 layers spread evenly."""
    layers = [layer.layer for layer in lm.anatomy.attention]
    some = layers[:: -(-len(layers) // 32)]
    return [Arm(str(layer), {"layers": (layer,)}, group="layer") for layer in some]


DOSE_ARMS = tuple(Arm(f"{kind}-{dose}", {"selection": f"{kind}-{dose}"}, group="dose") for kind, dose in DOSES)


def _scored(task: Asked, arm: Arm, options: Options, take: int, folder: str = SCORED) -> Cell:
    take = min(take, task.n)
    arguments = {"spec": task.spec, "n": task.n, "take": take, "seed": options.seed, "how": arm.how}
    cost = task.tokens * take / task.n
    return Cell(cell_name(folder, task.spec, arm), score, arguments, cost, BATCH_TOKENS, optional=True)


def cell_name(folder: str, spec: str, arm: Arm) -> str:
    """Where a task's items under an arm are kept."""
    return f"{folder}/{slug(spec)}/{slug(arm.label)}"


def _attention(lm: LM, options: Options, of_size: Grid, arms: Sequence[Arm]) -> Iterator[Cell]:
    some = texts.texts(lm, options)
    ids = some[0].ids[: of_size.attention_tokens]
    layers = layers_at_once(lm.anatomy.attention, max(len(text.ids) for text in some), options.max_memory)
    arguments: dict[str, Any]
    for arm in arms:
        arguments = {"ids": ids, "seed": options.seed, "how": arm.how}
        yield Cell(f"{ATTENTION}/{slug(arm.label)}", attend, arguments, 3.0 * len(ids), layers, optional=True)
    yield from additivity_cells(lm, options, some, of_size.additivity_texts)


def additivity_cells(lm: LM, options: Options, some: Sequence[Text], count: int) -> Iterator[Cell]:
    """Additivity of the first ``count`` texts under every judged arm."""
    layers = layers_at_once(lm.anatomy.attention, max(len(text.ids) for text in some), options.max_memory)
    for arm, (i, text) in product(JUDGED, enumerate(some[:count])):
        arguments = {"ids": text.ids, "how": arm.how, "seed": options.seed}
        yield Cell(additivity_name(arm.label, i), additivity, arguments, len(text.ids), layers, optional=True)


def additivity_name(label: str, text: int | str) -> str:
    """Where additivity of a text under an arm is kept."""
    return f"{ADDITIVITY}/{slug(label)}/text-{text}"


def _outputs(tasks: Sequence[Asked], options: Options, of_size: Grid) -> Iterator[Cell]:
    written = [task for task in tasks if find(task.spec).scoring != "choice"]
    some = [task for task in written or tasks if not hasattr(find(task.spec), "evaluate")]
    for task in sorted(some, key=lambda task: task.tokens / task.n)[: of_size.output_tasks]:
        n = min(of_size.outputs, task.n)
        for arm in JUDGED:
            arguments = {"spec": task.spec, "n": n, "seed": options.seed, "how": arm.how}
            cost = task.tokens / task.n * n + n * OUTPUT_TOKENS
            yield Cell(f"{OUTPUTS}/{slug(task.spec)}/{slug(arm.label)}", outputs, arguments, cost, optional=True)


def score(lm: LM, spec: str, n: int, take: int, seed: int, how: Mapping[str, Any] | None, at_once: int) -> Tables:
    """``take`` of a task's ``n`` items under an arm; ``measured`` is what the intervention did to queries and keys."""
    watched, task = None if how is None else Watched(Disrupt(**{"seed": seed, **how})), find(spec)
    some = None
    if take < n and not hasattr(task, "evaluate"):  # fewer items asked for anew would be others, at other depths, say
        every = task.examples(lm, n, seed)
        some = [every[i] for i in sorted(np.random.default_rng(seed).permutation(len(every))[:take])]
    rows = evaluate(lm, task, n=take, seed=seed, under=watched, examples=some, batch_tokens=at_once)
    tables = {"items": rows.drop(columns=["first_ids"], errors="ignore")}
    if watched is not None:
        tables["measured"] = pd.DataFrame([watched.measured])
    return tables


def outputs(lm: LM, spec: str, n: int, seed: int, how: Mapping[str, Any] | None) -> Tables:
    """What the model writes, greedily, on a task's first items."""
    task = find(spec)
    under = None if how is None else Disrupt(**{"seed": seed, **how})
    examples = task.examples(lm, n, seed)
    prompts = [tuple(lm.encode(example.prompt).tolist()) for example in examples]
    with torch.no_grad(), evaluating(lm.model):
        written = generate(lm, prompts, OUTPUT_TOKENS, under)
    rows = []
    for example, ids in zip(examples, written, strict=True):
        answer = lm.tokenizer.decode(ids, skip_special_tokens=True)
        right = any(begins_with(answer, gold) for gold in example.gold)
        rows.append((example.id, example.prompt[-240:], example.gold[0], answer, float(right)))
    return {"outputs": pd.DataFrame(rows, columns=["id", "prompt", "gold", "answer", "correct"])}


def additivity(lm: LM, ids: Sequence[int], seed: int, how: Mapping[str, Any] | None, at_once: int) -> Tables:
    """How additive the logits of a text are under an arm, by layer: means over heads."""
    with nullcontext() if how is None else Disrupt(**{"seed": seed, **how}).on(lm):
        heads = observe(lm, ids, seed, (), at_once)["heads"]
    kinds = [kind for kind in ("form1", "form1_within", "form2_within") if kind in heads]
    return {"additivity": heads.groupby("layer", as_index=False)[kinds].mean()}


def attend(lm: LM, ids: Sequence[int], seed: int, how: Mapping[str, Any] | None, at_once: int) -> Tables:
    """What an arm does to attention on a text, by layer: its divergence from clean attention, entropy, sink mass."""
    under = None if how is None else Disrupt(**{"seed": seed, **how})
    batch = torch.tensor([list(ids)], device=lm.device)
    rows: list[dict[str, float]] = []
    for part in split(lm.anatomy.attention, at_once):
        chosen = [layer.layer for layer in part]

        def forward(*parts: Any, upto: int = chosen[-1] + 1) -> None:
            with torch.no_grad(), evaluating(lm.model), tap(lm, *parts), stop(lm.model, upto):
                lm.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)

        clean = _Kept(chosen)
        forward(clean)
        entropy, divergence = Entropy(), _Divergence(clean.calls)
        with nullcontext() if under is None or not _reached(lm, under, chosen[-1]) else under.on(lm):
            forward(entropy, divergence)
        rows += [
            {
                "layer": layer,
                "kl": divergence.kl[layer],
                "entropy": float(entropy.layers[layer].entropy.mean()),
                "sink_mass": float(entropy.layers[layer].sink_mass.mean()),
            }
            for layer in chosen
        ]
    return {"attention": pd.DataFrame(rows)}


def _reached(lm: LM, under: Disrupt, deepest: int) -> bool:
    """Whether a forward that ends above layer ``deepest`` runs a layer that is disrupted."""
    attention = [layer.layer for layer in lm.anatomy.attention]
    return min(chosen_layers(under.layers, attention, "layers of attention")) <= deepest


@dataclass
class Watched:
    """An intervention whose measurements are added up over all the blocks that it is opened in."""

    how: Intervention
    measured: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, lm: LM, prompt: int | None = None) -> Iterator[Run]:
        with self.how.on(lm, prompt) as run:
            yield run
        for name, value in run.measured.items():
            self.measured[name] = self.measured.get(name, 0.0) + value


class _Kept:
    """Keeps the last call of each of some layers."""

    def __init__(self, layers: Sequence[int]):
        self._layers = layers
        self.calls: dict[int, AttentionCall] = {}

    def observe(self, call: AttentionCall) -> None:
        if call.layer in self._layers:
            self.calls[call.layer] = call


class _Divergence:
    """KL(clean ‖ seen) of attention in nats, mean over heads and queries, from clean calls kept by layer."""

    def __init__(self, clean: Mapping[int, AttentionCall], rows: int = 128):
        self._clean, self._rows = clean, rows
        self.kl: dict[int, float] = {}

    def observe(self, call: AttentionCall) -> None:
        if call.layer not in self._clean:
            return
        length = call.q.shape[2]
        total = 0.0
        for start in range(0, length, self._rows):
            some = slice(start, start + self._rows)
            p, q = (probabilities(c, some).double() for c in (self._clean[call.layer], call))
            total += float(torch.where(p > 0, p * (p.log() - q.clamp_min(1e-30).log()), 0).sum())
        self.kl[call.layer] = total / (call.q.shape[0] * call.q.shape[1] * length)
