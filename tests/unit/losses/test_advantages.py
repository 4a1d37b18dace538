"""Tests of the group-relative advantages."""

from fractions import Fraction as F

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.losses.advantages import (
    batch_normalised,
    dr_grpo_advantages,
    group_relative_advantages,
    rloo_advantages,
    zero_variance_fraction,
)

MODES = [(False, False), (False, True), (True, False), (True, True)]


def advantages_of(rewards, **options):
    return np.asarray(group_relative_advantages(jnp.asarray(rewards, jnp.float32), **options))


def test_default_is_mean_and_population_std_of_the_group():
    # mean 1/4, population variance 3/16: (3/4) / (sqrt(3)/4) = sqrt(3), (-1/4) / (sqrt(3)/4) = -1/sqrt(3).
    actual = advantages_of([[1, 0, 0, 0]], std_normalise=True, leave_one_out=False, eps=0.0)
    np.testing.assert_allclose(actual, [[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]], rtol=1e-6)


def test_leave_one_out_baseline_is_the_mean_of_the_others():
    actual = advantages_of([[1, 2, 6], [0, 0, 3]], std_normalise=False, leave_one_out=True)
    np.testing.assert_allclose(actual, [[-3, -1.5, 4.5], [-1.5, -1.5, 3]], rtol=1e-6)


def test_leave_one_out_std_is_that_of_the_others():
    # For 1: others (2, 6), mean 4, std 2 -> -1.5. For 2: (1, 6), 3.5, 2.5 -> -0.6. For 6: (1, 2), 1.5, 0.5 -> 9.
    actual = advantages_of([[1, 2, 6]], std_normalise=True, leave_one_out=True, eps=0.0)
    np.testing.assert_allclose(actual, [[-1.5, -0.6, 9.0]], rtol=1e-6)


def test_bug_case_b88_leave_one_out_with_equal_others_stays_finite():
    actual = advantages_of([[1, 0, 0, 0]], std_normalise=True, leave_one_out=True)
    assert actual[0, 0] == 1.0
    # A loser's others are (1, 0, 0): mean 1/3, std sqrt(2)/3.
    np.testing.assert_allclose(actual[0, 1:], -(2**-0.5), rtol=1e-5)
    assert np.isfinite(actual).all() and np.abs(actual).max() <= 10


@pytest.mark.parametrize("value", [0.1, 0.3])
def test_bug_case_b88_near_equal_floats_of_the_others_count_as_a_tie(value):
    # The float mean of 7 copies of 0.1 is not 0.1; the tie must be seen on the values, not on a tiny std.
    actual = advantages_of([[1.0] + [value] * 7], std_normalise=True, leave_one_out=True)
    np.testing.assert_allclose(actual[0, 0], 1.0 - value, rtol=1e-6)


@pytest.mark.parametrize(("std_normalise", "leave_one_out"), MODES)
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1e6, -0.3])
@pytest.mark.parametrize("group_size", [2, 7, 8])
def test_zero_variance_groups_give_exactly_zero(std_normalise, leave_one_out, value, group_size):
    actual = advantages_of([[value] * group_size], std_normalise=std_normalise, leave_one_out=leave_one_out)
    assert (actual == 0.0).all()


@pytest.mark.parametrize(("std_normalise", "leave_one_out"), MODES)
def test_groups_do_not_see_each_other(std_normalise, leave_one_out):
    rewards = np.random.default_rng(0).random((3, 5))
    options = {"std_normalise": std_normalise, "leave_one_out": leave_one_out}
    alone = np.concatenate([advantages_of(rewards[i : i + 1], **options) for i in range(3)])
    np.testing.assert_array_equal(advantages_of(rewards, **options), alone)
    poisoned = rewards.copy()
    poisoned[0, 0] = np.nan
    np.testing.assert_array_equal(advantages_of(poisoned, **options)[1:], alone[1:])


