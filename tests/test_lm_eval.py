"""lm-eval's tasks under interventions, and the model `rotoscope` on lm-eval's own command line, all offline."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small import small
from transformers import AutoTokenizer, GenerationConfig

import rotoscope as rs
from rotoscope.errors import BadInput
from rotoscope.interventions import parse
from rotoscope.tasks import evaluate, find, lm_eval

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
DISRUPT = "disrupt:selection=top-1:targets=QK"
CITIES = {"France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima"}

COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
doc_to_text: "{{{{prompt}}}}"
"""
KINDS = {
    "mc": 'output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: "{{choices.index(city)}}"\n',
    "gen": "output_type: generate_until\ndoc_to_target: city\ntarget_delimiter: ' '\n"
    "generation_kwargs: {until: ['.', ','], max_gen_toks: 6}\n"
    "metric_list: [{metric: exact_match, ignore_case: true, aggregation: mean, higher_is_better: true}]\n"
    "filter_list: [{name: bare, filter: [{function: remove_whitespace}, {function: take_first}]}]\n",
    "ll": "output_type: loglikelihood\ndoc_to_target: ' {{city}}'\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "ppl": "output_type: loglikelihood_rolling\ndoc_to_target: prompt\nmetric_list: [{metric: word_perplexity}]\n",
}
PLUGIN = "metadata: {model: !function rotoscope.tasks.lm_eval_model.Rotoscope}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Task files on one local JSONL, and the environment that keeps every library off the network."""
    root = tmp_path_factory.mktemp("lm_eval")
    docs = [
        {"prompt": f"{'Well, ' * (i % 3)}The capital of {land} is", "city": city, "choices": list(CITIES.values())}
        for i, (land, city) in enumerate(CITIES.items())
    ]
    (root / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    for kind, text in KINDS.items():
        (root / f"cap_{kind}.yaml").write_text(COMMON.format(name=f"cap_{kind}", data=root / "docs.jsonl") + text)
    group = "group: caps\ntask: [cap_mc, cap_gen]\n"
    (root / "caps.yaml").write_text(group)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**OFFLINE, "HF_DATASETS_CACHE": str(root / "cache")}.items():
            patch.setenv(name, value)
        yield root


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows the end of a text, without which lm-eval fails."""
    path = small(tmp_path_factory.mktemp("model") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token = "|"
    tokenizer.save_pretrained(path)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    return path


def simply(model: Any, folder: Path, *kinds: str) -> dict[str, Any]:
    """lm-eval's own evaluation: each task's raw responses, item by item, and its results."""
    from lm_eval import evaluate
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False).load([f"cap_{kind}" for kind in kinds])
    found = evaluate(model, tasks, bootstrap_iters=0)
    return {kind: [s["resps"] for s in found["samples"][f"cap_{kind}"]] for kind in kinds} | {
        "results": found["results"]
    }


def numbers(responses: Any) -> list[float]:
    """All log-likelihoods in nested lists of responses."""
    if isinstance(responses, float):
        return [responses]
    return [x for part in responses if not isinstance(part, bool) for x in numbers(part)]


@pytest.mark.parametrize("rows", [1, 4])
def test_clean_equals_lm_evals_own_model(folder: Path, tiny_folder: Path, rows: int) -> None:
    from lm_eval.models.huggingface import HFLM

    from rotoscope.tasks.lm_eval_model import Rotoscope

    theirs = HFLM(str(tiny_folder), device="cpu", dtype="float32", batch_size=rows)
    ours = Rotoscope(str(tiny_folder), batch_size=rows, device="cuda:0")
    expected, got = (simply(model, folder, *KINDS) for model in (theirs, ours))
    for kind in ("mc", "ll", "ppl"):
        assert numbers(got[kind]) == pytest.approx(numbers(expected[kind]), rel=1e-5), kind
    assert got["gen"] == expected["gen"]
    assert got["results"]["cap_mc"]["acc,none"] == expected["results"]["cap_mc"]["acc,none"]


def test_an_intervention_does_not_see_the_batch(folder: Path, tiny_folder: Path) -> None:
    from rotoscope.tasks.lm_eval_model import Rotoscope

    lm = rs.load(tiny_folder)
    clean, *changed = (
        simply(Rotoscope(lm, under, batch_size=rows), folder, *KINDS)
        for under, rows in ((None, 1), (DISRUPT, 1), (DISRUPT, 5))
    )
    for kind in ("mc", "ll", "ppl"):
        single, batched, untouched = (numbers(x[kind]) for x in (*changed, clean))
        assert batched == pytest.approx(single, rel=1e-5), kind
        assert max(abs(a - b) for a, b in zip(single, untouched, strict=True)) > 1e-3, kind
    assert changed[0]["gen"] == changed[1]["gen"] != clean["gen"]
    assert simply(Rotoscope(lm), folder, "mc")["mc"] == clean["mc"]  # nothing is left behind


def test_likelihoods_are_those_of_the_model_under_the_intervention(folder: Path, demo: rs.LM) -> None:
    table = find(f"lm_eval:{folder / 'cap_mc.yaml'}").evaluate(demo, 6, 0, under=parse(DISRUPT)).set_index("gold")
    for number, (land, city) in enumerate(CITIES.items()):
        prompt = demo.encode(f"{'Well, ' * (number % 3)}The capital of {land} is")
        answer = demo.tokenizer(f" {city}").input_ids
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.no_grad(), parse(DISRUPT).on(demo, prompt=len(prompt)):
            logprobs = demo.model(ids).logits[0, len(prompt) - 1 :].log_softmax(-1)
        expected = logprobs[range(len(answer)), answer].sum().item()
        assert table.loc[city].logprob == pytest.approx(expected, abs=1e-3)
        assert table.loc[city].prompt_tokens == len(prompt)
        assert table.loc[city].gold_tokens == len(answer)
        assert table.loc[city].first_ids == prompt[:4].tolist()


def test_rows_agree_with_lm_evals_results(folder: Path, demo: rs.LM) -> None:
    from rotoscope.tasks.lm_eval_model import Rotoscope

    metrics = {"mc": "acc,none", "gen": "exact_match,bare", "ll": "acc,none"}
    state, draws = torch.get_rng_state(), random.getstate()
    demo.model.train()
    tables = {kind: find(f"lm_eval:{folder / f'cap_{kind}.yaml'}").evaluate(demo, 6, 0) for kind in metrics}
    training = demo.model.training
    demo.model.eval()
    assert training
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == draws
    results = simply(Rotoscope(demo, batch_size=2), folder, *metrics)["results"]
    for kind, table in tables.items():
        assert table.correct.mean() == pytest.approx(results[f"cap_{kind}"][metrics[kind]])
        assert table.correct.sum() > 0
        assert list(table.gold) == list(CITIES.values())
        assert (table.chance == (1 / 6 if kind == "mc" else 0)).all()
        assert (table.correct[table.answer == table.gold] == 1).all()
        # One answer in three formats.
        assert table.logprob.tolist() == pytest.approx(tables["mc"].logprob.tolist(), abs=1e-3)


def test_items_are_drawn_by_seed_and_over_a_group(folder: Path, demo: rs.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(lm_eval, "_manager", lambda file=False: manager)
    task = find("lm_eval:caps")
    drawn = [[e.id for e in task.examples(demo, 5, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 5
    assert task.evaluate(demo, 5, 0).id.tolist() == drawn[0]
    named = task.examples(demo, 5, 1)
    assert evaluate(demo, task, examples=named).id.tolist() == drawn[2]
    everything = {e.id: e for e in task.examples(demo, 99, 0)}
    assert len(everything) == 12
    item = everything["cap_mc-4"]
    assert (item.prompt, item.gold, item.choices) == (
        "Well, The capital of Japan is",
        ("Tokyo",),
        tuple(CITIES.values()),
    )


class Watched:
    """Stands in for an intervention and notes what it was told."""

    def __init__(self) -> None:
        self.prompts: list[int | None] = []

    @contextmanager
    def on(self, lm: rs.LM, prompt: int | None = None) -> Iterator[None]:
        self.prompts.append(prompt)
        yield


def test_an_intervention_is_told_where_the_prompt_ends(folder: Path, tiny_folder: Path) -> None:
    from rotoscope.tasks.lm_eval_model import Rotoscope

    lm = rs.load(tiny_folder)
    longest = max(len(json.loads(line)["prompt"]) for line in (folder / "docs.jsonl").read_text().splitlines())
    for kind, expected in (("mc", longest), ("gen", longest), ("ppl", None)):
        watched = Watched()
        simply(Rotoscope(lm, watched, batch_size=64), folder, kind)
        assert set(watched.prompts) == {expected}, kind
    assert lm.tokenizer.padding_side == rs.load(tiny_folder).tokenizer.padding_side


def accuracy(out: Path, name: str = "cap_gen") -> float:
    (found,) = out.rglob("results_*.json")
    return float(json.loads(found.read_text())["results"][name]["exact_match,bare"])


def test_the_command_runs_clean_and_disrupted(
    folder: Path, demo: rs.LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager.__init__, "__defaults__", (None, None, False, None))  # no index of all tasks
    task = find(f"lm_eval:{folder / 'cap_gen.yaml'}")
    found = {}
    for name, under in {"clean": "", "disrupted": f"{DISRUPT.replace('top-1', 'top-8')}:positions=all"}.items():
        model = f"pretrained=demo,intervention={under}" if under else "pretrained=demo"
        options = ["--model_args", model, "--include_path", str(folder), "--output_path", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "rotoscope", "--tasks", "cap_gen", *options])
        lm_eval.main()
        found[name] = accuracy(tmp_path / name)
        expected = task.evaluate(demo, 6, 0, parse(under) if under else None)
        assert found[name] == pytest.approx(expected.correct.mean())
    assert found["clean"] > found["disrupted"]


@pytest.mark.slow
def test_lm_evals_own_command_finds_the_model_through_a_task_file(
    folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """In a process of its own, where nobody has made the model known."""
    plugin = tmp_path / "plug.yaml"
    plugin.write_text((folder / "cap_gen.yaml").read_text().replace("cap_gen", "plug") + PLUGIN)
    options = ["--model", "rotoscope", "--model_args", f"pretrained={tiny_folder}", "--tasks", str(plugin)]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *options, "--output_path", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=300, env={**os.environ, **OFFLINE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    clean = find(f"lm_eval:{folder / 'cap_gen.yaml'}").evaluate(rs.load(tiny_folder), 6, 0)
    assert accuracy(tmp_path / "out", "plug") == pytest.approx(clean.correct.mean())


@pytest.mark.parametrize("installed", [True, False])
def test_the_command_says_what_can_be_mended_in_one_line(
    installed: bool,
    folder: Path,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager.__init__, "__defaults__", (None, None, False, None))  # no index of all tasks
    if not installed:
        monkeypatch.setitem(sys.modules, "lm_eval", None)
    model = ["--model", "rotoscope", "--model_args", f"pretrained={tiny_folder},intervention=disrupt:selection=best"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *model, "--tasks", "cap_gen", "--include_path", str(folder)])
    with pytest.raises(SystemExit) as end:
        lm_eval.main()
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert ("selection" if installed else "pip install") in said


def test_what_lm_eval_cannot_do_is_said_in_one_line(
    folder: Path, demo: rs.LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    from rotoscope.tasks.lm_eval_model import Rotoscope

    with pytest.raises(BadInput, match="measures perplexity"):
        find(f"lm_eval:{folder / 'cap_ppl.yaml'}").evaluate(demo, 2, 0)
    with pytest.raises(BadInput, match="there is no file"):
        find(f"lm_eval:{tmp_path / 'none.yaml'}")
    gone = tmp_path / "gone.yaml"
    gone.write_text((folder / "cap_mc.yaml").read_text().replace("docs.jsonl", "gone.jsonl"))
    with pytest.raises(BadInput, match="cannot be loaded"):
        find(f"lm_eval:{gone}").evaluate(demo, 2, 0)
    for content in ("task: [unclosed", "task: mine", "task: mine\nf: !function nowhere.f", "- a list"):
        bad = tmp_path / "bad.yaml"
        bad.write_text(content)
        with pytest.raises(BadInput, match=r"bad\.yaml cannot be loaded: \S"):
            find(f"lm_eval:{bad}").examples(demo, 1, 0)
    with pytest.raises(BadInput, match="needs a task"):
        find("lm_eval:")
    monkeypatch.setattr(lm_eval, "_manager", lambda file=False: TaskManager(include_defaults=False))
    with pytest.raises(BadInput, match="no task 'capitols'"):
        find("lm_eval:capitols")
    with pytest.raises(BadInput, match="has no tokenizer"):
        Rotoscope(rs.wrap(demo.model))
    with pytest.raises(BadInput, match=r"set tokenizer\.eos_token"):
        Rotoscope(str(small(tmp_path / "endless")))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(BadInput, match=r"pip install 'rotoscope\[eval\]'"):
        find("lm_eval:hellaswag")
