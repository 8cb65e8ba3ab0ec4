"""CNN/DailyMail: news articles and their highlights (See et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rotoscope.errors import BadInput
from rotoscope.tasks.base import Example, Knowledge, Scoring
from rotoscope.tasks.data import DataTask
from rotoscope.tasks.rows import Row, Source

if TYPE_CHECKING:
    from rotoscope.model.lm import LM


@dataclass(frozen=True)
class CNNDailyMail(DataTask):
    """ROUGE-L, F-measure with stemming, of the generated paragraph against the highlights."""

    name: ClassVar[str] = "cnn_dailymail"
    summary: ClassVar[str] = "summaries of news articles; ROUGE-L against the highlights"
    knowledge: ClassVar[Knowledge] = "contextual"
    scoring: ClassVar[Scoring] = "generate"
    new_tokens: ClassVar[int] = 96
    metric: ClassVar[str] = "ROUGE-L"
    source: ClassVar[Source] = Source("abisee/cnn_dailymail", "3.0.0", "test", ("article", "highlights"))
    specimen: ClassVar[Row] = {
        "article": "Heavy rain flooded the old harbour on Monday. Forty shops stayed shut. No one was hurt.",
        "highlights": "Rain floods the harbour .\nForty shops shut, no one hurt .",
    }

    def examples(self, lm: LM, n: int, seed: int) -> list[Example]:
        """As every task from data; what scores the answers is looked for before a model is run."""
        _scorer()
        return super().examples(lm, n, seed)

    def example(self, row: Row, id: str) -> Example:
        """The highlights as one line."""
        lead = "Summary:"
        gold = " ".join(row["highlights"].split())
        return Example(id=id, prompt=f"Article: {row['article'].strip()}\n{lead}", gold=(gold,), lead=lead)

    def score(self, example: Example, answer: str) -> float:
        """0 to 1."""
        summary = answer.strip().split("\n\n")[0]
        return float(_scorer().score(example.gold[0], summary)["rougeL"].fmeasure)


def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise BadInput("cnn_dailymail needs the package rouge-score: pip install 'rotoscope[eval]'") from None
    return RougeScorer(["rougeL"], use_stemmer=True)
