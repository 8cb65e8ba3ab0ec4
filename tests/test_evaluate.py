"""`evaluate` against plain loops: one full forward per example, a brute-force choice, a greedy loop by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
from small import characters
from tiny import tiny
from transformers import GenerationConfig

import rotoscope as rs
from rotoscope.errors import BadInput
from rotoscope.interventions import Disrupt, Freeze, Noise, Together
from rotoscope.stats.intervals import wilson
from rotoscope.tasks import Example, Task, evaluate
from rotoscope.tasks.encode import answer_of, opening, prompt_of
from rotoscope.tasks.forward import Row, score

ITEMS = (
    Example("a", "abc def", ("xy", "q"), ("xy", "q", "rst")),
    Example("b", "a much longer prompt than that", ("q",), ("xy", "q", "rst")),
    Example("c", "ab", ("rst",), ("xy", "q", "rst")),
    Example("d", "abcdef ghi", ("k",), ("k", "m")),
)


@dataclass(frozen=True)
class Made(Task):
    """Items by hand, scored in one of the ways."""

    way: str = "first"
    name: ClassVar[str] = "made"
    summary: ClassVar[str] = "items by hand"
    knowledge: ClassVar[Any] = "reasoning"
    new_tokens: ClassVar[int] = 7

    @property
    def scoring(self) -> Any:  # type: ignore[override]
        return self.way

    def examples(self, lm: rs.LM, n: int, seed: int) -> list[Example]:
        return list(ITEMS[:n])

    def score(self, example: Example, answer: str) -> float:
        return len(answer) / 100


def a_model(family: str = "llama", dtype: torch.dtype = torch.float64, **overrides: Any) -> rs.LM:
    model = tiny(family, dtype=dtype, **overrides)
    return rs.wrap(model, characters(), source="a model")


def plain(lm: rs.LM, prompt: str, answer: str) -> tuple[float, list[int], list[int]]:
    """One full forward of prompt and answer: log-likelihood of the answer, its ids, the likeliest ids."""
    start = lm.tokenizer(prompt).input_ids
    ids = lm.tokenizer(prompt + " " + answer).input_ids
    with torch.no_grad():
        logits = lm.model(torch.tensor([ids])).logits[0].double()
    likely = torch.log_softmax(logits, -1)
    own = ids[len(start) :]
    at = range(len(start) - 1, len(ids) - 1)
    return sum(likely[i, t].item() for i, t in zip(at, own, strict=True)), own, [int(logits[i].argmax()) for i in at]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2", "gpt_neox", "opt"])
@pytest.mark.parametrize("batch_tokens", [1, 60, 2048])
def test_batches_equal_one_full_forward_per_example(family: str, batch_tokens: int) -> None:
    lm = a_model(family)
    told = evaluate(lm, Made("exact"), batch_tokens=batch_tokens)
    assert list(told.id) == ["a", "b", "c", "d"]
    for example, row in zip(ITEMS, told.itertuples(), strict=True):
        answers = [plain(lm, example.prompt, gold) for gold in example.gold]
        assert row.logprob == pytest.approx(answers[0][0], abs=1e-9)
        assert row.gold_tokens == len(answers[0][1])
        assert row.correct == any(own == likeliest for _, own, likeliest in answers)
        assert row.answer == lm.tokenizer.decode(answers[0][2]).strip()
        assert row.prompt_tokens == len(lm.tokenizer(example.prompt).input_ids)
        assert row.first_ids == lm.tokenizer(example.prompt).input_ids[:4]


def test_an_exact_answer_is_one_that_greedy_generation_gives() -> None:
    lm = a_model()
    for example in ITEMS:
        said = greedy(lm, example.prompt, 3)
        wrong = [[*said[:2], (said[2] + 1) % 97], [(said[0] + 1) % 97, *said[1:]]]
        prompt = tuple(lm.tokenizer(example.prompt).input_ids)
        with torch.no_grad():
            told = score(lm, [Row(prompt, tuple(answer)) for answer in (said, *wrong)])
        assert [scored.exact for scored in told] == [True, False, False]


@pytest.mark.parametrize("single", [True, False])
def test_the_choice_that_wins_is_the_one_of_highest_likelihood(single: bool) -> None:
    lm = a_model()
    items = [replace(i, choices=("q", "k", "m"), gold=("k",)) for i in ITEMS] if single else list(ITEMS)
    if single:  # one token each: an answer begins without a joint under a template
        lm.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    told = evaluate(lm, Made("choice"), examples=items, template=single)
    for item, row in zip(items, told.itertuples(), strict=True):
        if single:
            text = item.prompt + ">"
            with torch.no_grad():
                likely = lm.model(torch.tensor([lm.tokenizer(text).input_ids])).logits[0, -1].log_softmax(-1)
            sums = {c: likely[lm.tokenizer(c).input_ids[0]].item() for c in item.choices}
        else:
            sums = {c: plain(lm, item.prompt, c)[0] for c in item.choices}
        won = max(sums, key=lambda c: sums[c])
        assert (row.answer, row.correct) == (won, float(won in item.gold))
        assert row.logprob == pytest.approx(sums[item.gold[0]], abs=1e-9)
        assert row.chance == 1 / len(item.choices)


def greedy(lm: rs.LM, prompt: str, most: int) -> list[int]:
    ids = lm.tokenizer(prompt).input_ids
    start = len(ids)
    for _ in range(most):
        with torch.no_grad():
            ids = [*ids, int(lm.model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[start:]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generation_is_a_greedy_loop_up_to_the_end_of_text(family: str, dtype: torch.dtype) -> None:
    lm = a_model(family, dtype)
    loops = [greedy(lm, e.prompt, 7) for e in ITEMS]
    end = loops[1][3]
    lm.model.generation_config = GenerationConfig(  # all of which is to be put aside
        do_sample=True, temperature=5.0, top_p=0.5, repetition_penalty=3.0, num_beams=2, max_length=4, eos_token_id=end,
        min_new_tokens=6, suppress_tokens=[loops[0][0]], begin_suppress_tokens=[loops[2][0]], forced_eos_token_id=5,
        bad_words_ids=[[loops[3][1]]], sequence_bias=[[[loops[0][2]], -50.0]], guidance_scale=3.0, max_time=1e-9,
        return_dict_in_generate=True, prompt_lookup_num_tokens=2,
    )  # fmt: skip
    before = lm.model.generation_config.to_dict()
    for batch_tokens in (1, 2048):
        told = evaluate(lm, Made("generate"), batch_tokens=batch_tokens)
        for ids, row in zip(loops, told.itertuples(), strict=True):
            kept = ids[: ids.index(end)] if end in ids else ids
            assert row.answer == lm.tokenizer.decode(kept).strip()
            assert row.correct == pytest.approx(len(lm.tokenizer.decode(kept)) / 100)
        assert told.logprob.tolist() == pytest.approx([plain(lm, e.prompt, e.gold[0])[0] for e in ITEMS], abs=1e-4)
    assert lm.model.generation_config.to_dict() == before


def test_generation_says_nothing(recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
    lm = a_model()
    lm.model.generation_config = GenerationConfig(do_sample=True, temperature=0.2, top_k=3, max_length=4)
    evaluate(lm, Made("generate"))
    assert not recwarn.list
    assert not caplog.records


def test_first_tokens_on_the_demo_model_are_as_published(demo: rs.LM) -> None:
    told = evaluate(demo, "capitals:labels=raw", n=60)
    published = wilson(46, 60)  # .77
    assert published.low < told.correct.mean() < published.high
    row = told.iloc[2]
    ids = demo.tokenizer("Question: What is the capital of United States?\nAnswer: The capital of United States is")
    ids = ids.input_ids
    gold = demo.tokenizer(" Washington").input_ids
    with torch.no_grad():
        logits = demo.model(torch.tensor([ids + gold])).logits[0]
    assert row.correct == (logits[len(ids) - 1].argmax() == gold[0])
    assert row.logprob == pytest.approx(logits[len(ids) - 1].log_softmax(-1)[gold[0]].item(), abs=1e-4)
    assert (row.task, row.variant, row.gold, row.template) == ("capitals", "labels=raw", "Washington", False)
    assert row.prompt_tokens == len(ids)


def test_any_accepted_answer_counts(demo: rs.LM) -> None:
    prompt = "Question: What is the capital of France?\nAnswer: The capital of France is"
    items = [Example(str(g), prompt, g) for g in (("Paris",), ("Lutetia", "Paris"), ("Lutetia",))]
    assert evaluate(demo, Made("first"), examples=items).correct.tolist() == [1, 1, 0]


class Spy:
    """Stands in for an intervention."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.open = 0

    @contextmanager
    def on(self, lm: rs.LM, prompt: int | None = None) -> Iterator[None]:
        assert prompt is not None
        self.seen.append(prompt)
        self.open += 1
        yield
        self.open -= 1


