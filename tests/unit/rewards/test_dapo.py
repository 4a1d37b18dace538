"""DAPO's verifier: verdicts of the published rules, quirks included."""

from __future__ import annotations

import pytest

from draftco_jax.rewards.boxed import last_boxed
from draftco_jax.rewards.dapo import DapoScorer, dapo_score, dapo_strict_score, normal_form


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("34", "34"),
        ("1,234", "1234"),
        ("1,234.5", "1,234.5"),  # no whole number, so commas stay
        ("x = 5", "5"),
        ("$5$", "5"),
        (r"the value $\frac12$ of $x$", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\$ 12", "12"),
        (r"12\text{ cm}", "12"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"90^\circ", "90"),
        ("12 square feet", "12"),
        (r"\text{3} \text{and} \text{4}", "34"),
        ("pizza 5", "pizz5"),  # "a " is cut out inside words too
        ("", ""),
    ],
)
def test_normal_forms_are_the_published_ones(answer: str, normal: str):
    assert normal_form(answer) == normal


@pytest.mark.parametrize(
    ("response", "correct", "found"),
    [
        ("We add.\nAnswer: 34", 1.0, 1.0),
        ("ANSWER :34", 1.0, 1.0),
        ("Answer: $34$", 1.0, 1.0),
        ("Answer: 34.", 0.0, 1.0),  # the full stop is part of it
        ("Answer: 33\nAnswer: 34", 1.0, 1.0),
        ("Answer: 34\nAnswer: 33", 0.0, 1.0),
        ("Answer:\n34", 1.0, 1.0),  # white space after the colon may hold a line break
        ("34", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("Answer: 34" + "x" * 290, 0.0, 1.0),
        ("Answer: 34\n" + "x" * 289, 1.0, 1.0),  # 300 characters from "Answer" on
        ("Answer: 34\n" + "x" * 290, 0.0, 0.0),  # one letter of the mark is out of sight
    ],
)
def test_the_last_answer_within_the_last_300_characters_counts(response: str, correct: float, found: float):
    score = dapo_score(response, "34")
    assert (score.total, dict(score.components)) == (correct, {"correct": correct, "format": found})


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        (r"so \boxed{34}", 1.0),
        (r"\boxed{33} or \boxed{34}", 1.0),
        (r"\boxed{34} or \boxed{33}", 0.0),
        (r"\boxed{ 34}", 0.0),
        (r"\boxed{34", 0.0),
        ("Answer: 34", 0.0),
        (r"\boxed{34}" + "x" * 90, 1.0),
        (r"\boxed{34}" + "x" * 91, 0.0),
    ],
)
def test_strict_is_the_last_box_of_the_last_100_characters_to_the_letter(response: str, correct: float):
    assert dapo_strict_score(response, "34").total == correct


def test_a_missing_answer_is_wrong_whatever_the_gold_answer_is():
    # The published code names a missing answer "[INVALID]", which a gold answer of that text would equal.
    assert dapo_score("none", "[INVALID]").total == dapo_score("none", "").total == 0.0


def test_the_last_box_is_found_with_its_inner_braces():
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}") is None


def test_many_responses_are_scored_in_order():
    scores = DapoScorer().score(["Answer: 1", "Answer: 2", "3"], ["1", "1", "3"])
    assert [(score.total, score.answer) for score in scores] == [(1.0, "1"), (0.0, "2"), (0.0, None)]
    assert DapoScorer(strict=True).score([r"\boxed{1}"], ["1"])[0].total == 1.0
