"""Mathematical equality: the package's known wrong verdicts, each with the right one."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from draftco_jax.errors import UserError
from draftco_jax.rewards import math_verify
from draftco_jax.rewards.math_verify import math_verify_score, math_verify_scorer
from draftco_jax.rewards.pool import PoolConfig

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed (pip install 'draftco[math]')"
)


@needs_library
@pytest.mark.parametrize(
    ("gold", "boxed", "right"),
    [
        ("42", "42", 1),
        ("42", "43", 0),
        ("0.5", r"\frac12", 1),
        ("1,234", "1234", 1),
        ("x=5", "5", 1),
        ("1/3", "0.333333", 1),
        ("1/3", "0.33", 0),
        (r"\infty", r"\infty", 1),
        (r"\{1,2\}", r"\{2,1\}", 1),
        ("(1,2)", "(2,1)", 0),
        pytest.param(r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", 0, id="b81-tiny"),
        pytest.param(r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}", 0, id="b81-tiny-swapped"),
        pytest.param(r"\frac{1}{2^{99}}", "2^{-99}", 1, id="b81-tiny-right"),
        pytest.param(r"x=\frac{1}{2^{99}}", r"x=\frac{1}{2^{98}}", 0, id="b81-tiny-equations"),
        pytest.param("0.000000001", "0.000000002", 0, id="b81-tiny-decimals"),
        pytest.param(r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0, id="b81-factorials"),
        pytest.param(r"\frac{1}{2006!}", r"\frac{1}{2004!}", 0, id="b81-factorials-swapped"),
        pytest.param(r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}", 0, id="b81-cut-in-braces"),
        pytest.param(r"1+\frac{1}{\mathrm{e}}", r"1-\frac{1}{\mathrm{e}}", 0, id="b81-cut-in-braces-swapped"),
        pytest.param(r"1-\frac{1}{\mathrm{e}}", r"1-\frac{1}{e}", 1, id="b81-upright-e"),
        pytest.param("n=2,3,4", "n=1,2,3", 0, id="b81-lists"),
        pytest.param(r"\pm 2021", "2021", 0, id="b81-sign"),
        pytest.param("4", r"4\sqrt(2)", 0, id="b82"),
        pytest.param("4", r"4\sqrt{2}", 0, id="b82-well-formed"),
        pytest.param("4", "4", 1, id="b82-right"),
        pytest.param(r"4\sqrt{2}", r"4\sqrt(2)", 1, id="b82-root"),
        pytest.param("4", r"4\frac(1)(2)", 0, id="b82-fraction"),
        pytest.param("3*x-1*y+13=0", "3x + 4y + 14=0", 0, id="b83"),
        pytest.param(r"m\ge\sqrt2", r"m\in[\sqrt2,\infty)", 1, id="b84-gold-first"),
        pytest.param(r"m\in[\sqrt2,\infty)", r"m\ge\sqrt2", 0, id="b84-the-other-way"),
        pytest.param("13", r"\text{13}", 1, id="b85-text"),
        pytest.param("73", "**73**", 1, id="b85-bold"),
        pytest.param("18", r"\$18", 1, id="dollar"),
        pytest.param("18", r"\$19", 0, id="dollar-wrong"),
        pytest.param("1000", r"1\,000", 1, id="thin-space"),
        pytest.param("12345000", "12 345 000", 1, id="spaces"),
        pytest.param("5", "5 000", 0, id="spaces-wrong"),
        pytest.param("3^2*500", "3^2 500", 1, id="a-power-is-no-group"),
    ],
)
def test_bug_cases_b81_to_b85_boxed_answers(gold: str, boxed: str, right: int):
    score = math_verify_score(rf"So it is \boxed{{{boxed}}}.", gold)
    assert (score["total"], score["correct"], score["format"]) == (right, right, 1.0)
    assert math_verify_score(rf"\boxed{{{boxed}}}", rf"\boxed{{{gold}}}")["total"] == right, "a gold answer in a box"


LONG = (
    "There are 234 seats in 13 rows.\n\n1. 234 / 13 = 18, and 18 x 4 = 72.\n2. One more is 73.\n\n{}\n\n(of 234 seats)"
)


@needs_library
@pytest.mark.parametrize(
    ("response", "gold", "right"),
    [
        ("Final Answer: **73**", "73", 1),
        pytest.param(LONG.format("**Final Answer: 73**"), "73", 1, id="b85-long"),
        pytest.param(LONG.format("**Final Answer:** 73"), "73", 1, id="b85-long-mark-bold"),
        pytest.param(LONG.format("**Final Answer: 73**"), "234", 0, id="b85-long-wrong"),
        ("3x + 4y + 14=0", "3*x-1*y+13=0", 0),
        (r"\boxed{7} no, \boxed{8}", "7", 0),
        (r"\boxed{7", "8", 0),
        ("", "7", 0),
        ("{" * 500, "7", 0),
        (r"\boxed{}", "7", 0),
    ],
)
def test_bug_cases_b83_b85_text_without_a_box(response: str, gold: str, right: int):
    assert math_verify_score(response, gold)["total"] == right


@needs_library
def test_bug_case_b80_math_is_judged_from_any_thread_and_what_hangs_is_a_fault():
    scorer = math_verify_scorer(PoolConfig(workers=1, timeout_seconds=6.0))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: scorer.score([r"\boxed{42}"], ["42"])[0].total, range(4)))
    assert found == [1.0] * 4
    started = time.monotonic()
    scores = scorer.score([r"\boxed{(10^9)!}", r"\boxed{7}"], ["7", "7"])
    assert [(score.total, score.fault) for score in scores] == [(0.0, "timeout"), (1.0, None)]
    assert time.monotonic() - started < 60.0
    scorer.close()


def test_a_missing_package_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr(math_verify.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="reward=math_verify must have its package installed; run: pip install"):
        math_verify_scorer()
