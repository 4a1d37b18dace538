"""Choices of a draft length, held to plain Python."""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.speculation_control import (
    AcceptanceEstimate,
    Bandit,
    Budget,
    CostModel,
    FixedLength,
    Outcome,
    Situation,
    expected_tokens,
)

LENGTHS = (0, 1, 3, 6)


def situation(active=1, seconds=(1.0, 1.0, 1.0, 1.0), key=0) -> Situation:
    key = jax.random.key(key) if isinstance(key, int) else key
    return Situation(jnp.asarray(active), jnp.asarray(seconds, jnp.float32), key)


def outcome(accepted, proposed, live, choice=0, seconds=1.0, active=None) -> Outcome:
    active = np.sum(live) if active is None else active
    return Outcome(
        jnp.asarray(choice, jnp.int32), jnp.asarray(active, jnp.int32), jnp.asarray(live),
        jnp.asarray(proposed, jnp.int32), jnp.asarray(accepted, jnp.int32), jnp.asarray(seconds, jnp.float32),
    )  # fmt: skip


def test_acceptance_by_position_is_pooled_fades_and_starts_at_the_prior():
    estimate = AcceptanceEstimate(prior=0.6, weight=5.0, keep=0.9)
    observe = jax.jit(estimate.observe)
    state, reached, passed = estimate.init(4), np.zeros(4), np.zeros(4)
    np.testing.assert_allclose(estimate.rates(state), 0.6, rtol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(6):
        proposed = rng.integers(0, 5, 3)
        accepted, live = rng.integers(0, proposed + 1), rng.random(3) < 0.8
        state = observe(state, outcome(accepted, proposed, live))
        reached, passed = 0.9 * reached, 0.9 * passed
        for b in np.flatnonzero(live):
            for i in range(proposed[b]):
                reached[i] += i <= accepted[b]
                passed[i] += i < accepted[b]
    np.testing.assert_allclose(estimate.rates(state), (passed + 3.0) / (reached + 5.0), rtol=1e-5)


def test_expected_tokens_are_those_of_a_round():
    # Accepted drafts of rounds by enumeration: exactly i of 3 with chance a_1 .. a_i (1 - a_{i+1}).
    a = [0.5, 0.25, 0.75]
    exactly = [1 - a[0], a[0] * (1 - a[1]), a[0] * a[1] * (1 - a[2]), a[0] * a[1] * a[2]]
    found = expected_tokens(jnp.asarray(a, jnp.float32))
    assert float(found[3]) == sum((1 + i) * chance for i, chance in enumerate(exactly))
    np.testing.assert_array_equal(found[:2], [1.0, 1.5])


def test_the_cost_model_takes_the_most_tokens_per_second():
    config = CostModel(lengths=LENGTHS, gain=1.1)
    choose = jax.jit(config.choose)
    rng = np.random.default_rng(1)
    chosen = set()
    for _ in range(120):
        seconds = np.float32(1 + rng.choice([0.1, 0.2, 0.4]) * rng.random() * np.arange(4))
        reached, rate = jnp.full(6, 50.0), rng.random()
        state = config.init()._replace(reached=reached, accepted=reached * np.float32(rate))
        speed = np.asarray(expected_tokens(config.estimate.rates(state)))[list(LENGTHS)] / seconds
        best = int(np.argmax(speed))
        expected = best if speed[best] >= np.float32(1.1) * speed[0] else 0
        assert int(choose(state, situation(seconds=seconds))) == expected
        chosen.add(expected)
    assert len(chosen) >= 3


def test_of_equally_fast_lengths_the_shortest_is_taken_and_it_learns():
    config = CostModel(lengths=(1, 2), gain=1.0, estimate=AcceptanceEstimate(prior=1.0, weight=1.0, keep=1.0))
    state = config.init()
    assert int(config.choose(state, situation(seconds=[2.0, 3.0]))) == 0  # 2 tokens in 2 seconds, 3 in 3
    assert int(config.choose(state, situation(seconds=[2.0, 2.5]))) == 1
    for _ in range(5):
        state = config.observe(state, outcome([1], [2], [True]))  # the second draft never passes
    assert int(config.choose(state, situation(seconds=[2.0, 2.5]))) == 0


def test_speculation_that_was_switched_off_is_tried_again_when_what_is_known_has_faded():
    config = CostModel(lengths=(0, 2), estimate=AcceptanceEstimate(prior=0.7, weight=4.0, keep=0.9))
    state, costs = config.init(), situation(seconds=[1.0, 1.5])
    assert int(config.choose(state, costs)) == 1
    for _ in range(20):
        state = config.observe(state, outcome([0, 0], [2, 2], [True, True], choice=1))
    assert int(config.choose(state, costs)) == 0
    plain = 0
    while int(config.choose(state, costs)) == 0:
        state, plain = config.observe(state, outcome([0, 0], [0, 0], [True, True])), plain + 1
        assert plain < 50
    assert plain > 5


def test_a_budget_is_shared_by_the_rows_in_flight():
    choose = jax.jit(Budget(lengths=LENGTHS, peak=12).choose)
    for active in range(20):
        each = 12 // max(active, 1)
        expected = max(i for i, length in enumerate(LENGTHS) if length <= each)
        assert int(choose(None, situation(active))) == expected
    assert int(Budget(lengths=(2, 3), peak=1).choose(None, situation(5))) == 0


def test_a_fixed_length_is_fixed():
    assert int(FixedLength(lengths=LENGTHS, length=3).choose(None, situation(7))) == 2


def test_the_bandit_takes_the_best_median_of_its_bucket():
    config = Bandit(lengths=LENGTHS, thresholds=(1, 3), epsilon=0.0, window=3)
    choose, observe = jax.jit(config.choose), jax.jit(config.observe)
    state, seen = config.init(), {(bucket, arm): [] for bucket in range(2) for arm in range(4)}
    rng, key = np.random.default_rng(2), jax.random.key(0)
    for _ in range(60):
        active = int(rng.integers(0, 5))
        bucket = int(active >= 3)
        worth = [statistics.median(seen[bucket, arm][-3:]) if seen[bucket, arm] else np.inf for arm in range(4)]
        arm = int(choose(state, situation(active, key=key)))
        assert arm == int(np.argmax(np.float32(worth)))
        live, accepted = np.arange(4) < active, rng.integers(0, 4, 4)
        state = observe(state, outcome(accepted, accepted, live, arm, 0.5))
        if active:
            seen[bucket, arm].append((accepted[live].sum() + active) / 0.5)
    assert all(seen.values())


def test_the_bandit_learns_where_it_chooses_when_some_requests_only_begin():
    """Of five in flight one always has its first token, so four speculate: both arms of five in flight are tried."""
    config = Bandit(lengths=(0, 3), epsilon=0.0)
    state, chosen = config.init(), []
    for _ in range(4):
        arm = int(config.choose(state, situation(5)))
        live = np.arange(5) > 0
        state = config.observe(state, outcome([0] * 5, [arm * 3] * 5, live, arm, 1.0 + arm, active=5))
        chosen.append(arm)
    assert chosen == [0, 1, 0, 0]


def test_the_bandit_explores_with_chance_epsilon_by_its_key_alone():
    config = Bandit(lengths=LENGTHS, epsilon=0.4)
    state = config.init()
    state = state._replace(rewards=state.rewards.at[:, :, 0].set(jnp.asarray([1.0, 5.0, 2.0, 3.0])))
    keys = jax.random.split(jax.random.key(3), 4000)
    choose = jax.jit(jax.vmap(lambda key: config.choose(state, situation(2, key=key))))
    found = np.asarray(choose(keys))
    np.testing.assert_array_equal(found, choose(keys))
    shares = np.bincount(found, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.1, 0.7, 0.1, 0.1], atol=5 * np.sqrt(0.7 * 0.3 / 4000))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FixedLength(lengths=(), length=0), "lengths="),
        (lambda: FixedLength(lengths=(0, 2), length=1), "length=1"),
        (lambda: CostModel(lengths=(2, 1)), "lengths="),
        (lambda: CostModel(lengths=(0,), gain=0.9), "gain=0.9"),
        (lambda: Budget(lengths=(0,), peak=0), "peak=0"),
        (lambda: Bandit(lengths=(0,), thresholds=(2,)), "thresholds="),
        (lambda: Bandit(lengths=(0,), epsilon=2), "epsilon="),
        (lambda: Bandit(lengths=(0,), window=0), "window=0"),
        (lambda: AcceptanceEstimate(prior=2), "prior=2"),
        (lambda: AcceptanceEstimate(weight=0), "weight=0"),
        (lambda: AcceptanceEstimate(keep=0), "keep=0"),
    ],
)
def test_rules_that_say_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
