"""pass@k and majority votes: what several samples of a problem say of a policy. Pure functions of counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of k different samples is right, of n samples of which c are.

    ``1 - C(n - c, k) / C(n, k)``: the unbiased estimate of ``1 - (1 - p)^k`` (Chen et al. 2021, arXiv 2107.03374).
    k = 1 gives the share c / n. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _require_counts(samples, correct, k)
    return float(1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k)))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Probability that the majority of k different samples, drawn from these n, is right.

    Equal answers are one vote each; all answers that are right are one candidate, however they are written (1/2 and
    0.5). Answers tied at the top share: the right one of three counts a third. A sample without an answer (None) takes
    a place and votes for nothing, and a draw in which nobody votes is wrong. The mean over all C(n, k) draws, exactly,
    by counting (right votes, votes and ties of the others) and not by listing the draws.
    """
    if len(answers) != len(correct):
        raise ValueError(f"answers={len(answers)} must be as many as correct={len(correct)}; give one of each a sample")
    right = sum(correct)
    _require_counts(len(answers), right, k)
    rivals = Counter(answer for answer, is_right in zip(answers, correct, strict=True) if not is_right)
    silent = rivals.pop(None, 0)
    total = Fraction(0)
    for votes in range(1, min(right, k) + 1):
        ways = _ways(tuple(rivals.values()), silent, k - votes, votes)
        share = sum(Fraction(count, ties + 1) for ties, count in ways.items())
        total += math.comb(right, votes) * share
    return float(total / math.comb(len(answers), k))


def _ways(rivals: Sequence[int], silent: int, places: int, votes: int) -> dict[int, int]:
    """Ways to fill `places` from the rivals and the silent so that no rival has more than `votes`, by the number of
    rivals that have exactly as many."""
    filled = {(taken, 0): math.comb(silent, taken) for taken in range(min(silent, places) + 1)}
    for size in rivals:
        after: Counter[tuple[int, int]] = Counter()
        for (taken, ties), ways in filled.items():
            for more in range(min(size, votes, places - taken) + 1):
                after[taken + more, ties + (more == votes)] += ways * math.comb(size, more)
        filled = after
    return {ties: ways for (taken, ties), ways in filled.items() if taken == places}


def _require_counts(samples: int, correct: int, k: int) -> None:
    if not 0 <= correct <= samples:
        raise ValueError(f"correct={correct} must be in 0..{samples}, the samples")
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be in 1..{samples}, the samples of a problem; draw more")
