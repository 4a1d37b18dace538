"""Drafts shared out among requests: what is taken, and the output law by enumeration in fractions."""

from __future__ import annotations

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.draft_allocation import ConfidencePrefix, LengthAware
from draftco_jax.decoding.speculation_control import Outcome, expected_tokens

V = 2


def causal(confidences, seconds, budget=99):
    """The rule of the library for many drawn texts [n, B, k] at once."""
    rule = ConfidencePrefix(budget=budget)
    live = jnp.ones(confidences.shape[1], bool)
    choose = jax.jit(jax.vmap(lambda c: rule.choose(None, c, live, jnp.asarray(seconds, jnp.float32))))
    return np.asarray(choose(jnp.asarray(confidences, jnp.float32)))


def in_hindsight(confidences, seconds):
    """As many drafts as would have been best, for one request: the published trap."""
    survival = np.cumprod(confidences[:, 0], axis=1)
    tokens = 1 + np.concatenate([np.zeros((len(survival), 1)), np.cumsum(survival, axis=1)], axis=1)
    return np.argmax(tokens / np.asarray(seconds), axis=1)[:, None]


class Batch:
    """Requests with laws in fractions: p and q after each text, and a confidence for what comes next."""

    def __init__(self, rational, seed: int, requests: int, k: int, vocab: int) -> None:
        rng = np.random.default_rng(seed)
        self.rational, self.k, self.vocab = rational, k, vocab
        self.p, self.q, self.c = ([rational.random_table(rng, vocab, k) for _ in range(requests)] for _ in range(3))

    def paths(self):
        """All drafts of all requests, [n, B, k]."""
        texts = list(itertools.product(range(self.vocab), repeat=self.k))
        return list(itertools.product(texts, repeat=len(self.q)))

    def confidences(self, drawn: bool = False) -> np.ndarray:
        """By the text before each draft; `drawn`: by the probability of the token itself."""

        def one(b, path, i):
            after = path[b][:i]
            return self.q[b](after)[path[b][i]] if drawn else max(self.c[b](after))

        rows = [[[one(b, path, i) for i in range(self.k)] for b in range(len(self.q))] for path in self.paths()]
        return self.rational.floats(rows)

    def emissions(self, b: int, drafts, count: int):
        """(chance, text) of a round whose first `count` drafts are verified, given its drafts."""
        chance = Fraction(1)
        for i in range(count):
            before = drafts[:i]
            p, q = self.p[b](before), self.q[b](before)
            accept = self.rational.acceptance(p, q, drafts[i])
            if accept < 1:
                residual = self.rational.residual(p, q)
                yield from ((chance * (1 - accept) * residual[x], (*before, x)) for x in range(self.vocab))
            chance *= accept
        bonus = self.p[b](drafts[:count])
        yield from ((chance * bonus[x], (*drafts[:count], x)) for x in range(self.vocab))

    def law(self, counts, length: int) -> dict[tuple, Fraction]:
        """Joint law of the first `length` tokens of all requests."""
        total: dict[tuple, Fraction] = {}
        completed = {}
        for path, verified in zip(self.paths(), counts, strict=True):
            chance = Fraction(1)
            for b, drafts in enumerate(path):
                chance *= self.rational.probability(self.q[b], drafts)
            if not chance:
                continue
            laws = []
            for b, drafts in enumerate(path):
                case = b, drafts, int(verified[b])
                if case not in completed:
                    outcomes = self.emissions(*case)
                    completed[case] = self.rational.completed_law(outcomes, self.p[b], self.vocab, length)
                laws.append([(text, value) for text, value in completed[case].items() if value])
            for texts in itertools.product(*laws):
                weight = chance
                for _, value in texts:
                    weight *= value
                key = tuple(text for text, _ in texts)
                total[key] = total.get(key, Fraction(0)) + weight
        return total

    def target(self, length: int) -> dict[tuple, Fraction]:
        laws = [self.rational.target_law(p, self.vocab, length) for p in self.p]
        found = {}
        for texts in itertools.product(*(law.items() for law in laws)):
            weight = Fraction(1)
            for _, value in texts:
                weight *= value
            if weight:
                found[tuple(text for text, _ in texts)] = weight
        return found


def published(rational) -> Batch:
    """One request, (.7, .3) against drafts from (.5, .5); the second draft is trusted behind token 0 only."""
    batch = Batch(rational, 0, 1, 2, V)
    half, policy = Fraction(1, 2), (Fraction(7, 10), Fraction(3, 10))
    batch.p, batch.q = [rational.constant(policy)], [rational.constant((half, half))]
    trusted = {(): half, (0,): Fraction(15, 16), (1,): Fraction(1, 16)}
    batch.c = [lambda text: (trusted[text], Fraction(0))]
    return batch


def first_token(law) -> list[Fraction]:
    return [sum((value for texts, value in law.items() if texts[0][0] == x), Fraction(0)) for x in range(V)]


