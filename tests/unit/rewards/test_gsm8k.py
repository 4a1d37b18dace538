"""GSM8K's final answer: which number a response ends on."""

from __future__ import annotations

import pytest

from draftco_jax.errors import UserError
from draftco_jax.rewards.catalog import require_gold
from draftco_jax.rewards.gsm8k import Gsm8kScorer, gold_number, gsm8k_score


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
        ("#### 1e3", 0.0, 0.0),
        ("#### \\$1,234", 1.0, 1.0),
        ("#### $1234$", 1.0, 1.0),
        ("#### **1234** seats", 1.0, 1.0),
        (r"#### \boxed{1234}", 1.0, 1.0),
        ("#### 1234/5", 0.0, 0.0),
        ("#### 1234 / 5", 0.0, 0.0),
        ("#### **1234**/5", 0.0, 0.0),
        (r"#### \boxed{1234}/5", 0.0, 0.0),
        ("#### 1234:30", 0.0, 0.0),
        ("#### 1234e2", 0.0, 0.0),
        ("#### 1234 567", 0.0, 0.0),
        ("#### 1234 x 2", 0.0, 0.0),
        ("#### 1234-1240", 0.0, 0.0),
        ("#### " + "9" * 5000, 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("gold", ["1234", "He has 1,234.\n#### 1,234"])
def test_the_number_after_the_last_mark_counts(response: str, correct: float, found: float, gold: str):
    score = gsm8k_score(response, gold)
    assert (score.total, dict(score.components)) == (correct, {"correct": correct, "format": found})


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### -5", "\N{MINUS SIGN}5"),
        ("#### \N{MINUS SIGN}5", "-5"),
        ("#### .5", "0.5"),
        ("#### 0.50", ".5"),
    ],
)
def test_signs_and_points_may_be_written_in_several_ways(response: str, gold: str):
    assert gsm8k_score(response, gold).total == 1.0
    assert gsm8k_score(response, gold.lstrip("-\N{MINUS SIGN}0") + "1").total == 0.0


@pytest.mark.parametrize("gold", ["3/4", "10:30", "2e3", "1 234", "3 apples", "3 or 4", "#### 3/4", "", "1,23"])
def test_a_gold_answer_is_a_number_as_a_whole_or_none(gold: str):
    number = gold.removeprefix("#### ")[:1]
    assert gold_number(gold) is None
    assert gsm8k_score(f"#### {number}", gold).total == 0.0
    with pytest.raises(UserError, match="rows.jsonl row 7: answer=.* must be a number as a whole for reward=gsm8k"):
        require_gold("gsm8k", gold, "rows.jsonl row 7")
    require_gold("dapo", gold, "rows.jsonl row 7")
    require_gold("gsm8k", "There are 3.\n#### $1,234", "rows.jsonl row 7")


def test_equal_numbers_are_one_vote():
    scores = Gsm8kScorer().score(["#### 1,200", "#### 1200.0", "#### 12", "none"], ["12"] * 4)
    assert [score.answer for score in scores] == ["1200", "1200", "12", None]
