"""The final answer of GSM8K: a number after ``####``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from draftco_jax.rewards.scores import Score, verdict

ANSWER_MARK = "####"
_MAX_DIGITS = 60
_MINUS = "\N{MINUS SIGN}"
# Commas stand between groups of three digits, or nowhere.
_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
# Dollars, a box or bold marks may stand around it, a dollar behind the sign too.
_DRESSED = rf"(?:[ \t]|\*\*|\\?\$|\\boxed\{{)*(-?)(?:\\?\$)?({_NUMBER})"
# 3/4, 10:30, 2e3, 1 234, 3 x 4 and 10-12 begin with a number and are another or none.
_GOES_ON = r"[\d,.]*\d|[*}$]*(?:[/:]|[eE][-+]?\d|[ \t]*(?:[-+*/:^x][ \t]*)?\.?\d|[ \t]*\\[dt]?frac)"
_FINAL = re.compile(rf"{ANSWER_MARK}{_DRESSED}(?!{_GOES_ON})", re.ASCII)
_WHOLE = re.compile(rf"{_DRESSED}[*}}$]*\.?", re.ASCII)


def final_number(text: str) -> Decimal | None:
    r"""The number after the last ``####`` of a text; None where there is no mark or no number after it.

    ``#### 1,234``, ``#### $1234.00 in all``, ``#### **1234**`` and ``#### \boxed{1234}`` are 1234. ``#### 1,23`` is no
    number, nor is the beginning of ``3/4``, ``10:30``, ``2e3``, ``1 234`` or ``10-12`` one. Words that follow do not
    count.
    """
    found = _FINAL.match(text.replace(_MINUS, "-"), text.rfind(ANSWER_MARK)) if ANSWER_MARK in text else None
    return _value(found)


def gold_number(answer: str) -> Decimal | None:
    """The number that a gold answer is as a whole, or that stands alone after its last ``####``; else None."""
    return _value(_WHOLE.fullmatch(answer.rpartition(ANSWER_MARK)[2].strip().replace(_MINUS, "-")))


def _value(found: re.Match[str] | None) -> Decimal | None:
    if found is None or len(found[2]) > _MAX_DIGITS:
        return None
    return Decimal(found[1] + found[2].replace(",", ""))


def gsm8k_score(response: str, answer: str) -> Score:
    """Right if the number after the last ``####`` is the gold answer, a number (`gold_number`): 72, 72.0 and 072 are
    the same. No response to a gold answer that is no number is right."""
    said, gold = final_number(response), gold_number(answer)
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
