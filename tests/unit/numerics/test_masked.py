"""Tests of the masked reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.numerics.masked import masked_max, masked_mean, masked_sum


def f32(values):
    return jnp.asarray(values, jnp.float32)


def test_masked_sum_and_mean_use_the_count_they_are_given():
    values, mask = f32([[1, 2], [3, 4]]), f32([[1, 0], [1, 1]])
    assert masked_sum(values, mask) == 8
    assert masked_mean(values, mask, count=16) == 0.5
    assert masked_mean(values, mask, count=f32(16)) == 0.5


def test_empty_mask_gives_zero_and_the_stated_maximum():
    values, mask = f32([np.nan, np.inf]), f32([0, 0])
    assert masked_sum(values, mask) == 0
    assert masked_mean(values, mask, count=0) == 0
    assert masked_max(values, mask, empty=-1.0) == -1


def test_bug_case_b89_statistics_leave_out_filtered_rows():
    advantages, mask = f32([[1, 1], [-1, -1], [5, 5]]), f32([[1, 1], [1, 1], [0, 0]])
    assert masked_max(advantages, mask, empty=-np.inf) == 1
    assert masked_mean(advantages, mask, count=mask.sum()) == 0


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_masked_entries_give_no_gradient(garbage):
    gradient = jax.grad(lambda x: masked_mean(x, f32([1, 0]), count=2))(f32([3, garbage]))
    np.testing.assert_array_equal(gradient, [0.5, 0])


def test_unequal_shapes_are_refused():
    with pytest.raises((ValueError, TypeError), match="shape"):
        masked_sum(jnp.ones((4, 4), jnp.float32), jnp.ones(4, jnp.float32))
