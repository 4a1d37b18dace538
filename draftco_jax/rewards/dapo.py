r"""The verifier of DAPO: what follows the last "Answer:", in normal form, equal to the letter.

The rules are those of ``math_dapo.py`` of verl and ``dapo_math_verifier.py`` of NeMo-RL (both from the Minerva rules
of lm-evaluation-harness), quirks included, so that rewards are comparable with published runs. A wrong answer is 0, as
in NeMo-RL; verl and the paper give -1, which advantages over the group's spread do not tell from it.

Quirks worth knowing: units are cut out wherever they stand ("points" also inside a word), "a " and "an " too ("pizza 5"
ends as "pizz5"), and 0.5 is not 1/2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from draftco_jax.rewards.boxed import last_boxed
from draftco_jax.rewards.scores import Score, verdict

TAIL_CHARACTERS = 300
"""Only the end of a response is read."""
STRICT_TAIL_CHARACTERS = 100

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Applied one after another, in this order.
_REPLACED = (
    *((text, "") for text in ("an ", "a ")),
    (".$", "$"),
    *((text, "") for text in (r"\$", "\\ ", " ")),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_REMOVED = (
    *_WORDS.split(),
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r".*?\$(.*?)\$.*", r"$\1$"),  # the first formula of the line is the answer
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),  # \frac12 is \frac{1}{2}
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


def normal_form(answer: str) -> str:
    """An answer without units, spaces and TeX dress; of an equation the right side."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for old in _REMOVED:
        text = text.replace(old, "")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def dapo_score(response: str, answer: str) -> Score:
    """Right if what follows the last "Answer:" of the last 300 characters has the normal form of the gold answer."""
    found = _ANSWER.findall(response[-TAIL_CHARACTERS:])
    said = normal_form(found[-1]) if found else None
    return verdict(said is not None and said == normal_form(answer), found=bool(found), answer=said)


def dapo_strict_score(response: str, answer: str) -> Score:
    r"""Right if the last ``\boxed{...}`` of the last 100 characters is the gold answer to the letter."""
    said = last_boxed(response[-STRICT_TAIL_CHARACTERS:])
    return verdict(said == answer, found=said is not None, answer=said)


class DapoScorer:
    """`dapo_score`, or the strict one, of many responses."""

    def __init__(self, *, strict: bool = False) -> None:
        self._score = dapo_strict_score if strict else dapo_score

    def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[Score]:
        """One score a response."""
        return [self._score(response, answer) for response, answer in zip(responses, answers, strict=True)]
