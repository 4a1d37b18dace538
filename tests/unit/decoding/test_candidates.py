"""Several candidates for one position: exact in fractions for every way of drawing them; the library follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding import candidates as library
from draftco_jax.decoding.candidates import Candidates

WAYS = ["independent", "distinct", "likeliest"]
SIZES = [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]
FAULTS = {
    "judged as distinct": "independent",
    "judged as independent": "distinct",
    "judged by q": "likeliest",
    "target not updated": "distinct",
    "residual of p": "distinct",
    "judged in the other order": "distinct",
}
VERIFY = jax.jit(library.verify)
DRAW = {
    "independent": jax.jit(library.independent),
    "distinct": jax.jit(library.distinct),
    "likeliest": lambda q, uniforms: library.likeliest(q, uniforms.shape[-1]),
}


def draws(rational, way, q, count) -> Iterator:
    """(weight, tokens, laws) of all candidates; where nothing is left to draw token 0 stands with a law of zeros."""
    for tokens in itertools.product(range(len(q)), repeat=count):
        laws = [rational.next_candidate(way, q, tokens[:j]) for j in range(count)]
        each = [law[x] if any(law) else Fraction(x == 0) for law, x in zip(laws, tokens, strict=True)]
        if weight := np.prod(each, initial=Fraction(1)):
            yield weight, tokens, laws


class Outcome(NamedTuple):
    weight: Fraction
    tokens: tuple[int, ...]
    laws: list
    index: int
    emitted: int
    judging: tuple[tuple[float, float], ...]
    emitting: tuple[float, float]


def judged_as(rational, q, tokens, laws, fault):
    """Tokens in the order of judging, and the law by which each is judged."""
    if fault in ("judged as distinct", "judged as independent"):
        return tokens, [rational.next_candidate(fault.split()[-1], q, tokens[:j]) for j in range(len(tokens))]
    if fault == "judged by q":
        return tokens, [q] * len(tokens)
    if fault == "judged in the other order":
        return tokens[::-1], laws[::-1]
    return tokens, laws


def outcomes(rational, way, p, q, count, fault=None) -> Iterator[Outcome]:
    for drawn, tokens, laws in draws(rational, way, q, count):
        law, reached, judging = p, drawn, ()
        for j, (token, q_j) in enumerate(zip(*judged_as(rational, q, tokens, laws, fault), strict=True)):
            accept = rational.acceptance(law, q_j, token)
            if accept:
                rest = ((0.0, rational.BELOW_ONE),) * (count - j - 1)  # of no influence
                uniforms = (*judging, rational.passing(accept), *rest)
                yield Outcome(reached * accept, tokens, laws, j, token, uniforms, (0.0, rational.BELOW_ONE))
            reached, judging = reached * (1 - accept), (*judging, rational.failing(accept))
            if not reached:
                break
            if fault != "target not updated":
                law = rational.residual(p if fault == "residual of p" else law, q_j)
        for x, value in enumerate(law):
            if weight := reached * value:
                yield Outcome(weight, tokens, laws, count, x, judging, rational.drawing(law, x))


def law_pairs(rational, vocab, count=40):
    rng = np.random.default_rng(vocab)
    pairs = [tuple(rational.random_law(rng, vocab, parts) for _ in range(2)) for parts in (7, 16) for _ in range(count)]
    hot = [rational.one_hot(x, vocab) for x in range(vocab)]
    return pairs + [(pairs[0][0],) * 2, *itertools.product(hot, hot), *((p, hot[0]) for p, _ in pairs[:3])]


def emitted_law(rational, way, p, q, count, fault=None):
    law = [Fraction(0)] * len(p)
    for outcome in outcomes(rational, way, p, q, count, fault):
        law[outcome.emitted] += outcome.weight
    return tuple(law)


@pytest.mark.parametrize("vocab, count", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_the_emitted_token_follows_the_target_law_exactly(rational, way, vocab, count):
    for p, q in law_pairs(rational, vocab):
        assert emitted_law(rational, way, p, q, count) == p


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rule_has_another_law(rational, fault):
    p, q = (tuple(Fraction(n, 8) for n in law) for law in ((1, 4, 3), (6, 1, 1)))
    assert emitted_law(rational, FAULTS[fault], p, q, 2, fault) != p


def test_bug_case_b30_fixed_candidates_need_no_draft_law(rational):
    p, q = (tuple(Fraction(n, 20) for n in law) for law in ((1, 5, 6, 8), (9, 6, 3, 2)))
    assert emitted_law(rational, "likeliest", p, q, 2) == p
    assert emitted_law(rational, "likeliest", p, q, 2, "judged by q") != p
    by_draws = library.likeliest(jnp.asarray(rational.floats(q)), 2)
    np.testing.assert_array_equal(by_draws.tokens, [0, 1])
    np.testing.assert_array_equal(by_draws.laws, np.eye(4)[:2])


def rows(rational, way, vocab, count):
    """Outcomes of several pairs of laws, and the pair of each."""
    found = [(p, q, o) for p, q in law_pairs(rational, vocab, 8) if 7 not in {x.denominator for x in (*p, *q)}
             for o in outcomes(rational, way, p, q, count)]  # fmt: skip
    return rational.floats([p for p, *_ in found]), rational.floats([q for _, q, _ in found]), [o for *_, o in found]


@pytest.mark.parametrize("vocab, count", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_the_library_comes_to_each_outcome_on_its_side_of_every_threshold(rational, way, vocab, count):
    p, _, found = rows(rational, way, vocab, count)
    candidates = Candidates(
        jnp.asarray([o.tokens for o in found], jnp.int32), jnp.asarray(rational.floats([o.laws for o in found]))
    )
    for side, end in itertools.product(range(2), range(2)):
        judging = np.array([[pair[side] for pair in o.judging] for o in found], np.float32)
        emitting = np.array([o.emitting[end] for o in found], np.float32)
        index, emitted = VERIFY(jnp.asarray(p), candidates, jnp.asarray(judging), jnp.asarray(emitting))
        np.testing.assert_array_equal(index, [o.index for o in found])
        np.testing.assert_array_equal(emitted, [o.emitted for o in found])
        assert index.dtype == emitted.dtype == jnp.int32


@pytest.mark.parametrize("vocab, count", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_candidates_are_drawn_from_the_laws_they_are_said_to_be_drawn_from(rational, way, vocab, count):
    _, q, found = rows(rational, way, vocab, count)
    laws = rational.floats([o.laws for o in found])
    tokens = np.array([o.tokens for o in found])
    for end in range(2):
        uniforms = [
            [rational.drawing(law, x)[end] if any(law) else 0.5 for law, x in zip(o.laws, o.tokens, strict=True)]
            for o in found
        ]
        drawn = DRAW[way](jnp.asarray(q), jnp.asarray(uniforms, jnp.float32))
        np.testing.assert_array_equal(drawn.tokens, tokens)
        np.testing.assert_allclose(drawn.laws, laws, atol=rational.MARGIN, rtol=0)
        assert drawn.tokens.dtype == jnp.int32 and drawn.laws.dtype == jnp.float32


def test_what_little_mass_is_left_is_still_a_law():
    q = jnp.asarray([1.0, 3e-9, 1e-9, 0.0])
    drawn = library.distinct(q, jnp.asarray([0.5, 0.5, 0.5, 0.5]))
    np.testing.assert_array_equal(drawn.tokens[:3], [0, 1, 2])
    np.testing.assert_allclose(drawn.laws, [q, [0, 0.75, 0.25, 0], [0, 0, 1, 0], [0, 0, 0, 0]], rtol=1e-6)


def test_at_temperature_zero_the_argmax_is_emitted_and_accepted_where_it_is_a_candidate():
    rng = np.random.default_rng(3)
    best = rng.integers(0, 4, 100)
    p = jnp.asarray(np.eye(4, dtype=np.float32)[best])
    candidates = library.likeliest(jnp.asarray(rng.random((100, 4)), jnp.float32), 2)
    uniforms = jnp.asarray(rng.random((100, 3)), jnp.float32)
    index, emitted = VERIFY(p, candidates, uniforms[:, :2], uniforms[:, 2])
    np.testing.assert_array_equal(emitted, best)
    hits = np.asarray(candidates.tokens) == best[:, None]
    np.testing.assert_array_equal(index, np.where(hits.any(axis=1), hits.argmax(axis=1), 2))


@pytest.mark.parametrize("count", [0, 4])
def test_no_more_candidates_than_tokens(count):
    with pytest.raises(ValueError, match=f"count={count} must be in 1..3, the size of the vocabulary"):
        library.likeliest(jnp.ones(3) / 3, count)
