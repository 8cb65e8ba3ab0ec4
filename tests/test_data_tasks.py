"""Tasks from data: what the rows become, fair and repeatable draws, right scores, what is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest

import rotoscope as rs
from rotoscope import tasks
from rotoscope.errors import BadInput
from rotoscope.tasks import TASKS, evaluate, find
from rotoscope.tasks.base import Example
from rotoscope.tasks.data import DataTask
from rotoscope.tasks.gsm8k import GSM8K

QUESTIONS = [
    {"question": f"What is {i} plus a thousand?", "answer": f"{i} + 1000 = {i + 1000}\n#### 1,{i:03}"}
    for i in range(40)
]
ALGEBRA = {"question": "x + 1 = 3?", "options": ["A)0", "B)1", "C)2", "D)3", "E)4"], "rationale": "…", "correct": "C"}
REVIEWS = [{"text": f"Review {i}.<br />Fine.", "label": int(i >= 50)} for i in range(100)]  # sorted, as the data are
PARAGRAPH = {
    "context": "In 1871 Ada Brandt built the tower.",
    "question": "Who built it?",
    "answers": {"text": ["Ada Brandt", "Brandt", "Ada Brandt"], "answer_start": [8, 12, 8]},
}


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_gsm8k_asks_for_the_number_behind_the_mark(demo: rs.LM, tmp_path: Path) -> None:
    task = find(f"gsm8k:{written(tmp_path / 'q.jsonl', QUESTIONS)}")
    (item,) = [e for e in task.examples(demo, 40, seed=0) if e.id == "gsm8k-7"]
    assert item.prompt == "Question: What is 7 plus a thousand?\nAnswer:"
    assert item.gold == ("1007",)
    assert (task.knowledge, task.scoring, task.chance(item)) == ("reasoning", "generate", 0.0)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" 12 + 60 = 72\n#### 72", True),
        (" #### 72. Then 12 more would be 84.", True),
        (" The total is $72.00.", True),
        (" 72 apples", True),
        (" It is 72.\nQuestion: What is 5 plus 5?\nAnswer: 10", True),
        (" 172", False),
        (" 72 - 2 = 70", False),
        (" -72", False),
        (" seventy", False),
        ("", False),
    ],
)
def test_gsm8k_scores_the_final_number(answer: str, right: bool) -> None:
    assert TASKS["gsm8k"]().score(Example("", "", ("72",)), answer) == right


def test_aqua_has_its_options_in_the_prompt(demo: rs.LM, tmp_path: Path) -> None:
    (item,) = find(f"aqua:{written(tmp_path / 'a.jsonl', [ALGEBRA])}").examples(demo, 5, seed=0)
    assert "\nA) 0\nB) 1\nC) 2\nD) 3\nE) 4\n" in item.prompt
    assert item.prompt.endswith(item.lead)
    assert (item.gold, item.choices) == (("C",), ("A", "B", "C", "D", "E"))
    assert TASKS["aqua"]().chance(item) == 0.2


@pytest.mark.parametrize(("n", "each"), [(10, (5, 5)), (11, (6, 5)), (100, (50, 50)), (300, (50, 50))])
def test_imdb_draws_both_classes_equally(demo: rs.LM, tmp_path: Path, n: int, each: tuple[int, int]) -> None:
    task = find(f"imdb:{written(tmp_path / 'r.jsonl', REVIEWS)}")
    items = task.examples(demo, n, seed=3)
    counts = Counter(item.gold[0] for item in items)
    assert tuple(sorted(counts.values(), reverse=True)) == each
    assert len({item.id for item in items}) == sum(each)
    for item in items:
        assert item.gold[0] == ("positive" if int(item.id.removeprefix("imdb-")) >= 50 else "negative")
        assert "<br" not in item.prompt


def test_a_seed_names_the_same_items_and_another_seed_others(demo: rs.LM, tmp_path: Path) -> None:
    task = find(f"gsm8k:{written(tmp_path / 'q.jsonl', QUESTIONS)}")
    drawn = [[e.id for e in task.examples(demo, 10, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 10
    assert [e.id for e in task.examples(demo, 4, 0)] == drawn[0][:4]  # fewer items are the first of more


def test_items_that_do_not_fit_are_passed_over(demo: rs.LM, tmp_path: Path) -> None:
    long = {"text": "word " * 300, "label": 1}
    task = find(f"imdb:{written(tmp_path / 'r.jsonl', [*REVIEWS[:3], long])}")
    short = replace(demo, trained_length=100)
    assert len(task.examples(demo, 9, 0)) == 4
    assert len(task.examples(short, 9, 0)) == 3
    with pytest.raises(BadInput, match="fits into the 20 tokens"):
        task.examples(replace(demo, trained_length=20), 9, 0)


def test_squad_scores_words_and_exact_matches(demo: rs.LM, tmp_path: Path) -> None:
    path = written(tmp_path / "s.parquet", [PARAGRAPH])
    loose, strict = find(f"squad:{path}"), find(f"squad_em:{path}")
    (item,) = loose.examples(demo, 1, 0)
    assert item.gold == ("Ada Brandt", "Brandt")
    assert item.prompt == "In 1871 Ada Brandt built the tower.\nQuestion: Who built it?\nAnswer:"
    for answer, f1, em in [
        (" Ada Brandt", 1, 1),
        (" the brandt.\nQuestion: Who else?", 1, 1),
        (" It was Ada Brandt", 2 / 3, 0),  # 2 of 4 words right, both of the answer's found: 2 · .5 · 1 / 1.5
        (" Ada", 2 / 3, 0),
        (" Brandtian", 0, 0),
        ("", 0, 0),
    ]:
        assert loose.score(item, answer) == pytest.approx(f1), answer
        assert strict.score(item, answer) == em, answer
    assert (loose.metric, strict.metric) == ("F1", "exact match")


def test_cnn_dailymail_scores_by_the_longest_common_subsequence(demo: rs.LM, tmp_path: Path) -> None:
    row = {"article": "A cat.", "highlights": "The cat sat on\nthe mat ."}
    task = find(f"cnn_dailymail:{written(tmp_path / 'n.jsonl', [row])}")
    (item,) = task.examples(demo, 1, 0)
    assert item.gold == ("The cat sat on the mat .",)
    assert task.score(item, " the cat lay on the mat") == pytest.approx(5 / 6)  # 5 of 6 words in order, both ways
    assert task.score(item, " the cat sat on the mat\n\nArticle: dogs") == 1
    assert task.score(item, " mat sat cat") == pytest.approx(2 * (1 / 3) * (1 / 6) / (1 / 3 + 1 / 6))
    assert task.score(item, " cats mats") == pytest.approx(2 * 1 * (2 / 6) / (1 + 2 / 6))  # stems count
    assert task.metric == "ROUGE-L"


def test_parquet_and_jsonl_are_the_same_items(demo: rs.LM, tmp_path: Path) -> None:
    for name, rows in {"aqua": [ALGEBRA] * 3, "imdb": REVIEWS, "squad": [PARAGRAPH]}.items():
        files = [written(tmp_path / f"{name}{suffix}", rows) for suffix in (".jsonl", ".parquet")]
        one, other = (find(f"{name}:{file}").examples(demo, 8, 1) for file in files)
        assert one == other != []


def test_items_of_ones_own(demo: rs.LM, tmp_path: Path) -> None:
    prompt = "Question: What is the capital of {}?\nAnswer: The capital of {} is "
    rows = [
        {"prompt": prompt.format(c, c), "answer": a}
        for c, a in [("France", ["Lutetia", "Paris"]), ("Germany", "Berlin"), ("Italy", "Turin")]
    ]
    task = find(f"jsonl:{written(tmp_path / 'own.jsonl', rows)}")
    assert task.scoring == "generate"
    found = evaluate(demo, task, n=3).set_index("gold").correct
    assert found.to_dict() == {"Lutetia": 1, "Berlin": 1, "Turin": 0}
    chosen = [{**row, "answer": "Rome", "choices": ["Rome", "Bonn"]} for row in rows]
    among = find(f"jsonl:{written(tmp_path / 'choices.parquet', chosen)}")
    assert among.scoring == "choice"
    table = evaluate(demo, among, n=3).set_index("id")
    assert (table.chance == 0.5).all()
    assert table.loc["jsonl-2"].answer == "Rome"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("jsonl", None, "there is no file"),
        ("jsonl", "", "has no rows"),
        ("jsonl", '{"prompt": "a", "answer": "b"}\n{"prompt": \n', "line 2: not JSON"),
        ("jsonl", '["a"]\n', "line 1: not a JSON object"),
        ("jsonl", '{"question": "a"}\n', "row 1: no prompt, answer; its columns: question"),
        ("jsonl", '{"prompt": "a", "answer": []}\n', "answer must be a text"),
        ("jsonl", '{"prompt": " ", "answer": "b"}\n', "prompt must be a text"),
        ("jsonl", '{"prompt": "a", "answer": "c", "choices": ["a", "b"]}\n', "one of the choices"),
        ("jsonl", '{"prompt": "a", "answer": "a", "choices": ["a"]}\n', "two or more"),
        (
            "jsonl",
            '{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": 2, "choices": [1, 2]}\n',
            "row 1: no choices",
        ),
        ("gsm8k", '{"question": "a", "answer": "12"}\n', "row 1: the column answer must end in '#### NUMBER'"),
        ("gsm8k", '{"question": "a", "answer": "#### twelve"}\n', "#### NUMBER"),
        (
            "gsm8k",
            '{"question": 12, "answer": "#### 12"}\n',
            'row 1: not what gsm8k reads; a row is like {"question": "A',
        ),
        ("gsm8k", '{"prompt": "a", "answer": "12"}\n', "no question"),
        ("aqua", '{"question": "a", "options": ["A)1"], "correct": "A"}\n', "five options"),
        ("aqua", '{"question": "a", "options": 5, "correct": "A"}\n', "five options"),
        ("aqua", '{"question": "a", "options": "ABCDE", "correct": "A"}\n', "five options"),
        ("aqua", '{"question": "a", "options": [1, 2, 3, 4, 5], "correct": "A"}\n', "not what aqua reads"),
        ("imdb", '{"text": "a", "label": -1}\n', "label must be 0"),
        ("imdb", '{"text": "a", "label": 1}\n{"text": 7, "label": 1}\n', "row 2: not what imdb reads"),
        ("imdb", '{"text": "a", "label": 1.0}\n', "not what imdb reads"),
        ("squad", '{"context": "a", "question": "b", "answers": {"text": []}}\n', "without an answer"),
        ("squad", '{"context": "a", "question": "b", "answers": ["x"]}\n', "not what squad reads"),
        ("squad", '{"context": "a", "question": "b", "answers": {"text": "x"}}\n', "list of texts"),
        ("cnn_dailymail", '{"article": "a", "highlights": ["b"]}\n', "not what cnn_dailymail reads"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    path = tmp_path / "own.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=says) as refused:
        find(f"{name}:{path}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a.csv", b"prompt,answer\n", "neither .jsonl nor .parquet"),
        ("a.parquet", b"PAR1 no more", "no readable Parquet"),
        ("a.jsonl", b'{"prompt": "\xff"}', "not UTF-8"),
    ],
)
def test_a_file_of_another_kind_is_one_line(tmp_path: Path, file: str, content: bytes, says: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(BadInput, match=says):
        find(f"jsonl:{tmp_path / file}")


@pytest.mark.parametrize("name", [name for name, kind in TASKS.items() if issubclass(kind, DataTask)])
def test_a_data_set_comes_by_its_id(demo: rs.LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import datasets

    kind: Any = TASKS[name]
    file = written(tmp_path / "rows.jsonl", [kind.specimen] * 3)
    load, asked = datasets.load_dataset, []

    def local(id: str, config: str | None, split: str) -> Any:
        asked.append((id, config, split))
        return load("json", data_files={split: str(file)}, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    items = find(name).examples(demo, 2, 0)
    assert asked == [(kind.source.id, kind.source.config, kind.source.split)]
    assert [replace(item, id="") for item in items] == [kind().example(kind.specimen, "")] * 2


def test_what_cannot_be_had_is_said_in_one_line(demo: rs.LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (OfflineModeIsEnabled)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(BadInput, match=r"Couldn't reach .* give a local file, gsm8k:FILE.jsonl, with the columns"):
        find("gsm8k").examples(demo, 1, 0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"pip install 'rotoscope\[eval\]'"):
        find("gsm8k").examples(demo, 1, 0)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    news = written(tmp_path / "news.jsonl", [{"article": "a", "highlights": "b"}])
    with pytest.raises(BadInput, match=r"rouge-score: pip install 'rotoscope\[eval\]'"):  # before a model is run
        find(f"cnn_dailymail:{news}").examples(demo, 1, 0)


def test_a_task_that_makes_its_items_reads_no_file() -> None:
    with pytest.raises(BadInput):
        find("capitals:items.jsonl")


def test_a_file_with_a_sign_of_equality_in_its_name_is_a_file(demo: rs.LM, tmp_path: Path) -> None:
    path = written(tmp_path / "n=40.jsonl", QUESTIONS)
    assert len(find(f"gsm8k:{path}").examples(demo, 40, 0)) == 40
    with pytest.raises(BadInput, match="no parameter"):
        find(f"gsm8k:{tmp_path / 'n=41.jsonl'}")


def test_a_name_too_long_for_a_file_is_none() -> None:
    with pytest.raises(BadInput, match="there is no file xxx"):
        find(f"jsonl:{'x' * 5000}")


@dataclass(frozen=True)
class Dates(GSM8K):
    """A task from data of another package."""

    name: ClassVar[str] = "dates"


def test_a_task_from_data_of_another_package_reads_files_too(
    demo: rs.LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_installed", lambda name: Dates)
    task = find(f"dates:{written(tmp_path / 'q.jsonl', QUESTIONS)}")
    assert type(task) is Dates
    assert task.examples(demo, 1, 0)[0].id.startswith("dates-")
