"""What lm-eval asks and what came of it, item by item, in rotoscope's own terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rotoscope.errors import BadInput
from rotoscope.tasks.base import Example

Sample = Mapping[str, Any]
"""What lm-eval logs of one item under one filter."""

_METRICS = ("acc", "exact_match", "em", "f1")
"""Which of a task's metrics is an item's score, the first that it has; otherwise its first number within 0 and 1."""


class Item(NamedTuple):
    """One item: the context that is judged, the accepted answers, the choices (if any), which of them is right."""

    context: str
    gold: tuple[str, ...]
    choices: tuple[str, ...] = ()
    right: int = 0


def item(task: Any, doc: Any, requests: Sequence[Sequence[Any]]) -> Item:
    """From a task of lm-eval, one of its documents, and the arguments of the requests that it makes of that.

    Raises
    ------
    BadInput
        If the task scores whole texts, so that there is neither prompt nor answer.
    """
    kind = task.OUTPUT_TYPE
    if kind == "loglikelihood_rolling":
        raise BadInput(f"lm_eval:{task.task_name} measures perplexity; tasks here have items that are right or wrong")
    if kind == "loglikelihood":
        return Item(requests[0][0], (requests[0][1].strip(),))
    if kind == "multiple_choice":
        choices = [str(choice) for choice in task.doc_to_choice(doc)]
        right = _index(task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc), choices)
        return Item(requests[right][0], (choices[right].strip(),), tuple(c.strip() for c in choices), right)
    target = task.doc_to_target(doc)
    if task.config.doc_to_choice is not None:
        target = task.doc_to_choice(doc)[target]
    gold = target if isinstance(target, list) else [target]
    return Item(requests[0][0], tuple(str(g).strip() for g in gold))


def _index(target: Any, choices: Sequence[str]) -> int:
    first = target[0] if isinstance(target, list) else target
    return choices.index(first) if isinstance(first, str) else int(first)


def example(task: Any, index: int, doc: Any) -> Example:
    """The item as an example, its few-shot examples in front."""
    task.build_all_requests(samples=[index], rank=0, world_size=1)
    found = item(task, doc, [request.args for request in task.instances])
    return Example(f"{task.task_name}-{index}", found.context.rstrip(" "), found.gold, found.choices)


def row(task: Any, model: Any, sample: Sample) -> dict[str, Any]:
    """The columns of `rotoscope.evaluate` that depend on the item."""
    requests = sample["arguments"]
    found = item(task, sample["doc"], requests)
    prompt = model.tok_encode(found.context)
    answer, logprob, tokens = _answered(task, model, sample, found)
    return {
        "id": f"{task.task_name}-{sample['doc_id']}",
        "correct": _score(task, sample),
        "logprob": logprob,
        "gold_tokens": tokens,
        "prompt_tokens": len(prompt),
        "chance": 1 / len(found.choices) if found.choices else 0.0,
        "gold": found.gold[0],
        "answer": answer,
        "first_ids": prompt[:4],
    }


def _answered(task: Any, model: Any, sample: Sample, found: Item) -> tuple[str, float, int]:
    """The answer, the log-likelihood of the right one (nats), and the number of its tokens."""
    kind = task.OUTPUT_TYPE
    if kind == "generate_until":
        pair = (found.context, task.config.target_delimiter + found.gold[0])
        answer = _text(sample["filtered_resps"][0])
        return answer, _logprob(model, pair), _tokens(model, *pair)
    context, continuation = sample["arguments"][found.right][:2]
    scores = [responses[0] for responses in sample["resps"]]
    logprob, greedy = scores[found.right]
    if kind == "loglikelihood":
        answer = found.gold[0] if greedy else ""
    else:
        of_choices = [score for score, _ in scores[: len(found.choices)]]
        answer = found.choices[of_choices.index(max(of_choices))]
    return answer, float(logprob), _tokens(model, context, continuation)


def _text(answer: Any) -> str:
    return str(answer[0] if isinstance(answer, list | tuple) else answer).strip()


def _tokens(model: Any, context: str, continuation: str) -> int:
    return len(model._encode_pair(context, continuation)[1])


def _logprob(model: Any, pair: tuple[str, str]) -> float:
    from lm_eval.api.instance import Instance

    request = Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0)
    return float(model.loglikelihood([request], disable_tqdm=True)[0][0])


def _score(task: Any, sample: Sample) -> float:
    order = (*(m for m in _METRICS if m in sample["metrics"]), *sample["metrics"])
    for metric in order:
        value = sample[metric]
        if isinstance(value, int | float) and 0 <= value <= 1:
            return float(value)
    raise BadInput(f"lm_eval:{task.task_name} has no metric from 0 to 1 for single items, only {', '.join(order)}")
