"""What the depth study runs: sweeps over tasks, swaps between prompts, and the time that a shallow prefill saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from rotoscope.engine import Cell
from rotoscope.errors import BadInput, Refused
from rotoscope.interventions import shallow_prefill
from rotoscope.interventions.swap import spanned
from rotoscope.interventions.sweep import Prompts, Sweep
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.prompts import takes
from rotoscope.studies.depth_plan import NOISE_BUT_0, Plan, depths, manipulations, plan
from rotoscope.studies.items import Asked, asked, runs, slug
from rotoscope.studies.observe import Tables
from rotoscope.studies.options import BATCH_TOKENS, Options
from rotoscope.studies.swap_pairs import SETS, Side, chosen
from rotoscope.tasks import find
from rotoscope.tasks.evaluate import prepared
from rotoscope.tasks.forward import Row, Scored, batches_of, read

TASK, SWAP, COST = "depth/task", "depth/swap", "depth/cost"
CLEAN = "clean"
# Token-forwards per token and depth, from `benchmarks/sweep.py`: what is above layer k, and how much of it runs.
_SHARE = {"freeze": 0.14, "skip": 0.06}
_RESUMED = 0.55
_PREFILL_TOKENS, _ROUNDS = (512, 256, 128, 64, 32), 3
_ROWS = 8
"""Tokens of a batch for each row that the skip sweep runs at once."""


def cells(lm: LM, options: Options) -> list[Cell]:
    """One sweep per task, one set of swaps each, and a few timed prefills."""
    of_size, layers = plan(options), len(lm.anatomy.layers)
    if not lm.anatomy.attention or lm.tokenizer is None:
        return []
    tasks, _ = asked(lm, sweepable(of_size.tasks), options.seed)
    out = [_swept(task, manipulations(of_size, layers, task.spec), options) for task in tasks]
    out += [_swapped(name, of_size, layers, options) for name in SETS]
    ks = sorted({layers // 4, layers // 2, 3 * layers // 4})
    most = _PREFILL_TOKENS[options.size == "quick" :]
    tokens = next((n for n in most if runs(lm, n + 1)), 2)
    cost = _ROUNDS * tokens * (len(ks) + 1.0)
    return [*out, Cell(COST, prefill, {"ks": ks, "tokens": tokens, "seed": options.seed}, cost, optional=True)]


def sweepable(tasks: Mapping[str, int]) -> dict[str, int]:
    """The tasks whose answers are scored by likelihood: what is generated would have to be swept token by token."""
    return {spec: n for spec, n in tasks.items() if _by_likelihood(spec)}


def _by_likelihood(spec: str) -> bool:
    task = find(spec)
    return task.scoring != "generate" and not hasattr(task, "evaluate")


def _swept(task: Asked, ks: Mapping[str, Sequence[int]], options: Options) -> Cell:
    arguments = {"spec": task.spec, "n": task.n, "seed": options.seed, "ks": ks}
    forwards = 1 + sum(_SHARE.get(name, _RESUMED) * len(some) for name, some in ks.items())
    return Cell(f"{TASK}/{slug(task.spec)}", sweep, arguments, forwards * task.tokens, BATCH_TOKENS, optional=True)


def _swapped(name: str, of_size: Plan, layers: int, options: Options) -> Cell:
    ks = depths(layers, of_size.some)
    arguments = {"name": name, "n": of_size.pairs, "seed": options.seed, "ks": ks}
    cost = 12.0 * of_size.pairs * (2 + _RESUMED * len(ks))
    return Cell(f"{SWAP}/{name}", swap, arguments, cost, BATCH_TOKENS, optional=True)


def sweep(lm: LM, spec: str, n: int, seed: int, ks: Mapping[str, Sequence[int]], at_once: int) -> Tables:
    """A task's items under every manipulation at its depths, and clean (k = L)."""
    items = prepared(lm, find(spec), n=n, seed=seed)
    found: dict[tuple[str, int], dict[int, Scored]] = {}
    for batch in batches_of(items.rows, at_once):
        rows = [items.rows[i] for i in batch]
        for places, of_batch in _swept_batches(lm, rows):
            some = [rows[i] for i in places]
            for name, k, logits in _depths(of_batch, ks, seed, at_once // _ROWS):
                scored = found.setdefault((name, k), {})
                told = read(some, logits[:, : len(some[0].answer)])
                scored.update(zip([batch[i] for i in places], told, strict=True))
    tables = [
        items.table([scored[i] for i in range(len(items.rows))]).assign(manipulation=name, k=k)
        for (name, k), scored in found.items()
    ]
    columns = ["task", "variant", "manipulation", "k", "id", "correct", "logprob", "chance", "prompt_tokens"]
    return {"depth_items": pd.concat(tables, ignore_index=True)[columns]}


def _swept_batches(lm: LM, rows: Sequence[Row]) -> Iterator[tuple[list[int], Sweep]]:
    """Rows of one batch, together; each alone where the model gives NaN to rows beside longer ones."""
    of_batch = Sweep.over(lm, Prompts.of([row.prompt for row in rows], [row.answer[:-1] for row in rows]))
    if len(rows) == 1 or not of_batch.past.clean.isnan().any():
        yield list(range(len(rows))), of_batch
        return
    for i, row in enumerate(rows):
        yield from (([i], alone) for _, alone in _swept_batches(lm, [row]))


def _depths(
    of_batch: Sweep, ks: Mapping[str, Sequence[int]], seed: int, rows: int
) -> Iterator[tuple[str, int, torch.Tensor]]:
    yield CLEAN, of_batch.past.depth, of_batch.past.clean
    for name, some in ks.items():
        if name == NOISE_BUT_0:
            swept = Sweep(replace(of_batch.past, exempt_first=True)).noise(some, seed)
        elif name in ("noise", "shuffle"):
            swept = getattr(of_batch, name)(some, seed)
        elif name == "skip":
            swept = of_batch.skip(some, max(1, rows))
        else:
            swept = of_batch.freeze(some)
        for k, logits in swept:
            yield name, k, logits


def swap(lm: LM, name: str, n: int, seed: int, ks: Sequence[int], at_once: int) -> Tables:
    """Pairs of one set whose two clean answers are right: which answer wins when the word's states are the donor's."""
    found = [(side, places) for side in SETS[name](lm) if (places := _places(lm, side))]
    sides, where_word = [side for side, _ in found], [own for _, own in found]
    ids = [lm.encode(side.prompt).tolist() for side in sides]
    answers = [_first_id(lm, side) for side in sides]
    right = _right(lm, ids, answers, at_once)
    known = [i for i, ok in enumerate(right) if ok]
    pairs = [(known[a], known[b]) for a, b in chosen([(len(where_word[i]), answers[i]) for i in known], n, seed)]
    rows: list[tuple[int, str, int]] = []
    size = max(1, at_once // max(map(len, ids), default=1))
    for start in range(0, len(pairs), size):
        some = pairs[start : start + size]
        own, donor = (Sweep.over(lm, Prompts.of([ids[p[side]] for p in some])) for side in (0, 1))
        where, source = (_where(s, [where_word[p[i]] for p in some]) for i, s in enumerate((own, donor)))
        for k, logits in own.swap(ks, donor, where, source):
            told = logits[:, 0].argmax(-1).tolist()
            for pair, (a, b), token in zip(range(start, len(pairs)), some, told, strict=False):
                rows.append((k, _whose(token, answers[a], answers[b]), pair))
    table = pd.DataFrame(rows, columns=["k", "said", "pair"])
    counts = {"set": name, "prompts": len(sides), "right": len(known), "pairs": len(pairs)}
    return {"swap_items": table.assign(set=name), "swap_counts": pd.DataFrame([counts])}


def _places(lm: LM, side: Side) -> list[int]:
    """The tokens of a prompt's word, counted from the first; none if it stands there twice, or no token shows it."""
    if side.prompt.count(side.word) != 1:
        return []
    with suppress(BadInput):
        return spanned(lm, lm.encode(side.prompt).tolist(), side.word)
    return []


def _first_id(lm: LM, side: Side) -> int:
    """The id with which the answer begins behind its prompt."""
    prompt, whole = (lm.encode(text).tolist() for text in (side.prompt, f"{side.prompt} {side.answer}"))
    if whole[: len(prompt)] == prompt:
        return int(whole[len(prompt)])
    return int(lm.tokenizer(f" {side.answer}", add_special_tokens=False).input_ids[0])


@torch.no_grad()
def _right(lm: LM, ids: Sequence[Sequence[int]], answers: Sequence[int], at_once: int) -> list[bool]:
    size = max(1, at_once // max(map(len, ids), default=1))
    out: list[bool] = []
    for start in range(0, len(ids), size):
        clean = Sweep.over(lm, Prompts.of(ids[start : start + size])).past.clean
        told = clean[:, 0].argmax(-1).tolist()
        out += [token == answer for token, answer in zip(told, answers[start : start + size], strict=True)]
    return out


def _where(of_batch: Sweep, places: Sequence[Sequence[int]]) -> torch.Tensor:
    """Boolean ``[batch, tokens]``: each row's places, counted from its first real token."""
    mask = of_batch.past.prompts.mask.bool()
    out = torch.zeros_like(mask)
    for row, own in enumerate(places):
        out[row, mask[row].nonzero()[:, 0][list(own)]] = True
    return out


def _whose(token: int, original: int, donor: int) -> str:
    return "original" if token == original else "donor" if token == donor else "other"


def prefill(lm: LM, ks: Sequence[int], tokens: int, seed: int) -> Tables:
    """Seconds to the first token, plainly and with prefill that stops at each depth: medians of interleaved rounds."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, lm.anatomy.vocabulary, (1, tokens), generator=generator).to(lm.device)

    def once(k: int | None) -> float:
        started = perf_counter()
        with torch.no_grad(), evaluating(lm.model):
            if k is None:
                _first_token(lm, ids)
            else:
                with shallow_prefill(lm, k):
                    _first_token(lm, ids)
        return perf_counter() - started

    try:
        times: dict[int | None, list[float]] = {k: [] for k in (None, *ks)}
        for _ in range(_ROUNDS):
            for k, own in times.items():
                own.append(once(k))
    except (BadInput, Refused) as error:  # no cache, or none that could be filled
        return {"prefill_refused": pd.DataFrame({"reason": [str(error)]})}
    rows = [(k, median(times[k]), median(times[None]), tokens) for k in ks]
    return {"prefill": pd.DataFrame(rows, columns=["k", "seconds", "full_seconds", "tokens"])}


def _first_token(lm: LM, ids: torch.Tensor) -> Any:
    keep = {"logits_to_keep": 1} if "logits_to_keep" in takes(lm.model) else {}
    return lm.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **keep)
