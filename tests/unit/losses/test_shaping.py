"""Rewards before advantages: scale, soft overlong penalty, overlong filtering."""

from __future__ import annotations

from fractions import Fraction as F

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.losses.shaping import kept_answers, overlong_penalty, scale_rewards


def test_the_soft_overlong_penalty_equals_a_table_in_fractions():
    # No penalty up to 12 of 16 tokens, then a quarter of it for each token.
    lengths, penalty = np.arange(17), F(1, 2)
    table = [min(F(0), -F(int(n) - 12, 4)) * penalty for n in lengths]
    assert table[12] == 0 and table[13] == F(-1, 8) and table[16] == F(-1, 2)
    found = overlong_penalty(jnp.asarray(lengths, jnp.int32), max_length=16, buffer=4, penalty=0.5)
    np.testing.assert_array_equal(found, [float(x) for x in table])


def test_a_reward_is_scaled_before_its_length_is_looked_at():
    # NeMo-RL's order. The other order would clip a penalised reward of 1 - 1/2 and map it to 0.
    rewards, lengths = jnp.asarray([1.0, 0.0, 3.0, -1.0], jnp.float32), jnp.asarray([14, 16, 3, 3], jnp.int32)
    scaled = scale_rewards(rewards, target=(-1.0, 1.0))
    np.testing.assert_array_equal(scaled, [1, -1, 1, -1])
    shaped = scaled + overlong_penalty(lengths, max_length=16, buffer=4)
    np.testing.assert_array_equal(shaped, [0.5, -2, 1, -1])


def test_cut_answers_are_not_trained_on():
    assert kept_answers(jnp.asarray([True, False])).tolist() == [1.0, 0.0]


def test_numbers_that_mean_nothing_are_refused():
    lengths = jnp.zeros(1, jnp.int32)
    for buffer in (0, 17):
        with pytest.raises(ValueError, match=rf"buffer={buffer} must be in 1\.\.16"):
            overlong_penalty(lengths, max_length=16, buffer=buffer)
    with pytest.raises(ValueError, match="penalty=-1 must be >= 0"):
        overlong_penalty(lengths, max_length=16, buffer=4, penalty=-1)
    with pytest.raises(ValueError, match=r"source=\(1.0, 1.0\) must have its low end below"):
        scale_rewards(jnp.zeros(1, jnp.float32), target=(0.0, 1.0), source=(1.0, 1.0))
