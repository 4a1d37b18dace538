"""Laws in fractions, for tests that compare the law of an emitted text with the target's exactly.

A rule is written down in its test as a walk over all outcomes with their probabilities, and must give the target's law
as an equality of fractions. The library's function is then held to that walk: uniforms `MARGIN` on either side of each
of its thresholds lead it to each outcome, so that all its probabilities are right to `MARGIN`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np

Text = tuple[int, ...]
Law = tuple[Fraction, ...]
Table = Callable[[Text], Law]  # law of the next token after a prefix

ZERO, ONE = Fraction(0), Fraction(1)
MARGIN = 1e-6
BELOW_ONE = 1 - 2**-24  # the largest float32 uniform
SIXTEENTHS = 16  # exact in float32, so that a rule's thresholds are met to its own rounding


def random_law(rng: np.random.Generator, vocab: int, parts: int = SIXTEENTHS) -> Law:
    """A law in `parts` parts; zeros are frequent."""
    cuts = np.sort(rng.integers(0, parts + 1, vocab - 1))
    return tuple(Fraction(int(n), parts) for n in np.diff([0, *cuts, parts]))


def one_hot(token: int, vocab: int) -> Law:
    return tuple(Fraction(int(x == token)) for x in range(vocab))


def next_candidate(way: str, q: Law, before: Iterable[int]) -> Law:
    """Law of the candidate that comes after those `before`, drawn from q by one of the ways of `candidates`."""
    taken = set(before)
    if way == "independent":
        return q
    if way == "distinct":
        return normalised(tuple(ZERO if x in taken else value for x, value in enumerate(q)))
    order = sorted(range(len(q)), key=lambda x: (x in taken, -q[x], x))
    return one_hot(order[0], len(q))


def random_table(rng: np.random.Generator, vocab: int, depth: int, parts: int = SIXTEENTHS) -> Table:
    prefixes = [prefix for n in range(depth + 1) for prefix in itertools.product(range(vocab), repeat=n)]
    return {prefix: random_law(rng, vocab, parts) for prefix in prefixes}.__getitem__


def one_hot_table(rng: np.random.Generator, vocab: int, depth: int) -> Table:
    hot = random_table(rng, vocab, depth)
    return lambda prefix: one_hot(int(np.argmax(hot(prefix))), vocab)


def constant(law: Law) -> Table:
    return lambda prefix: law


def positive(values: Iterable[Fraction]) -> Law:
    return tuple(max(value, ZERO) for value in values)


def normalised(weights: Law, otherwise: Law | None = None) -> Law:
    """The law of the weights; `otherwise`, or zeros, where they have no mass."""
    total = sum(weights, ZERO)
    return tuple(w / total for w in weights) if total else otherwise or weights


def residual(p: Law, q: Law) -> Law:
    """(p - q)_+ normalised; p where p = q, which no refusal leads to."""
    return normalised(positive(a - b for a, b in zip(p, q, strict=True)), p)


def acceptance(p: Law, q: Law, token: int) -> Fraction:
    return min(ONE, p[token] / q[token]) if q[token] else ZERO


def probability(table: Table, text: Text, after: Text = ()) -> Fraction:
    """Of `text` as a continuation of `after`."""
    result = ONE
    for i, token in enumerate(text):
        result *= table(after + text[:i])[token]
    return result


def target_law(target: Table, vocab: int, length: int) -> dict[Text, Fraction]:
    return {text: probability(target, text) for text in itertools.product(range(vocab), repeat=length)}


def completed_law(
    emissions: Iterable[tuple[Fraction, Text]], target: Table, vocab: int, length: int
) -> dict[Text, Fraction]:
    """Law of `length` tokens: what a round emits, continued by the target."""
    totals: dict[Text, Fraction] = {}
    for weight, text in emissions:
        totals[text] = totals.get(text, ZERO) + weight
    law = dict.fromkeys(itertools.product(range(vocab), repeat=length), ZERO)
    for start, weight in totals.items():
        for end in itertools.product(range(vocab), repeat=length - len(start)):
            law[start + end] += weight * probability(target, end, start)
    return law


Pair = tuple[float, float]  # a uniform next to the threshold, and one far from it


def passing(threshold: Fraction) -> Pair:
    return max(float(threshold) - MARGIN, 0.0), 0.0


def failing(threshold: Fraction) -> Pair:
    return min(float(threshold) + MARGIN, BELOW_ONE), BELOW_ONE


def drawing(law: Law, token: int) -> Pair:
    """Uniforms at both ends of a token's interval."""
    low = float(sum(law[:token], ZERO))
    return low + MARGIN, low + float(law[token]) - MARGIN


def floats(rows: object) -> np.ndarray:
    """Nested fractions as float32."""
    return np.asarray(rows, dtype=object).astype(np.float64).astype(np.float32)