@pytest.mark.parametrize("way", ["exact", "generate"])
def test_an_intervention_is_on_around_every_batch_and_told_its_prompt(way: str) -> None:
    lm, spy = a_model(), Spy()
    states = []

    def look(module: Any, args: Any, given: Any) -> None:
        states.append(spy.open)

    hook = lm.model.register_forward_pre_hook(look, with_kwargs=True)
    evaluate(lm, Made(way), under=spy, batch_tokens=1)
    hook.remove()
    assert set(states) == {1}
    lengths = {len(lm.tokenizer(e.prompt).input_ids) for e in ITEMS}
    assert set(spy.seen) == lengths
    assert spy.open == 0


def test_rows_of_a_batch_share_the_column_where_the_prompt_ends() -> None:
    lm, spy = a_model(), Spy()
    shapes = []
    hook = lm.model.register_forward_pre_hook(
        lambda module, args, given: shapes.append(given["attention_mask"].clone()), with_kwargs=True
    )
    evaluate(lm, Made("first"), examples=[replace(e, gold=("xyz",)) for e in ITEMS], under=spy)
    hook.remove()
    (mask,) = shapes
    longest = max(len(lm.tokenizer(e.prompt).input_ids) for e in ITEMS)
    assert spy.seen == [longest]
    assert mask.shape == (4, longest + len(lm.tokenizer(" xyz").input_ids) - 1)
    assert bool(mask[:, longest - 1 :].all())  # padding is on the left alone
    assert sorted(mask.sum(1).tolist()) == sorted(len(lm.tokenizer(e.prompt + " xyz").input_ids) - 1 for e in ITEMS)


