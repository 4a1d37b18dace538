"""pass@k and votes against listing all draws, with fractions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest

from draftco_jax.metrics.passes import majority_at_k, pass_at_k


def draws(samples: int, k: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(samples), k))


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples: int):
    for correct in range(samples + 1):
        for k in range(1, samples + 1):
            found = draws(samples, k)
            share = Fraction(sum(any(i < correct for i in draw) for draw in found), len(found))
            assert pass_at_k(samples, correct, k) == float(share)


def test_pass_at_k_is_unbiased():
    # Over all outcomes of 6 samples that are each right with probability 2/7.
    p, n, k = Fraction(2, 7), 6, 3
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * Fraction(pass_at_k(n, c, k)) for c in range(n + 1))
    assert float(expected) == pytest.approx(float(1 - (1 - p) ** k), rel=1e-14)
    assert pass_at_k(4096, 1, 1024) == 0.25, "large numbers do not overflow"


def vote(answers: list[str | None], right: list[bool]) -> Fraction:
    """The rule in words: count, look who leads, share ties."""
    named = ["right" if r else a for a, r in zip(answers, right, strict=True)]
    votes = Counter(name for name in named if name is not None)
    leaders = [name for name, count in votes.items() if count == max(votes.values())]
    return Fraction(int("right" in leaders), max(1, len(leaders)))


CASES = [
    ("aabbc", "a"),
    ("aabb.", "a"),
    ("abcde", "a"),
    ("a....", "a"),
    (".....", "a"),
    ("bbbbb", "a"),
    ("aAbbbc", "aA"),  # two ways to write the right answer are one candidate
    ("aabbcc.", "a"),
    ("aaabbcc", "a"),
    ("abbccdd.", "a"),
]


@pytest.mark.parametrize(("said", "right"), CASES)
def test_majority_is_the_mean_over_all_draws_with_ties_shared(said: str, right: str):
    answers: list[str | None] = [None if letter == "." else letter for letter in said]
    correct = [letter in right for letter in said]
    for k in range(1, len(said) + 1):
        found = [vote([answers[i] for i in draw], [correct[i] for i in draw]) for draw in draws(len(said), k)]
        assert majority_at_k(answers, correct, k) == float(sum(found) / len(found)), k
    assert majority_at_k(answers, correct, 1) == sum(correct) / len(said) == pass_at_k(len(said), sum(correct), 1)


def test_a_tie_of_three_counts_a_third():
    assert majority_at_k(["5", "6", "7"], [True, False, False], 3) == float(Fraction(1, 3))
    assert majority_at_k(["5", "5", "6"], [True, True, False], 3) == 1.0
    assert majority_at_k([None, None, "5"], [False, False, True], 3) == 1.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pass_at_k(4, 5, 1), r"correct=5 must be in 0\.\.4"),
        (lambda: pass_at_k(4, 1, 5), r"k=5 must be in 1\.\.4, the samples of a problem; draw more"),
        (lambda: pass_at_k(4, 1, 0), r"k=0 must be in 1\.\.4"),
        (lambda: majority_at_k(["a"], [True, False], 1), "answers=1 must be as many as correct=2"),
    ],
)
def test_counts_that_cannot_be_are_refused(call, said: str):
    with pytest.raises(ValueError, match=said):
        call()