def test_the_published_trap_and_the_rule_that_stops_at_the_first_drop(rational):
    batch, seconds = published(rational), [1.0, 1.6, 1.8]  # one draft does not pay, two do where the second is trusted
    confidences = batch.confidences()
    hindsight = in_hindsight(confidences, seconds)
    assert sorted(set(hindsight[:, 0])) == [0, 2]
    wrong = first_token(batch.law(hindsight, 3))
    assert wrong == [Fraction(85, 100), Fraction(15, 100)]
    counts = causal(confidences, seconds)
    assert not counts.any()
    assert first_token(batch.law(counts, 3)) == [Fraction(70, 100), Fraction(30, 100)]
    # Where the first draft pays, the second depends on how the first came out, and the law is right.
    counts = causal(confidences, [1.0, 1.2, 1.5])
    assert sorted(set(counts[:, 0])) == [1, 2]
    assert batch.law(counts, 3) == batch.target(3)


LAWS = [(1, 3, 3, 0.2, 3), (1, 3, 3, 0.2, 7), (1, 3, 3, 0.35, 6), (2, 2, 2, 0.2, 6), (2, 2, 2, 0.35, 1)]


@pytest.mark.parametrize("requests, k, vocab, cost, seed", LAWS)
def test_texts_follow_the_policy_exactly(rational, requests, k, vocab, cost, seed):
    batch = Batch(rational, seed, requests, k, vocab)
    counts = causal(batch.confidences(), 1 + cost * np.arange(requests * k + 1), budget=3)
    assert len(np.unique(counts, axis=0)) > 1, "a case in which the choice hangs on what was drafted"
    assert batch.law(counts, k + 1) == batch.target(k + 1)


def test_looking_at_the_drafted_token_itself_is_caught(rational):
    batch = Batch(rational, 6, 2, 2, V)
    counts = causal(batch.confidences(drawn=True), 1 + 0.2 * np.arange(5), budget=3)
    assert batch.law(counts, 3) != batch.target(3)


def test_drafts_are_taken_by_survival_up_to_the_first_that_does_not_pay_and_the_budget():
    confidences = jnp.asarray([[0.9, 0.5, 0.9], [0.8, 0.9, 0.1], [1.0, 1.0, 1.0]], jnp.float32)
    live = jnp.asarray([True, True, False])
    # Survivals of those in flight: .9, .45, .405 and .8, .72, .072; in order .9, .8, .72, .45, .405, .072.
    for budget, step, expected in [(9, 0.1, [3, 2, 0]), (3, 0.1, [1, 2, 0]), (1, 0.1, [1, 0, 0]), (9, 0.6, [0, 0, 0]),
                                   (9, 0.31, [1, 2, 0]), (9, 0.32, [1, 1, 0])]:  # fmt: skip
        seconds = np.float32(1 + step * np.arange(10))
        found = ConfidencePrefix(budget=budget).choose(None, confidences, live, seconds)
        assert list(map(int, found)) == expected, (budget, step)
    broken = confidences.at[0, 0].set(jnp.nan)
    assert int(ConfidencePrefix(budget=9).choose(None, broken, live, np.float32(1 + 0.1 * np.arange(10)))[0]) == 0


def test_the_slowest_request_ends_as_soon_as_it_can():
    rule = LengthAware(budget=5, longest=3)
    state = rule.init()
    tokens = np.asarray(expected_tokens(rule.estimate.rates(state)), np.float64)
    choose = jax.jit(rule.choose)
    rng = np.random.default_rng(0)
    for _ in range(30):
        remaining, live = rng.integers(1, 40, 4).astype(np.float32), rng.random(4) < 0.8
        counts = np.asarray(choose(state, jnp.asarray(remaining), jnp.asarray(live)))
        assert counts.sum() <= 5 and counts.max() <= 3 and not counts[~live].any()
        if live.any():
            ways = [k for k in itertools.product(range(4), repeat=4) if sum(k) <= 5]
            best = min(max((remaining / tokens[list(k)])[live]) for k in ways)
            assert max((remaining / tokens[counts])[live]) == pytest.approx(best, rel=1e-6)


def test_length_aware_learns_from_rounds():
    rule = LengthAware(budget=2, longest=2)
    one = jnp.asarray([1], jnp.int32)
    index, active = jnp.asarray(0, jnp.int32), jnp.asarray(1, jnp.int32)
    seen = Outcome(index, active, jnp.asarray([True]), 2 * one, one, jnp.asarray(1.0, jnp.float32))
    rates = rule.estimate.rates(rule.observe(rule.init(), seen))
    np.testing.assert_allclose(rates, [(1 + 14) / 21, 14 / 21], rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: ConfidencePrefix(budget=0), lambda: LengthAware(budget=0, longest=1),
                                  lambda: LengthAware(budget=1, longest=0)])  # fmt: skip
def test_budgets_for_nothing_are_refused(make):
    with pytest.raises(ValueError, match="=0 must be >= 1; decode plainly"):
        make()
