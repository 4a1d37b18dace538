"""The final answer of GSM8K: a number after ``####``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from draftco_jax.rewards.scores import Score, verdict

ANSWER_MARK = "####"
_MAX_DIGITS = 60
# Commas stand between groups of three digits, or nowhere.
_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_FINAL = re.compile(rf"####[ \t]*\$?({_NUMBER})(?![\d,.]*\d)", re.ASCII)


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####`` of a text; None where there is no mark or no number after it.

    ``#### 1,234`` and ``#### $1234.00 in all`` are 1234; ``#### 1,23`` is no number. What follows the number does not
    count.
    """
    found = _FINAL.match(text, text.rfind(ANSWER_MARK)) if ANSWER_MARK in text else None
    if found is None or len(found[1]) > _MAX_DIGITS:
        return None
    return Decimal(found[1].replace(",", ""))


def gsm8k_score(response: str, answer: str) -> Score:
    """Right if the number after the last ``####`` is the gold answer, a number: 72, 72.0 and 072 are the same."""
    said = final_number(response)
    gold = final_number(f"{ANSWER_MARK} {answer.rpartition(ANSWER_MARK)[2].strip()}")
    return verdict(
        said is not None and said == gold,
        found=said is not None,
        answer=None if said is None else f"{said.normalize():f}",
    )


class Gsm8kScorer:
    """`gsm8k_score` of many responses."""

    def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[Score]:
        """One score a response."""
        return [gsm8k_score(response, answer) for response, answer in zip(responses, answers, strict=True)]
