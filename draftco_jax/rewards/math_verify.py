r"""Mathematical equality by the optional ``math-verify`` package (``pip install 'draftco[math]'``).

`math_verify_score` judges one response and runs in a process of `pool.PoolScorer`, which is what stops it: the
package's own time limit is a signal and works in a main thread only, so it is switched off.

The answer of a response is its last ``\boxed{...}``, else what the package finds ("the answer is 7", the last formula,
the last number). Around the package (0.9.0) stand these rules, each against a wrong verdict of its own:

- the gold answer comes first and both are read as LaTeX: the package's equality is not symmetric, and text without
  math marks may be read as its last number;
- ``**`` and ``\$`` are taken out, ``\mathrm{e}`` is e, ``\sqrt(2)`` is ``\sqrt{2}``; a reading that was cut inside
  braces is none;
- in a box and in a gold answer digits in groups of three are one number: ``5 000``, ``1\,000``, ``1{,}000``;
- two numbers that it calls equal must be so: exactly if both are rational, else within 1e-5 of the larger. It rounds to
  six decimals, under which all tiny numbers are one. A percent sign exempts (it takes 50 for 50 %).

Not handled: several answers in one text without a box ("12 or 13"), of which it takes the first; a word in
a box as a unit (``\boxed{18 dollars}``, ``\boxed{\text{18 dollars}}``), which it takes for a product or a name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
from types import ModuleType
from typing import Any

from draftco_jax.errors import UserError
from draftco_jax.rewards.boxed import last_boxed
from draftco_jax.rewards.pool import PoolConfig, PoolScorer

FUNCTION = "draftco_jax.rewards.math_verify:math_verify_score"

TAIL_CHARACTERS = 20_000
"""Of a response, the end that is read."""
_RELATIVE = 1e-5
_DEFAULT = PoolConfig()

_UPRIGHT = re.compile(r"\\(?:mathrm|operatorname|rm)\{([A-Za-z])\}")
_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_DOLLAR = re.compile(r"(?<!\\)\\\$")
_GROUPED = re.compile(r"(?<![\w.,^])\d{1,3}(?:(?:[ ~]|,?\\[,!;: ]|\{,\})\d{3})+(?!\d)", re.ASCII)
_FRACTION = re.compile(r"\\[dt]?frac\s*\(")


def math_verify_score(response: str, answer: str) -> dict[str, Any]:
    """total and correct: 1.0 or 0.0; format: whether the answer was boxed; answer: what was read, None for nothing."""
    boxed = last_boxed(response[-TAIL_CHARACTERS:])
    gold_text = last_boxed(answer) if r"\boxed{" in answer else answer
    gold = _read(_formula(gold_text or ""))
    found = _read(_formula(boxed) if boxed is not None else _clean(response[-TAIL_CHARACTERS:]))
    correct = bool(gold and found) and _equal(gold, found)
    said = str(found[0]) if found else None
    return {"total": float(correct), "correct": float(correct), "format": float(boxed is not None), "answer": said}


def math_verify_scorer(config: PoolConfig = _DEFAULT) -> PoolScorer:
    """The scorer of many responses; raises `UserError` where the package is missing or does not judge 42 to be 42."""
    require_library()
    scorer = PoolScorer(FUNCTION, config, modules=("math_verify", "sympy"))
    score = scorer.score([r"\boxed{42}"], ["42"])[0]
    if score.total != 1.0:
        raise UserError(
            f"reward=math_verify must judge a boxed 42 right, it gave {score.total} ({score.fault or 'no fault'}); "
            "install the pinned math-verify, or raise timeout_seconds"
        )
    return scorer


def require_library() -> None:
    """Raises `UserError` where ``math-verify`` is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("reward=math_verify must have its package installed; run: pip install 'draftco[math]'")


def _clean(text: str) -> str:
    text = _UPRIGHT.sub(r"\1", _DOLLAR.sub("", text.replace("**", "")))
    return _ROOT.sub(r"\\sqrt{\1}", text)


def _formula(text: str) -> str:
    """A text that is nothing but the answer, between math marks."""
    joined = _GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), _clean(text).replace("$", ""))
    return f"${joined}$"


def _read(text: str) -> list[Any]:
    """What the package reads in a text: an expression and its source, or nothing."""
    library = _library()
    if _FRACTION.search(text):  # would be cut before it
        return []
    kinds = (library.LatexExtractionConfig(), library.ExprExtractionConfig())
    found = library.parse(text, kinds, parsing_timeout=None)
    source = found[-1] if found and isinstance(found[-1], str) else ""
    return [] if source.count("{") != source.count("}") else found


def _equal(gold: list[Any], found: list[Any]) -> bool:
    if not _library().verify(gold, found, timeout_seconds=None):
        return False
    sympy = importlib.import_module("sympy")
    left, right = (
        side.rhs if isinstance(side, sympy.Eq) and side.lhs.is_Symbol else side for side in (gold[0], found[0])
    )
    if left == right or not all(isinstance(side, sympy.Expr) and not side.free_symbols for side in (left, right)):
        return True
    if any("%" in str(part) for part in (*gold, *found)):
        return True
    left, right = left.doit(), right.doit()
    if left.is_Rational and right.is_Rational:
        return bool(left == right)
    difference, largest = (abs(sympy.N(x)) for x in (left - right, sympy.Max(abs(left), abs(right))))
    return bool(difference <= _RELATIVE * largest)


@functools.cache
def _library() -> ModuleType:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it keeps no time
    return importlib.import_module("math_verify")