def test_a_chat_template_wraps_the_question_and_begins_the_answer(demo: rs.LM) -> None:
    (example,) = rs.tasks.find("capitals").examples(demo, 1, 0)
    wrapped, bare = prompt_of(demo, example, template=True), prompt_of(demo, example)
    assert wrapped.text.endswith(
        "<|im_start|>user\nQuestion: What is the capital of China?\nAnswer:<|im_end|>\n"
        "<|im_start|>assistant\nThe capital of China is"
    )
    assert bare.text == example.prompt
    assert demo.tokenizer.decode(answer_of(demo, wrapped, "Beijing")) == " Beijing"
    rows = [evaluate(demo, "capitals", n=1, template=on).iloc[0] for on in (True, False)]
    assert [row.template for row in rows] == [True, False]
    assert rows[0].first_ids == demo.tokenizer("<|im_start|>system\nYou").input_ids[:4]
    assert rows[1].first_ids == demo.tokenizer("Question: What is the").input_ids[:4]
    assert rows[0].prompt_tokens > rows[1].prompt_tokens + 10


def test_the_first_token_that_shows_is_what_first_means(demo: rs.LM) -> None:
    ids = demo.tokenizer("\n Paris is").input_ids
    shown = demo.tokenizer.decode(opening(demo, tuple(ids)))
    assert shown.strip() == "Paris"


def test_the_model_and_the_global_random_state_stay_as_found() -> None:
    lm = a_model("gpt2", resid_pdrop=0.5)
    lm.model.train()
    lm.model.transformer.h[0].eval()
    modes = [m.training for m in lm.model.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = evaluate(lm, Made("generate")), evaluate(lm, Made("generate"))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in lm.model.modules()] == modes
    pd.testing.assert_frame_equal(first, second)  # no dropout


class Twice:
    """A tokenizer that encodes a prompt differently once an answer follows it."""

    def __init__(self, own: Any):
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, text: str, add_special_tokens: bool = True, **more: Any) -> Any:
        found = self.own(text, add_special_tokens=add_special_tokens, **more)
        if add_special_tokens and len(text) > 7 and not more:
            found["input_ids"][0] = 5
        return found


def test_an_answer_that_would_move_the_prompts_ids_is_encoded_alone() -> None:
    lm = a_model()
    item = Example("a", "abc def", ("xy",))
    (row,) = evaluate(lm, Made("exact"), examples=[item]).itertuples()
    moved = replace(lm, tokenizer=Twice(lm.tokenizer))
    (again,) = evaluate(moved, Made("exact"), examples=[item]).itertuples()
    assert (again.logprob, again.gold_tokens) == (pytest.approx(row.logprob), row.gold_tokens)


BAD: Sequence[tuple[str, Any, dict[str, Any]]] = [
    ("no examples", None, {"n": 0}),
    ("no examples", None, {"examples": []}),
    ("trained on 20: make them shorter", {"trained_length": 20}, {}),
    ("no tokenizer", {"tokenizer": None}, {}),
    ("no chat template", None, {"template": True}),
]


@pytest.mark.parametrize(("word", "changes", "given"), BAD, ids=[b[0] for b in BAD])
def test_what_cannot_be_evaluated_is_said(word: str, changes: dict[str, Any] | None, given: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=word):
        evaluate(replace(a_model(), **(changes or {})), Made("first"), **given)


def test_generation_past_the_trained_length_is_refused_too() -> None:
    lm = a_model()
    longest = max(len(lm.tokenizer(e.prompt).input_ids) for e in ITEMS)
    evaluate(replace(lm, trained_length=longest + 7), Made("generate"))
    with pytest.raises(BadInput, match=f"up to {longest + 7} tokens"):
        evaluate(replace(lm, trained_length=longest + 6), Made("generate"))


def test_a_tokenizer_of_another_model_is_refused() -> None:
    lm = replace(a_model(vocab_size=20), tokenizer=characters())
    with pytest.raises(BadInput, match=r"ids up to .* where the model has 20"):
        evaluate(lm, Made("first"))


def test_answers_that_the_paper_s_scope_would_change_are_refused() -> None:
    """With scope all-previous every token but the last of a forward is changed: an answer's own tokens among them."""
    lm = rs.wrap(tiny("llama", max_position_embeddings=512), characters())
    for under in (Freeze(1, scope="all-previous"), Together((Disrupt(), Noise(1, scope="all-previous")))):
        with pytest.raises(rs.BadInput, match="all-previous"):
            rs.evaluate(lm, "key_value:pairs=2", n=2, under=under)
    rs.evaluate(lm, "key_value:pairs=2", n=2, under=Freeze(1))
