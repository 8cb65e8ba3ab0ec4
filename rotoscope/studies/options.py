"""What a run is asked for: size, seed, texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rotoscope.errors import BadInput

SEEDS = range(2**32)
BATCH_TOKENS = 2048
"""Tokens of a batch of a task's items, at most; texts run one at a time."""
PARTS = ("perturb", "replace", "length")
_LISTS = {
    "tasks": "passkey:tokens=256",
    "disrupt": "top-2:positions=all",
    "parts": "perturb",
    "methods": "kv-int4",
    "checkpoints": "gptq=DIR",
}
"""What holds several texts, and one of them for messages."""


@dataclass(frozen=True)
class Size:
    """How much a study spends.

    Attributes
    ----------
    texts, tokens : int
        Texts, and tokens of each.
    random_seeds : int
        Random-weights twins of the model, each run on one text.
    """

    texts: int
    tokens: int
    random_seeds: int


SIZES = {"quick": Size(4, 1024, 3), "standard": Size(8, 1024, 5), "full": Size(16, 2048, 5)}


@dataclass(frozen=True)
class Options:
    """The arguments that determine a study's numbers.

    Attributes
    ----------
    size : str
        ``quick``, ``standard`` or ``full``.
    seed : int
        Every random choice derives from it.
    texts, tokens, limit : int, optional
        Override the size's number of texts and tokens; ``limit`` is an upper bound on the number of texts, and on the
        number of items of a task.
    text : str, optional
        Text to use in place of the default prose.
    max_memory : int, optional
        Bytes that capture may take beside the model itself: layers are observed a few at a time to keep within it,
        which changes no number.
    tasks : tuple of str
        Tasks in place of the size's own, as :func:`rotoscope.tasks.find` reads them.
    disrupt : tuple of str
        Arms of the disruption grid in place of those shown beside the judged ones, as ``top-2:positions=all``;
        ``("none",)`` leaves the grid out.
    parts : tuple of str
        Causal parts of the position study, of ``perturb``, ``replace`` and ``length``, in place of the size's own.
    methods : tuple of str
        Quantization methods in place of the size's own, as ``kv-int4`` or ``rtn:bits=4:group=32``; ``("none",)``
        leaves them out.
    checkpoints : tuple of str
        Quantized checkpoints of the same model, each as ``NAME=DIR``: methods like the others.
    """

    size: str = "standard"
    seed: int = 0
    texts: int | None = None
    tokens: int | None = None
    limit: int | None = None
    text: str | None = None
    max_memory: int | None = None
    tasks: tuple[str, ...] = ()
    disrupt: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, like in _LISTS.items():
            given = getattr(self, name)
            several = isinstance(given, Iterable) and not isinstance(given, str)
            texts = tuple(given) if several else (given,)
            if wrong := [text for text in texts if not isinstance(text, str)]:
                raise BadInput(f"{name} are texts such as {like!r}, not {wrong[0]!r}")
            object.__setattr__(self, name, tuple(dict.fromkeys(texts)))
        if "none" in self.disrupt and len(self.disrupt) > 1:
            raise BadInput("disrupt: none leaves the grid out, so that no arm can be asked for beside it")
        if "none" in self.methods and len(self.methods) > 1:
            raise BadInput("methods: none leaves them out, so that no method can be asked for beside it")
        if wrong := [text for text in self.checkpoints if not all(text.partition("=")[::2])]:
            raise BadInput(f"checkpoint {wrong[0]!r} is not of the form NAME=DIR")
        if self.size not in SIZES:
            raise BadInput(f"size {self.size!r} is not one of {', '.join(SIZES)}")
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise BadInput(f"part {unknown[0]!r} is not one of {', '.join(PARTS)}")
        for name in ("texts", "tokens", "limit", "max_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name.replace('_', '-')} must be at least 1, not {value}")
        if self.seed not in SEEDS:
            raise BadInput(f"seed must be a whole number from 0 to {SEEDS[-1]}, not {self.seed}")

    @property
    def n_texts(self) -> int:
        return min(self.texts or SIZES[self.size].texts, self.limit or 10**9)

    @property
    def n_tokens(self) -> int:
        return self.tokens or SIZES[self.size].tokens

    @property
    def causal_parts(self) -> tuple[str, ...]:
        """The causal parts of the position study that are run."""
        return self.parts or (PARTS if self.size == "full" else ("perturb", "replace"))

    @property
    def random_seeds(self) -> int:
        return SIZES[self.size].random_seeds

    def facts(self) -> dict[str, Any]:
        """What a fingerprint records."""
        names = ("size", "seed", "limit", "tasks", "disrupt", "parts", "methods", "checkpoints")
        return {"texts": self.n_texts, "tokens": self.n_tokens, **{name: getattr(self, name) for name in names}}
