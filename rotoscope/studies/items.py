"""The tasks of a study on one model: which of them it can be asked, and what that costs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM, evaluating
from rotoscope.tasks import find
from rotoscope.tasks.evaluate import prepared

# What generating an answer, or a task that is not ours to look into, is taken to cost.
_UNKNOWN_TOKENS = 512


@dataclass(frozen=True)
class Asked:
    """A task that a model can be asked: ``n`` items there are, ``tokens`` of all their prompts together."""

    spec: str
    n: int
    tokens: int


def asked(lm: LM, wanted: Mapping[str, int], seed: int) -> tuple[list[Asked], dict[str, str]]:
    """The tasks that fit the model, and why the others do not.

    Parameters
    ----------
    wanted : mapping
        Items of each task, by spec.

    Raises
    ------
    BadInput
        If there is no such task.
    """
    out, refused = [], {}
    for spec, n in wanted.items():
        task = find(spec)
        if hasattr(task, "evaluate"):  # another library makes its prompts
            out.append(Asked(spec, n, n * _UNKNOWN_TOKENS))
            continue
        try:
            prompts = prepared(lm, task, n=n, seed=seed).prompts
            if min(len(prompt.ids) for prompt in prompts) < 2:
                raise BadInput(f"{spec}: a prompt of one token has no earlier ones to change; write longer prompts")
        except BadInput as error:
            refused[spec] = str(error)
            continue
        longest = max(len(prompt.ids) for prompt in prompts) + task.new_tokens
        if lm.trained_length is None and not runs(lm, longest):
            refused[spec] = f"{spec} takes {longest} tokens, more than {lm.source} runs on"
            continue
        out.append(Asked(spec, len(prompts), sum(len(prompt.ids) for prompt in prompts)))
    return out, refused


def runs(lm: LM, tokens: int) -> bool:
    """Whether a model runs so many tokens; tried, once, only where its trained length is not known."""
    if lm.trained_length is not None:
        return tokens <= lm.trained_length
    known = _RUNS.setdefault(lm.model, {})
    if tokens not in known:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=lm.device)
        try:
            with torch.no_grad(), evaluating(lm.model):
                lm.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            known[tokens] = True
        except (RuntimeError, IndexError):  # a table of positions, or of distances, ends before
            known[tokens] = False
    return known[tokens]


_RUNS: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()


def labels(spec: str) -> dict[str, str]:
    """The columns that name a task in tables."""
    task = find(spec)
    return {"task": task.name, "variant": task.variant}


def slug(*parts: str) -> str:
    """Part of a cell's name from a task's spec or an arm's label; different texts give different names."""
    return "-".join(_slug(part) for part in parts)


def _slug(text: str) -> str:
    plain = re.sub(r"[: ]", "-", text)
    if re.fullmatch(r"\w[\w.+=-]*", plain, re.ASCII):
        return plain
    readable = re.sub(r"[^A-Za-z0-9.+=]+", "-", plain).strip("-.")
    return f"{readable[-80:].lstrip('-.')}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
