"""How an example becomes token ids: the prompt, with or without a chat template, and what would continue it."""

from __future__ import annotations

from dataclasses import dataclass

from rotoscope.errors import BadInput
from rotoscope.model.lm import LM
from rotoscope.tasks.base import Example


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it.

    Attributes
    ----------
    text, ids
        The whole prompt, and its ids with whatever the tokenizer puts in front.
    special
        Whether the tokenizer adds its special tokens to `text`; a chat template has written them already.
    joint
        What stands between the prompt and the answer: a space, or nothing where a message begins with the answer.
    """

    text: str
    ids: tuple[int, ...]
    special: bool
    joint: str


def prompt_of(lm: LM, example: Example, template: bool = False) -> Prompt:
    """The prompt of an example, as plain text or as a user's message with the assistant's answer begun.

    Raises
    ------
    BadInput
        If there is no tokenizer, or `template` is set and the tokenizer has none.
    """
    if not template:
        return Prompt(example.prompt, tuple(lm.encode(example.prompt).tolist()), True, " ")
    if not getattr(lm.tokenizer, "chat_template", None):
        raise BadInput(f"{lm.source} has no chat template: leave the template off")
    message = [{"role": "user", "content": example.prompt.removesuffix(example.lead).rstrip()}]
    text = lm.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) + example.lead
    return Prompt(text, plain_ids(lm, text), False, " " if example.lead else "")


def answer_of(lm: LM, prompt: Prompt, answer: str) -> tuple[int, ...]:
    """Ids by which an answer continues a prompt.

    Prompt and answer are encoded together, since some tokenizers mark the start of every text that they are given;
    where that moves the prompt's own ids, the answer is encoded alone.
    """
    text = prompt.text + prompt.joint + answer
    whole = tuple(lm.encode(text).tolist()) if prompt.special else plain_ids(lm, text)
    cut = len(prompt.ids)
    if len(whole) > cut and whole[:cut] == prompt.ids:
        return whole[cut:]
    return plain_ids(lm, prompt.joint + answer)


def plain_ids(lm: LM, text: str) -> tuple[int, ...]:
    """Ids of a text without special tokens around it."""
    if lm.tokenizer is None:
        lm.encode(text)  # raises
    return tuple(lm.tokenizer(text, add_special_tokens=False).input_ids)


def opening(lm: LM, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of an answer up to the first one that shows: some tokenizers have the space before a word as a token."""
    for i in range(1, len(ids)):
        if lm.tokenizer.decode(ids[:i]).strip():
            return ids[:i]
    return ids


def begins_alike(lm: LM, a: str, b: str) -> bool:
    """Whether two answers cannot be told apart by their first tokens."""
    first = opening(lm, plain_ids(lm, " " + a))
    return plain_ids(lm, " " + b)[: len(first)] == first
