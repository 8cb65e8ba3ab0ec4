"""What `rotoscope tasks` shows: every task, what it asks, and that it tells right from wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import rotoscope as rs
from rotoscope import tasks
from rotoscope.errors import BadInput
from rotoscope.tasks import TASKS, Example, Task, find, show
from rotoscope.tasks.base import Knowledge, Scoring


@dataclass(frozen=True)
class Tokyo(Task):
    """Is the capital right? A task whose faults are those of careless scorers."""

    scorer: str = "anchored"

    name: ClassVar[str] = "tokyo"
    summary: ClassVar[str] = "for tests"
    knowledge: ClassVar[Knowledge] = "parametric"
    scoring: ClassVar[Scoring] = "generate"

    def examples(self, lm: rs.LM, n: int, seed: int) -> list[Example]:
        return [Example("0", "The capital of Japan is", ("ok",)), Example("1", "It is", ("Tokyo",))][:n]

    def score(self, example: Example, answer: str) -> float:
        found = {
            "anchored": answer.strip() == example.gold[0],
            "substring": example.gold[0] in answer,
            "never": False,
        }
        return float(found[self.scorer])


def test_the_list_has_every_task() -> None:
    rows = {row["name"]: row for row in show.listing()}
    assert list(rows) == [*TASKS, "jsonl:FILE", "lm_eval:NAME"]
    assert all(row["summary"] and row["knowledge"] and row["scoring"] for row in rows.values())
    assert rows["capitals"]["parameters"].startswith("filler=0")
    assert rows["gsm8k"]["parameters"] == "FILE"
    assert rows["squad"]["metric"] == "F1"


def test_samples_are_what_an_evaluation_asks(demo: rs.LM) -> None:
    shown = show.samples(demo, "capitals:filler=48", n=3, seed=5)
    assert shown == find("capitals:filler=48").examples(demo, 3, 5)
    assert all(example.prompt in show.shown(shown) for example in shown)
    with pytest.raises(BadInput, match="there is no task 'capitols'"):
        show.samples(demo, "capitols")


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_tells_a_right_answer_from_a_wrong_one(demo: rs.LM, name: str) -> None:
    gold, wrong = show.check(demo, name)
    assert (gold.kind, gold.score, gold.ok) == ("gold", 1, True)
    assert (wrong.kind, wrong.ok) == ("wrong", True), wrong
    assert gold.answer != wrong.answer


def test_files_and_lm_eval_are_checked_too(demo: rs.LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "own.jsonl"
    rows = [{"prompt": f"{i} and {i} is", "answer": str(2 * i), "choices": [str(2 * i), str(i)]} for i in range(1, 9)]
    own.write_text("\n".join(map(json.dumps, rows)))
    task = tmp_path / "sums.yaml"
    task.write_text(
        f'task: sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: "{own}"}}}}\ntest_split: test\n'
        'output_type: multiple_choice\ndoc_to_text: prompt\ndoc_to_choice: choices\ndoc_to_target: "{{0}}"\n'
    )
    for spec in (f"jsonl:{own}", f"lm_eval:{task}"):
        gold, wrong = show.check(demo, spec)
        assert (gold.score, wrong.score) == (1, 0), spec
        assert gold.task == spec


@pytest.mark.parametrize(("scorer", "fault"), [("anchored", None), ("substring", "wrong"), ("never", "gold")])
def test_a_careless_scorer_is_a_fault(demo: rs.LM, scorer: str, fault: str | None) -> None:
    """ "ok" stands in the prompt's neighbour's answer Tokyo only by its letters."""
    found = show.check(demo, Tokyo(scorer))
    assert [row.kind for row in found if not row.ok] == ([] if fault is None else [fault])
    assert show.checked(found).count("FAULT") == (fault is not None)


def test_tasks_of_other_packages_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_entry_points", lambda: {"tokyo": None})
    monkeypatch.setattr(tasks, "_installed", lambda name: Tokyo)
    assert "tokyo" in [row["name"] for row in show.listing()]
