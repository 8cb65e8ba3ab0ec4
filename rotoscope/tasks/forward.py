"""Batches through a model: how likely given answers are, and what it generates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.model.prompts import takes
from rotoscope.model.quiet import quiet

# What a model's own settings could make greedy generation something else by.
_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "cache_implementation": None,
    "min_length": 0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "renormalize_logits": False,
    "return_dict_in_generate": False,
    "token_healing": False,
    **dict.fromkeys(
        (
            "min_new_tokens", "max_time", "stop_strings", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
            "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "exponential_decay_length_penalty",
            "guidance_scale", "watermarking_config", "encoder_no_repeat_ngram_size", "prompt_lookup_num_tokens",
        )
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A prompt with an answer that continues it; ``also``: further ids to compare with the answer's first."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    also: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scored:
    """What the model makes of a row.

    Attributes
    ----------
    logprob
        Of the answer, summed over its tokens, nats.
    likeliest
        The most likely id in each token's place, given the answer's tokens before it.
    also
        Log-probabilities of the row's further ids in the place of the first token.
    """

    row: Row
    logprob: float
    likeliest: tuple[int, ...]
    also: tuple[float, ...]

    @property
    def exact(self) -> bool:
        """Whether greedy generation would give just this answer."""
        return self.likeliest == self.row.answer


def score(lm: LM, rows: Sequence[Row], under: Any = None, batch_tokens: int = 2048) -> list[Scored]:
    """Every row, in their order, from batches of answers of one length: no row has padding after its text."""
    if any(len(row.answer) > 1 for row in rows) and _all_previous(under):
        raise BadInput(
            "with scope all-previous, answers of several tokens cannot be scored in one forward: use scope prompt, "
            "or a task that is judged by the first token"
        )
    out: dict[int, Scored] = {}
    for batch in batches_of(rows, batch_tokens):
        told = list(_score(lm, [rows[i] for i in batch], under))
        if any(isnan(scored.logprob) for scored in told):  # some models' eager attention, of padding in float64
            told = [scored for i in batch for scored in _score(lm, [rows[i]], under)]
        out |= zip(batch, told, strict=True)
    return [out[i] for i in range(len(rows))]


def _all_previous(under: Any) -> bool:
    """Whether an intervention changes every token but the last one of a forward, answers among them."""
    parts = getattr(under, "parts", (under,))
    return any(getattr(part, "scope", None) == "all-previous" for part in parts)


def batches_of(rows: Sequence[Row], tokens: int) -> Iterator[list[int]]:
    """Indices of rows whose answers have one length, and prompts similar ones: at most so many tokens, or one row."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        lengths[len(row.answer)].append(i)
    for length, members in sorted(lengths.items()):
        for batch in _batches([len(rows[i].prompt) + length - 1 for i in members], tokens):
            yield [members[j] for j in batch]


def read(rows: Sequence[Row], logits: torch.Tensor) -> Iterator[Scored]:
    """What logits ``[rows, answer, vocabulary]``, the first from the last prompt token, say of rows' answers."""
    for row, own in zip(rows, logits, strict=True):
        own = own if own.dtype == torch.float64 else own.float()
        likely = own.log_softmax(-1)
        answer = torch.tensor(row.answer, device=own.device)
        yield Scored(
            row,
            likely.gather(-1, answer[:, None]).sum().item(),
            tuple(own.argmax(-1).tolist()),
            tuple(likely[0, list(row.also)].tolist()),
        )


def generate(
    lm: LM, prompts: Sequence[tuple[int, ...]], new_tokens: int, under: Any = None, batch_tokens: int = 2048
) -> list[tuple[int, ...]]:
    """What the model continues each prompt with, greedily: at most so many ids, those that end a text left out."""
    out: dict[int, tuple[int, ...]] = {}
    if lm.dtype == torch.float64:  # in which padding becomes NaN on some models
        batch_tokens = 1
    for batch in _batches([len(p) + new_tokens for p in prompts], batch_tokens):
        ids, mask = _padded(lm, [prompts[i] for i in batch])
        with quiet(), _on(under, lm, ids.shape[1]):
            made = lm.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=_padding(lm), **_GREEDY
            )
        ends = _ends(lm)
        for i, row in zip(batch, made[:, ids.shape[1] :].tolist(), strict=True):
            out[i] = tuple(row[: next((j for j, token in enumerate(row) if token in ends), len(row))])
    return [out[i] for i in range(len(prompts))]


def _score(lm: LM, rows: Sequence[Row], under: Any) -> Iterator[Scored]:
    ids, mask = _padded(lm, [row.prompt for row in rows])
    answers = torch.tensor([row.answer for row in rows], device=ids.device)
    length = answers.shape[1]
    mask = torch.cat([mask, torch.ones_like(answers[:, :-1])], 1)
    given: dict[str, Any] = {
        "input_ids": torch.cat([ids, answers[:, :-1]], 1),
        "attention_mask": mask,
        "use_cache": False,
    }
    taken = takes(lm.model)
    if "position_ids" in taken:
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    if "logits_to_keep" in taken:
        given["logits_to_keep"] = length
    with _on(under, lm, len(ids[0])):
        logits = lm.model(**given).logits[:, -length:]
    yield from read(rows, logits)


def _batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of rows of similar length, each batch at most so many tokens with its padding, or a single row."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _padded(lm: LM, rows: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows side by side, padded on the left, and which ids are real."""
    width = max(map(len, rows))
    ids = [[_padding(lm)] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=lm.device), torch.tensor(mask, device=lm.device)


def _padding(lm: LM) -> int:
    """An id that every model can embed; masked, so that it does not matter which."""
    own = lm.tokenizer.pad_token_id
    return own if own is not None and own < lm.anatomy.vocabulary else 0


def _ends(lm: LM) -> set[int]:
    """Ids at which the model's own generation stops."""
    own = lm.model.generation_config.eos_token_id
    return set(own if isinstance(own, list) else [own])


def _on(under: Any, lm: LM, prompt: int) -> AbstractContextManager[Any]:
    return nullcontext() if under is None else under.on(lm, prompt=prompt)