@pytest.mark.parametrize(("std_normalise", "leave_one_out"), [(True, False), (False, True), (True, True)])
def test_one_sample_per_group_is_refused(std_normalise, leave_one_out):
    with pytest.raises(ValueError, match=r"group_size=1 .*at least 2 samples.*raise the group size"):
        advantages_of([[1.0], [0.0]], std_normalise=std_normalise, leave_one_out=leave_one_out)


def test_one_sample_without_baseline_of_others_is_zero():
    assert (advantages_of([[1.0], [0.0]], std_normalise=False, leave_one_out=False) == 0).all()


def test_zero_variance_fraction_counts_tied_groups():
    rewards = jnp.asarray([[0.1] * 8, [1.0] + [0.0] * 7, [1.0] * 8, [0.0] * 7 + [0.5]], jnp.float32)
    assert float(zero_variance_fraction(rewards)) == 0.5


def test_rloo_and_dr_grpo_equal_tables_in_fractions_and_differ_by_a_factor():
    rewards = [F(1), F(0), F(0), F(3)]
    mean = sum(rewards) / 4
    dr_grpo = [r - mean for r in rewards]
    rloo = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert dr_grpo == [F(3, 4) * a for a in rloo]
    given = jnp.asarray([[float(r) for r in rewards]], jnp.float32)
    np.testing.assert_array_equal(dr_grpo_advantages(given), [[float(a) for a in dr_grpo]])
    np.testing.assert_allclose(rloo_advantages(given), [[float(a) for a in rloo]], rtol=1e-6)


def test_the_sample_deviation_divides_by_one_less():
    # Squares add up to 38 over 6 numbers.
    actual = advantages_of([[3, 3, -3, -3, 1, -1]], std_normalise=True, leave_one_out=False, sample_std=True, eps=0.0)
    np.testing.assert_allclose(actual, np.array([[3, 3, -3, -3, 1, -1]]) / (38 / 5) ** 0.5, rtol=1e-6)
    # Others of the 6 are (1, 2), whose sample variance is 1/2; those of the 1 are (2, 6), 8.
    actual = advantages_of([[1, 2, 6]], std_normalise=True, leave_one_out=True, sample_std=True, eps=0.0)
    np.testing.assert_allclose(actual[0, [0, 2]], [-3 / 8**0.5, 4.5 / 0.5**0.5], rtol=1e-6)
    with pytest.raises(ValueError, match="group_size=2 with sample_std=True, leave_one_out=True"):
        advantages_of([[1, 2]], std_normalise=True, leave_one_out=True, sample_std=True)


@pytest.mark.parametrize("value", [0.1, -0.3, 1e6])
def test_eight_equal_rewards_are_exactly_zero_under_every_estimator(value):
    rewards = jnp.full((1, 8), value, jnp.float32)
    assert (np.asarray(rloo_advantages(rewards)) == 0).all() and (np.asarray(dr_grpo_advantages(rewards)) == 0).all()
    assert (advantages_of(rewards, std_normalise=True, leave_one_out=False, sample_std=True) == 0).all()
    assert (np.asarray(batch_normalised(rewards, jnp.ones_like(rewards))) == 0).all()


def test_reinforce_plus_plus_normalises_over_the_tokens_of_the_batch():
    # Tokens 1, 1, 1, 5: mean 2, variance (1 + 1 + 1 + 9) / 4 = 3. What is masked may be anything.
    advantages = jnp.asarray([[1, 1, np.nan], [1, 5, np.inf]], jnp.float32)
    mask = jnp.asarray([[1, 1, 0], [1, 1, 0]], jnp.float32)
    expected = np.array([[-1, -1, 0], [-1, 3, 0]]) / 3**0.5
    np.testing.assert_allclose(batch_normalised(advantages, mask), expected, rtol=1e-6)
    assert (np.asarray(batch_normalised(advantages, 0 * mask)) == 0).all()
