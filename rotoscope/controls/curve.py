"""What is measured of a control while it is trained: losses, massive values, additivity."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from rotoscope.model.lm import LM, evaluating
from rotoscope.results import parquet_bytes, write_atomic
from rotoscope.studies import massive, texts
from rotoscope.studies.observe import KINDS, Tables, observe
from rotoscope.studies.options import Options
from rotoscope.tasks import evaluate

ARMS = ("both_means_removed", "no_means_equal_energies")
TASKS = {"key_value": 60, "known_values": 60, "passkey:tokens=128": 30}
TEXTS = 4


class Curve:
    """Measures a model again and again, and keeps what it found in Parquet tables of one folder.

    Parameters
    ----------
    lm : LM
        The model as it is being trained.
    held_out : numpy.ndarray
        Rows of token ids that it is not trained on.
    folder : Path
        Gets ``losses``, ``ratios`` and ``additivity``, one row per step and what it is about.
    """

    def __init__(self, lm: LM, held_out: np.ndarray, folder: Path):
        self.lm, self.folder = lm, folder
        self.held_out = torch.from_numpy(held_out.astype(np.int64))
        before = self.last()
        # Processor time of this process, and of those before it that were interrupted.
        self._earlier = before.get("cpu_seconds", 0.0) - time.process_time()
        self.options = Options(texts=TEXTS, tokens=held_out.shape[1])

    def measure(self, step: int) -> dict[str, float]:
        """Add one step to the tables; what was measured so far after the same step is replaced."""
        observed = self._observed()
        found = {"loss": held_out_loss(self.lm, self.held_out), "cpu_seconds": self._earlier + time.process_time()}
        for task, n in TASKS.items():
            found[task.partition(":")[0]] = float(evaluate(self.lm, task, n=n, seed=1).correct.mean())
        self._add("losses", step, pd.DataFrame([found]))
        self._add("ratios", step, _heads(observed))
        self._add("additivity", step, _additivity([tables["heads"] for tables in observed]))
        return found

    def heads(self) -> pd.DataFrame:
        """Largest over mean dim, count of massive dims and their share of energy, by layer, tensor and head."""
        return _heads(self._observed())

    def _observed(self) -> list[Tables]:
        some = texts.texts(self.lm, self.options)
        return [observe(self.lm, text.ids, seed=i, arms=ARMS) for i, text in enumerate(some)]

    def last(self) -> dict[str, float]:
        """The losses of the last step that was measured; empty before the first."""
        path = self.folder / "losses.parquet"
        return dict(pd.read_parquet(path).iloc[-1]) if path.exists() else {}

    def _add(self, name: str, step: int, rows: pd.DataFrame) -> None:
        path = self.folder / f"{name}.parquet"
        rows.insert(0, "step", step)
        if path.exists():
            before = pd.read_parquet(path)
            rows = pd.concat([before[before.step < step], rows], ignore_index=True)
        write_atomic(path, parquet_bytes(rows))


def held_out_loss(lm: LM, rows: torch.Tensor, batch: int = 16) -> float:
    """Mean negative log-likelihood of the rows' tokens, nats a token."""
    with torch.no_grad(), evaluating(lm.model):
        parts = [part.to(lm.device) for part in rows.split(batch)]
        return float(np.mean([lm.model(input_ids=part, labels=part).loss.item() for part in parts]))


def _heads(observed: list[Tables]) -> pd.DataFrame:
    heads = massive.per_head(massive.pooled([tables["dims"] for tables in observed]))
    return heads[["layer", "tensor", "head", "max_ratio", "count", "energy_share"]]


def _additivity(per_text: list[pd.DataFrame]) -> pd.DataFrame:
    columns = [c for c in pd.concat(per_text) if c.split("__")[0] in (*KINDS, "causal", "causal_within")]
    return pd.concat(per_text).groupby(["layer", "head"], as_index=False)[columns].mean()
