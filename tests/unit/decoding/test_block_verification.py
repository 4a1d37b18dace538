"""Block verification is exact in fractions and accepts no fewer drafts than the token rule; the library follows it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding import block_verification, rejection

SIZES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)]
KINDS = ["random", "thirds", "one-hot q", "greedy", "p equals q", "drafts left out"]
FAULTS = ["residual of the token rule", "stops at the first that fails", "h is w", "w not cut at 1"]
VERIFY, TOKEN = jax.jit(block_verification.verify), jax.jit(rejection.verify)


class Outcome(NamedTuple):
    weight: Fraction
    drafts: tuple[int, ...]
    accepted: int
    final: int
    judging: tuple[tuple[float, float], ...]  # uniforms that lead here, for each draft
    emitting: tuple[float, float]

    @property
    def text(self):
        return self.drafts[: self.accepted] + (self.final,)


class Rule:
    """The rule in fractions for the laws along one draft; `fault` puts one thing wrong."""

    def __init__(self, rational, p, q, drafts, fault=None):
        self.rational, self.fault, k = rational, fault, len(drafts)
        q = [*q, (Fraction(0),) * len(p[0])]
        self.w = [Fraction(1)]
        for p_i, q_i, d in zip(p, q, drafts, strict=False):
            ratio = self.w[-1] * p_i[d] / q_i[d] if q_i[d] else Fraction(0)
            self.w.append(ratio if fault == "w not cut at 1" else min(Fraction(1), ratio))
        left = [rational.positive(self.w[i] * a - b for a, b in zip(p[i], q[i], strict=True)) for i in range(k + 1)]
        self.h = [self._h(sum(left[i]), self.w[i]) for i in range(1, k + 1)]
        if fault == "residual of the token rule":
            left = [rational.positive(a - b for a, b in zip(p[i], q[i], strict=True)) for i in range(k + 1)]
        self.final = [rational.normalised(left[i], p[i]) for i in range(k + 1)]

    def _h(self, mass, w):
        if self.fault == "h is w":
            return min(Fraction(1), w)
        total = mass + 1 - w
        return min(Fraction(1), max(Fraction(0), mass / total)) if total else Fraction(1)

    def probability(self, n):
        """Of exactly n accepted drafts."""
        if self.fault == "stops at the first that fails":
            return np.prod([*self.h[:n], *(1 - h for h in self.h[n : n + 1])], initial=Fraction(1))
        return np.prod([*self.h[n - 1 : n] * (n > 0), *(1 - h for h in self.h[n:])], initial=Fraction(1))

    def uniforms(self, n):
        passing, failing = self.rational.passing, self.rational.failing
        before = [(0.0, self.rational.BELOW_ONE)] * max(n - 1, 0)  # of no influence
        return (*before, *(passing(h) for h in self.h[:n][-1:]), *(failing(h) for h in self.h[n:]))


def drafts_with_weight(draft, vocab, k) -> Iterator:
    """All drafts; after a law of zeros nothing is drawn, token 0 stands there."""
    for text in itertools.product(range(vocab), repeat=k):
        weight, ended = Fraction(1), False
        for i, token in enumerate(text):
            law = draft(text[:i])
            ended |= not any(law)
            weight *= Fraction(token == 0) if ended else law[token]
        if weight:
            yield weight, text


def laws_along(target, draft, text):
    return [target(text[:i]) for i in range(len(text) + 1)], [draft(text[:i]) for i in range(len(text))]


def outcomes(rational, target, draft, vocab, k, fault=None) -> Iterator[Outcome]:
    for drawn, text in drafts_with_weight(draft, vocab, k):
        rule = Rule(rational, *laws_along(target, draft, text), text, fault)
        for n, x in itertools.product(range(k + 1), range(vocab)):
            if weight := drawn * rule.probability(n) * rule.final[n][x]:
                yield Outcome(weight, text, n, x, rule.uniforms(n), rational.drawing(rule.final[n], x))


def tables(rational, kind, vocab, k, seed=0):
    rng = np.random.default_rng([vocab, k, seed])
    target, draft = (rational.random_table(rng, vocab, k, 3 if kind == "thirds" else 16) for _ in range(2))
    if kind in ("one-hot q", "greedy"):
        draft = rational.one_hot_table(rng, vocab, k)
    if kind == "greedy":
        target = rational.one_hot_table(rng, vocab, k)
    if kind == "p equals q":
        draft = target
    if kind == "drafts left out":
        whole, nothing = draft, (Fraction(0),) * vocab
        left_out = {
            prefix for n in range(k) for prefix in itertools.product(range(vocab), repeat=n) if rng.random() < 0.3
        }
        draft = lambda prefix: nothing if any(prefix[:i] in left_out for i in range(len(prefix) + 1)) else whole(prefix)  # noqa: E731
    return target, draft


@pytest.mark.parametrize("vocab, k", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_emitted_text_follows_the_target_law_exactly(rational, kind, vocab, k):
    for seed in range(3):
        target, draft = tables(rational, kind, vocab, k, seed)
        emissions = ((o.weight, o.text) for o in outcomes(rational, target, draft, vocab, k))
        found = rational.completed_law(emissions, target, vocab, k + 1)
        assert found == rational.target_law(target, vocab, k + 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rule_has_another_law(rational, fault):
    target, draft = tables(rational, "random", 3, 3)
    emissions = ((o.weight, o.text) for o in outcomes(rational, target, draft, 3, 3, fault))
    assert rational.completed_law(emissions, target, 3, 4) != rational.target_law(target, 3, 4)


def expected_accepted(rational, target, draft, vocab, k):
    """Of the block rule and of the token rule."""
    block = sum(o.weight * o.accepted for o in outcomes(rational, target, draft, vocab, k))
    token = Fraction(0)
    for drawn, text in drafts_with_weight(draft, vocab, k):
        accept = [rational.acceptance(p, q, d) for p, q, d in zip(*laws_along(target, draft, text), text, strict=False)]
        token += drawn * sum(np.prod(accept[: i + 1]) for i in range(k))
    return block, token


def test_the_published_example_accepts_11_ninths_and_not_10(rational):
    p, q = (Fraction(1, 3), Fraction(2, 3)), (Fraction(2, 3), Fraction(1, 3))
    found = expected_accepted(rational, rational.constant(p), rational.constant(q), 2, 2)
    assert found == (Fraction(11, 9), Fraction(10, 9))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_never_fewer_drafts_are_accepted_than_by_the_token_rule(rational, k):
    laws = [(Fraction(n, 6), Fraction(6 - n, 6)) for n in range(7)]
    pairs = [(rational.constant(p), rational.constant(q), 2) for p, q in itertools.product(laws, laws)]
    pairs += [(*tables(rational, kind, 3, k, seed), 3) for kind in KINDS for seed in range(3)]
    found = [expected_accepted(rational, target, draft, vocab, k) for target, draft, vocab in pairs]
    assert all(block >= token for block, token in found)
    gains = sum(block > token for block, token in found)
    assert gains == 0 if k == 1 else gains > len(pairs) / 3


@pytest.mark.parametrize("vocab, k", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_comes_to_each_outcome_on_its_side_of_every_threshold(rational, kind, vocab, k):
    target, draft = tables(rational, kind, vocab, k)
    found = list(outcomes(rational, target, draft, vocab, k))
    laws = [laws_along(target, draft, o.drafts) for o in found]
    p, q = (rational.floats([pair[i] for pair in laws]) for i in range(2))
    drafts, accepted, final = (np.array([getattr(o, name) for o in found]) for name in ("drafts", "accepted", "final"))
    for side, end in itertools.product(range(2), range(2)):
        judging = np.array([[pair[side] for pair in o.judging] for o in found], np.float32)
        emitting = np.array([o.emitting[end] for o in found], np.float32)
        elsewhere = 1 - emitting  # entries that must not be read
        at = np.arange(k + 1)[None, :] == accepted[:, None]
        commit = np.where(at, emitting[:, None], elsewhere[:, None])
        n, x = VERIFY(*map(jnp.asarray, (p, q, drafts.astype(np.int32), judging, commit)))
        np.testing.assert_array_equal(n, accepted)
        np.testing.assert_array_equal(x, final)
        assert n.dtype == x.dtype == jnp.int32


def test_greedy_laws_give_what_the_token_rule_gives():
    rng = np.random.default_rng(0)
    hot = np.eye(3, dtype=np.float32)
    p, q = hot[rng.integers(0, 3, (200, 4))], hot[rng.integers(0, 3, (200, 3))]
    drafts = jnp.asarray(np.argmax(q, axis=-1), jnp.int32)
    uniforms = [jnp.asarray(rng.random((200, n)), jnp.float32) for n in (3, 4)]
    for block, token in zip(VERIFY(p, q, drafts, *uniforms), TOKEN(p, q, drafts, *uniforms), strict=True):
        np.testing.assert_array_equal(block, token)


def test_a_broken_law_is_no_draft_and_leaves_those_before_it_as_they_are():
    rng = np.random.default_rng(1)
    p, q = (rng.dirichlet(np.ones(4), (300, n)).astype(np.float32) for n in (4, 3))
    broken, cut = q.copy(), q.copy()
    broken[:, 1, 1:], cut[:, 1] = np.nan, 0
    drafts = jnp.asarray(rng.integers(0, 4, (300, 3)), jnp.int32).at[:, 1].set(0)
    uniforms = [jnp.asarray(rng.random((300, n)), jnp.float32) for n in (3, 4)]
    found, wanted = VERIFY(p, broken, drafts, *uniforms), VERIFY(p, cut, drafts, *uniforms)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])
    assert set(np.asarray(found[0])) == {0, 1}


def test_laws_equal_up_to_rounding_are_accepted_whole():
    # Softmaxes of large vocabularies do not sum to 1, and products of ratios next to 1 drift.
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(0, 3, (64, 9, 5000)), jnp.float32)
    p = jax.nn.softmax(logits)
    q = jax.nn.softmax(logits[:, :8] + 7.0)
    drafts = jnp.argmax(q + jnp.asarray(rng.random(q.shape) * 1e-3, jnp.float32), axis=-1).astype(jnp.int32)
    uniforms = [jnp.asarray(rng.random((64, n)), jnp.float32) for n in (8, 9)]
    accepted, _ = VERIFY(p, q, drafts, *uniforms)
    assert np.asarray(accepted).tolist() == [8] * 64


def test_a_refusal_by_rounding_alone_refuses_that_draft_only():
    # q exceeds p everywhere by rounding: nothing is left over at draft 2, so draft 1 cannot be what was refused.
    p = jnp.full((1, 3, 2), 0.5)
    q = p[:, :2].at[:, 1].multiply(1 + 2**-20)
    accepted, final = VERIFY(p, q, jnp.zeros((1, 2), jnp.int32), jnp.full((1, 2), 1 - 2**-24), jnp.full((1, 3), 0.75))
    assert (int(accepted[0]), int(final[0])) == (1, 1)
