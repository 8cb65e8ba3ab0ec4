"""Scorers: answers that substring matching, or a careless anchor, gets wrong."""

from __future__ import annotations

import pytest

from rotoscope.tasks.score import begins_with, exact, f1, final_number, letter, line, one_of, yes_no


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Yes", "yes"),
        (" no.", "no"),
        ("NO!", "no"),
        ("\n\nYes", "yes"),
        ("**Yes**", "yes"),
        ("*No*, it isn't.", "no"),
        ('"Yes"', "yes"),
        ("`No`", "no"),
        ("Yes<|im_end|>", "yes"),
        ("<|im_start|>assistant\nNo<|im_end|>", "no"),
        ("Yes</s>No", "yes"),
        ("Yes, no doubt: no", "yes"),
        ("No, it is not wrong", "no"),
        ("No, yes would be a mistake.", "no"),
        ("Yes.\nQuestion: Is Rome in Peru?\nAnswer: No", "yes"),
        ("The answer is no.", "no"),
        ("Answer: Yes", "yes"),
        ("So the final answer is: yes", "yes"),
        ("True", "yes"),
        ("False.", "no"),
        ("right", "yes"),
        ("not right", "no"),
        ("That's not right", "no"),
        ("It is not wrong.", "yes"),
        ("incorrect", "no"),
        ("Yeah", "yes"),
        ("Nope", "no"),
        ("Yes—certainly", "yes"),
        ("Tokyo is OK", None),
        ("OK", None),
        ("yesterday", None),
        ("Yesterday, no", None),
        ("Norway", None),
        ("November", None),
        ("Not sure", None),
        ("No idea", None),
        ("No city of that name is known to me, but yes", None),
        ("Yes and no", None),
        ("Yes/No", None),
        ("yes or no?", None),
        ("Correctness matters", None),
        ("Rightly so", None),
        ("I think yes", None),
        ("", None),
        ("<|im_end|>Yes", "yes"),
    ],
)
def test_yes_or_no_is_what_an_answer_begins_with(answer: str, verdict: str | None) -> None:
    assert yes_no(answer) == verdict


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42", 42),
        ("1,234", 1234),
        ("1,234,567.5", 1234567.5),
        ("$5.00.", 5),
        ("-$5", -5),
        ("€ 7", 7),
        ("12%", 12),
        ("3.14.", 3.14),
        (".5", 0.5),
        ("-3", -3),
        ("−3", -3),
        ("10 - 3", 3),
        ("10-3=7", 7),
        ("#### 42", 42),
        ("She has 3, then 4.\n#### 1,007 left, of 2000", 1007),
        ("The answer is 12. There were 30 before.", 12),
        ("First 3, then 4, so 7", 7),
        ("42 apples.", 42),
        ("**42**", 42),
        ("42<|im_end|>43", 42),
        ("42\nQuestion: What is 5 + 5?\nAnswer: 10", 42),
        ("10,20", 20),
        ("1e3", 1000),
        ("forty-two", None),
        ("", None),
    ],
)
def test_the_number_that_an_answer_comes_to(answer: str, value: float | None) -> None:
    assert final_number(answer) == value


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("B) 21", "B"),
        ("b.", "B"),
        ("The answer is C.", "C"),
        ("Answer: (D)", "D"),
        ("**E**", "E"),
        ("C<|im_end|>", "C"),
        ("A", "A"),
        ("A car drives", None),
        ("Because", None),
        ("Banana", None),
        ("a car", None),
        ("F", None),
        ("It is B", "B"),
        ("", None),
    ],
)
def test_a_letter_is_a_letter_alone(answer: str, verdict: str | None) -> None:
    assert letter(answer) == verdict


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("12345", "12345", True),
        (" 12345.", "12345", True),
        ("12345 is the pass key", "12345", True),
        ("123456", "12345", False),
        ("12345.6", "12345", False),
        ("12345,678", "12345", False),
        ("1 12345", "12345", False),
        ("\n12345\n", "12345", True),
        ("**12345**", "12345", True),
        ("paris", "Paris", True),
        ("Parish", "Paris", False),
        ("Paris, France", "Paris", True),
        ("It's Paris.", "Paris", True),
        ("not Paris", "Paris", False),
        ("New  Delhi", "New Delhi", True),
        ("New", "New Delhi", False),
        ("Washington, D.C. it is", "Washington, D.C.", True),
        ("N'Djamena", "N'Djamena", True),
        ("", "Paris", False),
        ("Paris", "", False),
    ],
)
def test_an_answer_begins_with_the_right_one_as_whole_words(answer: str, gold: str, right: bool) -> None:
    assert begins_with(answer, gold) is right


def test_of_several_options_the_longest_that_fits() -> None:
    assert one_of("Positive.", ("negative", "positive")) == "positive"
    assert one_of("positively bad", ("negative", "positive")) is None
    assert one_of("not positive", ("negative", "positive")) is None
    assert one_of("very good film", ("very", "very good")) == "very good"


@pytest.mark.parametrize(
    ("answer", "gold", "em", "overlap"),
    [
        ("The Broncos!", "broncos", 1, 1),
        ("Denver", "Denver Broncos", 0, 2 / 3),  # precision 1, recall 1/2
        ("the a an", "Denver", 0, 0),
        ("An apple a day", "apple day", 1, 1),
        ("1,234", "1234", 1, 1),
        ("to to be", "to be to", 0, 1),
        ("to to to", "to be", 0, 2 / 5),  # one word shared of 3 and of 2
        ("", "Denver", 0, 0),
        ("Denver<|im_end|>", "Denver", 1, 1),
    ],
)
def test_squad_scores(answer: str, gold: str, em: float, overlap: float) -> None:
    assert exact(answer, gold) == em
    assert f1(answer, gold) == pytest.approx(overlap)


def test_the_first_line_of_an_answer() -> None:
    assert line("\n\n Ada Brandt \nIn 1871") == "Ada Brandt"
    assert line("Ada<|im_end|>\nBrandt") == "Ada"
