"""What a task is: examples with one right answer each, one way of scoring, one chance level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rotoscope.errors import BadInput

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

Scoring = Literal["first", "exact", "choice", "generate"]
"""How an answer is judged. ``first``: the gold answer's first token is the most likely one. ``exact``: every token of
the gold answer is, each given those before it, which is greedy generation of exactly that answer. ``choice``: the gold
one of the choices has the highest log-likelihood. ``generate``: what greedy generation gives is scored by the task."""

Knowledge = Literal["parametric", "contextual", "reasoning"]
"""Where the answer is: in the weights, in the prompt, or to be worked out."""


@dataclass(frozen=True)
class Example:
    """One item of a task.

    Attributes
    ----------
    id
        Unique within the task for all seeds that give this item.
    prompt
        The whole text that the model continues, without a trailing space.
    gold
        Accepted answers, without a leading space; the likelihood of the first one is measured.
    choices
        For multiple choice, all continuations that are compared; ``gold[0]`` is one of them.
    lead
        The end of ``prompt`` that begins the answer ("The capital of France is"). Under a chat template what stands
        before it is the user's message, and the assistant's begins with it.
    facts
        What the item was made from: distance, depth, digits, distractor.
    """

    id: str
    prompt: str
    gold: tuple[str, ...]
    choices: tuple[str, ...] = ()
    lead: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task(ABC):
    """A kind of question. A subclass is a frozen dataclass whose fields are the task's parameters.

    Class attributes
    ----------------
    name, summary
        What users type; one line for lists.
    knowledge
        Where the answer is.
    scoring
        How it is judged.
    new_tokens
        Most tokens that generation may take.
    metric
        What the score is called: accuracy unless it is F1, ROUGE, …
    reads_files
        Whether ``NAME:FILE`` gives it a local file to read.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    knowledge: ClassVar[Knowledge]
    scoring: ClassVar[Scoring]
    new_tokens: ClassVar[int] = 16
    metric: ClassVar[str] = "accuracy"
    reads_files: ClassVar[bool] = False

    @abstractmethod
    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        """``n`` items, the same bytes for the same seed; fewer where there are no more distinct ones."""

    def chance(self, example: Example) -> float:
        """The score that guessing would give on this item: 0 for open answers."""
        return 1 / len(example.choices) if example.choices else 0.0

    def score(self, example: Example, answer: str) -> float:
        """0 to 1 for a generated answer (``scoring = "generate"`` only)."""
        raise TypeError(f"{self.name} is not scored by generation")

    @property
    def variant(self) -> str:
        """The parameters that differ from their defaults, as users type them: ``filler=48``."""
        return ":".join(f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default)

    @property
    def spec(self) -> str:
        """Name and variant, as `find` reads them."""
        return ":".join(filter(None, (self.name, self.variant)))


def parameters(kind: type[Task], text: str) -> dict[str, Any]:
    """``filler=48:seed=1`` as keyword arguments of a task, by the types of its fields' defaults.

    Raises
    ------
    BadInput
        If the task has no such parameter, or the value is not of its type.
    """
    known = {f.name: f for f in fields(kind)}
    out: dict[str, Any] = {}
    for part in filter(None, text.split(":")):
        name, _, value = part.partition("=")
        if name not in known or not value:
            takes = ", ".join(f"{f.name}={f.default}" for f in known.values()) or "none"
            raise BadInput(f"{kind.name} has no parameter {part!r}; its parameters: {takes}")
        try:
            out[name] = _type(known[name])(value)
        except ValueError:
            raise BadInput(f"{kind.name}: {name} must be like {known[name].default!r}, not {value!r}") from None
    return out


def _type(parameter: Field[Any]) -> Callable[[str], Any]:
    """What a parameter's default is; the parameter is of that type."""
    return type(parameter.default)
