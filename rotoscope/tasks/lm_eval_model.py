"""The model `rotoscope` for lm-eval: whatever `rotoscope.load` takes, with an intervention around every call.

Only imported where lm-eval is in use.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from rotoscope.errors import BadInput
from rotoscope.interventions import parse
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.loading import load
from rotoscope.tasks.forward import Row, Scored, score

_Request = tuple[tuple[str, str] | None, list[int], list[int]]
_Answer = tuple[float, bool]


@register_model("rotoscope")
class Rotoscope(HFLM):
    """lm-eval's own model for transformers, its prompts, stops and chat templates unchanged, under an intervention.

    Continuations are scored as `rotoscope.evaluate` scores answers: batches have an attention mask and prompts that end
    in the same column, so that an intervention sees neither padding nor, where it chooses, the continuation. Without an
    intervention the scores are those of lm-eval's ``hf`` to rounding.

    Parameters
    ----------
    pretrained : str or LM
        ``demo``, a hub id, a folder, a ``.gguf`` file; or a model in hand.
    intervention : str or object, optional
        As the command line takes it, such as ``disrupt:selection=top-1:targets=QK``; or anything with
        ``on(lm, prompt=…)``.
    device : str, optional
        As for `rotoscope.load`. A CUDA device that is not there, which is lm-eval's default, means the CPU.
    dtype, revision, trust_remote_code, trained_length
        As for `rotoscope.load`.
    **options
        As for ``hf``: ``batch_size``, ``max_length``, ``add_bos_token``, ``prefix_token_id``, …

    Raises
    ------
    BadInput
        If the model has no tokenizer, or the intervention cannot be read.
    """

    def __init__(
        self,
        pretrained: str | LM = "demo",
        intervention: Any = None,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        trained_length: int | None = None,
        **options: Any,
    ):
        if isinstance(pretrained, LM):
            self.lm = pretrained
        else:
            here = None if device and device.startswith("cuda") and not torch.cuda.is_available() else device
            self.lm = load(
                pretrained, device=here, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code,
                trained_length=trained_length,
            )  # fmt: skip
        if self.lm.tokenizer is None:
            raise BadInput(f"{self.lm.source} has no tokenizer, which lm-eval needs")
        if self.lm.tokenizer.eos_token_id is None:
            raise BadInput(f"{self.lm.source}: lm-eval needs a token that ends a text; set tokenizer.eos_token")
        self.intervention = parse(intervention) if isinstance(intervention, str) else intervention
        tokenizer = copy.deepcopy(self.lm.tokenizer)  # a pad token is added to it, and the user's is left alone
        with _without_warnings(), evaluating(self.lm.model):
            super().__init__(pretrained=self.lm.model, tokenizer=tokenizer, backend="causal", **options)

    def get_model_info(self) -> dict[str, Any]:
        """What results record of the model: no look-up on the hub, the intervention as it was."""
        model = self.lm.model
        return {
            "model_source": self.lm.source,
            "model_num_parameters": sum(p.numel() for p in model.parameters()),
            "model_dtype": model.dtype,
            "model_revision": self.lm.revision,
            "model_sha256": self.lm.file_hash,
            "intervention": None if self.intervention is None else str(self.intervention),
        }

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[_Answer]:
        """Sum of log-probabilities (nats) and whether greedy, in the order of the requests.

        One-token continuations of one context are one row.
        """
        rows, places = _rows(requests, self.max_length)
        size = override_bs or (self._detect_batch_size() if self.batch_size == "auto" else int(self.batch_size))
        longest = max((len(row.prompt) + len(row.answer) for row in rows), default=0)
        # A text that is scored as a whole has no prompt; lm-eval passes it without the strings.
        under = _Whole(self.intervention) if self.intervention and requests[0][0] is None else self.intervention
        with evaluating(self.lm.model), torch.no_grad(), self._autocast():
            scored = score(self.lm, rows, under, batch_tokens=size * longest)
        answers = [_answer(scored[row], nth) for row, nth in places]
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def _autocast(self) -> torch.autocast:
        kind = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=kind, enabled=kind is not None)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        on = nullcontext() if self.intervention is None else self.intervention.on(self.lm, prompt=context.shape[1])
        with evaluating(self.lm.model), on:
            return cast(torch.Tensor, super()._model_generate(context, max_length, stop, **options))


class _Whole(NamedTuple):
    """An intervention on texts without a prompt."""

    intervention: Any

    def on(self, lm: LM, prompt: int | None = None) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self.intervention.on(lm, prompt=None))


def _rows(requests: Sequence[_Request], longest: int) -> tuple[list[Row], list[tuple[int, int]]]:
    """Rows to score, and for each request its row and which of the row's first tokens it asks for.

    Contexts are cut on the left to what fits, as lm-eval does.
    """
    rows: list[Row] = []
    places: list[tuple[int, int]] = []
    shared: dict[tuple[int, ...], int] = {}
    for _, context, continuation in requests:
        prompt, answer = tuple(context[-max(longest + 1 - len(continuation), 1) :]), tuple(continuation)
        if len(answer) == 1 and prompt in shared:
            at = shared[prompt]
            rows[at] = replace(rows[at], also=(*rows[at].also, *answer))
        else:
            at = len(rows)
            rows.append(Row(prompt, answer, answer[:1]))
            if len(answer) == 1:
                shared[prompt] = at
        places.append((at, len(rows[at].also) - 1))
    return rows, places


def _answer(scored: Scored, nth: int) -> _Answer:
    if len(scored.row.answer) > 1:
        return scored.logprob, scored.exact
    return scored.also[nth], scored.likeliest == scored.row.also[nth : nth + 1]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """lm-eval warns of every model in hand that it will not be spread over processes."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
