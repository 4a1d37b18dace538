"""GSM8K's final answer: which number a response ends on."""

from __future__ import annotations

import pytest

from draftco_jax.rewards.gsm8k import Gsm8kScorer, gsm8k_score


@pytest.mark.parametrize(
    ("response", "correct", "found"),
    [
        ("2 x 617 = 1234\n#### 1234", 1.0, 1.0),
        ("#### 1,234", 1.0, 1.0),
        ("####1234", 1.0, 1.0),
        ("#### $1,234.00", 1.0, 1.0),
        ("#### 1234 dollars", 1.0, 1.0),
        ("#### 1234.", 1.0, 1.0),
        ("#### 01234", 1.0, 1.0),
        ("#### 1\n#### 1234", 1.0, 1.0),
        ("#### 1234\n#### 1", 0.0, 1.0),
        ("#### -1234", 0.0, 1.0),
        ("#### 1234.5", 0.0, 1.0),
        ("#### 12345", 0.0, 1.0),
        ("#### 1234\n####", 0.0, 0.0),
        ("#### 1,23", 0.0, 0.0),
        ("#### 12,34", 0.0, 0.0),
        ("####\n1234", 0.0, 0.0),
        ("1234", 0.0, 0.0),
        ("#### 1e3", 0.0, 1.0),
        ("#### " + "9" * 5000, 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("gold", ["1234", "He has 1,234.\n#### 1,234"])
def test_the_number_after_the_last_mark_counts(response: str, correct: float, found: float, gold: str):
    score = gsm8k_score(response, gold)
    assert (score.total, dict(score.components)) == (correct, {"correct": correct, "format": found})


def test_equal_numbers_are_one_vote():
    scores = Gsm8kScorer().score(["#### 1,200", "#### 1200.0", "#### 12", "none"], ["12"] * 4)
    assert [score.answer for score in scores] == ["1200", "1200", "12", None]
