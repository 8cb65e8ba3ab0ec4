"""Scoring of generated answers: anchored at their beginning, never by whether a word occurs somewhere.

A long answer says many things; what it says first, or after "the answer is", is what it answers.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

# Where a chat model's turn ends, or where a plain one goes on to ask itself the next question.
_END = re.compile(r"<\|[^|<>]*\|>|</s>|<eos>|<end_of_turn>|<pad>|\[/?INST\]|\n\s*(?:question|q|user|human)\s*:", re.I)
_TURN = re.compile(r"\s*(?:(?:<s>|<bos>|\[/INST\]|<\|[^|<>]*\|>|<start_of_turn>)\s*(?:assistant|model)?\s*)+", re.I)
_ANNOUNCED = re.compile(
    r"(?:so |thus |therefore )?,?\s*(?:the |my )?(?:final |correct )?(?:answer|a)\s*(?:is\s*:?|:)\s*"
    r"|(?:it|that|this)(?:\s+is|['’]s)\s+",
    re.I,
)
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-−])?[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?", re.I
)


_YES = ("yes", "yeah", "yep", "true", "correct", "right")
_NO = ("no", "nope", "nah", "false", "incorrect", "wrong")


def cleaned(answer: str) -> str:
    """An answer without chat markers, markdown emphasis, what follows its end, and blanks around it."""
    start = _TURN.match(answer)
    answer = answer[start.end() :] if start else answer
    answer = re.split(_END, answer.lstrip(), maxsplit=1)[0]
    return re.sub(r"[*_`]+", "", answer).strip().strip("\"'“”‘’").strip()


def yes_no(answer: str) -> str | None:
    """``"yes"``, ``"no"``, or None where an answer begins with neither, or with both.

    "Yes, no doubt: no" is yes, "not right" is no, "Tokyo is OK", "yesterday", "no idea" and "yes or no" are neither.
    """
    text = _announced(cleaned(answer)).casefold()
    found = re.match(rf"(not\s+)?({'|'.join((*_YES, *_NO))})(?![\w’'-])", text)
    if not found:
        return None
    rest = text[found.end() :]
    if re.match(r"\s*(?:and|or|/)\s*(?:yes|no|true|false)\b", rest):
        return None
    if found[2] == "no" and re.match(r"\s+\w", rest):  # "no idea", "no city": a word about something else
        return None
    return "yes" if (found[2] in _YES) != bool(found[1]) else "no"


def one_of(answer: str, options: Sequence[str]) -> str | None:
    """The option that an answer begins with, as whole words; the longest where several do."""
    fitting = [option for option in options if begins_with(answer, option)]
    return max(fitting, key=len, default=None)


def letter(answer: str, options: str = "ABCDE") -> str | None:
    """The letter of a multiple choice: "B", "(b)", "B) 21", "The answer is B."; "A car" is none."""
    text = _announced(cleaned(answer))
    strict = re.match(rf"[(\[]([{options}{options.lower()}])[)\]]|([{options}])(?=$|[).:,;\]\n]|\s+[^a-z])", text)
    found = strict or re.match(rf"()([{options.lower()}])(?=$|[).:])", text)
    return (found[1] or found[2]).upper() if found else None


def final_number(answer: str) -> float | None:
    """The number that an answer comes to: after "####", else after "the answer is", else the last one in it.

    Thousands' commas, currencies, signs, and whatever stands after the number do not matter.
    """
    text = cleaned(answer)
    marks = list(re.finditer(r"####|\banswer\s*(?:is\s*:?|:|=)", text, re.I))
    if marks and (after := _NUMBER.search(text, marks[-1].end())):
        return _value(after[0])
    every = _NUMBER.findall(text)
    return _value(every[-1]) if every else None


def begins_with(answer: str, gold: str) -> bool:
    """Whether an answer begins with the right one as whole words, in any case; "12345." does, "123456" does not."""
    wanted = _words(cleaned(gold))
    ends = r"(?![\w’'-]|[.,]\d)" if wanted[-1:].isalnum() else ""
    texts = (_words(cleaned(answer)), _words(_announced(cleaned(answer))))
    return bool(wanted) and any(re.match(re.escape(wanted) + ends, text) for text in texts)


def line(answer: str) -> str:
    """The first line of an answer that has something in it."""
    return cleaned(answer).partition("\n")[0].strip()


def exact(answer: str, gold: str) -> float:
    """1 if an answer is the right one, compared as in SQuAD, else 0."""
    return float(normalised(cleaned(answer)) == normalised(gold))


def f1(answer: str, gold: str) -> float:
    """Overlap in words with the right answer, as in SQuAD: harmonic mean of precision and recall."""
    return _overlap(normalised(cleaned(answer)).split(), normalised(gold).split())


def normalised(text: str) -> str:
    """As SQuAD compares answers: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _overlap(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    shared = sum((Counter(answer) & Counter(gold)).values())
    return 2 * shared / (len(answer) + len(gold))


def _announced(text: str) -> str:
    """What follows "The answer is", where a text begins so."""
    found = _ANNOUNCED.match(text)
    return text[found.end() :] if found else text


def _words(text: str) -> str:
    return " ".join(text.casefold().split())


def _value(text: str) -> float:
    return float(re.sub(r"[^\d.e+-]", "", text.lower().replace("−", "-")))
