"""Tests of the clipped surrogate and the k3 estimate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.losses.kl import kl_k3
from draftco_jax.losses.policy import clipped_surrogate

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def f32(values):
    return jnp.asarray(values, jnp.float32)


def surrogate(ratio, advantages, mask=None, *, token_count=None):
    """The loss of tokens with the given ratios; the generator's log-prob is -1 everywhere."""
    ratio, advantages = f32(ratio), f32(advantages)
    mask = jnp.ones_like(ratio) if mask is None else f32(mask)
    count = float(mask.sum()) if token_count is None else token_count
    generator = jnp.full_like(ratio, -1.0)
    return clipped_surrogate(generator + jnp.log(ratio), generator, advantages, mask, token_count=count, **CLIP)


def test_hand_computed_loss_and_clip_fractions():
    # min(rho A, clip(rho) A): 1.5 is cut to 1.28, 0.5 with A < 0 to 0.8; 0.5 with A > 0 and 1.5 with A < 0 stay.
    loss, aux = surrogate([1.5, 0.5, 0.5, 1.5, 1.0], [1, -1, 1, -1, 2])
    np.testing.assert_allclose(loss, -(1.28 - 0.8 + 0.5 - 1.5 + 2.0) / 5, rtol=1e-6)
    np.testing.assert_allclose([aux.clip_low_fraction, aux.clip_high_fraction], [0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose([aux.ratio_mean, aux.ratio_max], [1.0, 1.5], rtol=1e-6)


def test_gradient_matches_finite_differences():
    rng = np.random.default_rng(1)
    generator, advantages = f32(rng.normal(-1, 0.3, (3, 7))), f32(rng.normal(size=(3, 7)))
    mask = f32(rng.random((3, 7)) < 0.7)
    # Log-ratios drawn from both sides of the clip bounds and none within 0.02 of one, where there is a kink.
    log_ratio = f32(rng.choice([-0.5, -0.1, 0.0, 0.1, 0.5], (3, 7)))

    def loss(logprobs):
        return clipped_surrogate(logprobs, generator, advantages, mask, token_count=mask.sum(), **CLIP)[0]

    logprobs, step = generator + log_ratio, 1e-2
    gradient = jax.grad(loss)(logprobs)
    for index in np.ndindex(3, 7):
        difference = (loss(logprobs.at[index].add(step)) - loss(logprobs.at[index].add(-step))) / (2 * step)
        # Central difference: step^2 / 6 relative, and float32 rounding 1e-7 / step absolute.
        np.testing.assert_allclose(gradient[index], difference, rtol=1e-3, atol=2e-5)


def test_clipped_and_masked_tokens_get_no_gradient():
    generator = f32([-1.0] * 4)
    logprobs = generator + jnp.log(f32([1.5, 0.5, 1.1, 1.1]))

    def loss(logprobs):
        advantages, mask = f32([1, -1, 1, 1]), f32([1, 1, 1, 0])
        return clipped_surrogate(logprobs, generator, advantages, mask, token_count=3, **CLIP)[0]

    np.testing.assert_allclose(jax.grad(loss)(logprobs), [0, 0, -1.1 / 3, 0], rtol=1e-6)


def test_only_the_policy_log_probs_get_a_gradient():
    def loss(generator, advantages):
        return clipped_surrogate(f32([-1, -2]), generator, advantages, f32([1, 1]), token_count=2, **CLIP)[0]

    for gradient in jax.grad(loss, argnums=(0, 1))(f32([-1.1, -2.1]), f32([1, -1])):
        assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 200.0])
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(garbage):
    mask = f32([1, 0])

    def loss(logprobs):
        return clipped_surrogate(logprobs, f32([-1, 0]), f32([1, garbage]), mask, token_count=1, **CLIP)[0]

    value, gradient = jax.value_and_grad(loss)(f32([-1, garbage]))
    assert value == -1.0
    np.testing.assert_array_equal(gradient, [-1, 0])


def test_bug_case_b90_masked_answers_leave_numerator_and_denominator():
    mask = np.zeros((2, 30), np.float32)
    mask[0, :10] = 1
    loss, _ = surrogate(np.ones((2, 30)), -np.ones((2, 30)), mask)
    assert loss == 1.0


def test_bug_case_b90_nothing_left_gives_zero():
    loss, aux = surrogate(np.full((2, 3), 2.0), np.ones((2, 3)), np.zeros((2, 3)), token_count=0)
    assert loss == 0.0
    assert [float(value) for value in aux] == [0.0, 0.0, 0.0, 0.0]


def test_bug_case_b91_tied_groups_count_by_default_and_can_be_taken_out():
    # One live group of 20 tokens with A = -1, three tied groups of 60 tokens together with A = 0.
    advantages = np.concatenate([-np.ones(20), np.zeros(60)])
    default, _ = surrogate(np.ones(80), advantages)
    np.testing.assert_allclose(default, 20 / 80, rtol=1e-6)
    without_tied, _ = surrogate(np.ones(80), advantages, advantages != 0)
    np.testing.assert_allclose(without_tied, 1.0, rtol=1e-6)


def test_bug_case_b92_first_on_policy_step_is_not_zero_in_token_mode():
    mask = np.zeros((2, 12), np.float32)
    mask[0, :4], mask[1, :12] = 1, 1
    advantages = np.repeat([[1.0], [-1.0]], 12, axis=1)
    token_mode, _ = surrogate(np.ones((2, 12)), advantages, mask)
    np.testing.assert_allclose(token_mode, 0.5, rtol=1e-6)
    # A mean per sequence is the same function with weights 1 / length and the number of sequences as count.
    sequence_mode, _ = surrogate(np.ones((2, 12)), advantages, mask / [[4], [12]], token_count=2)
    np.testing.assert_allclose(sequence_mode, 0.0, atol=1e-7)


@pytest.mark.parametrize("splits", [(1, 9), (5, 5), (10,)])
def test_bug_case_b93_micro_batches(splits):
    # On policy a token's loss is -A: one token of loss 1 and nine of loss 3 have mean 2.8 however they are cut.
    advantages, generator = f32([-1.0] + [-3.0] * 9), f32(np.full(10, -1.0))

    def loss(logprobs):
        total, start = jnp.zeros(()), 0
        for size in splits:
            part = slice(start, start + size)
            ones = jnp.ones(size, jnp.float32)
            partial, _ = clipped_surrogate(
                logprobs[part], generator[part], advantages[part], ones, token_count=10, **CLIP
            )
            total += partial
            start += size
        return total

    value, gradient = jax.jit(jax.value_and_grad(loss))(generator)
    np.testing.assert_allclose(value, 2.8, rtol=1e-6)
    np.testing.assert_allclose(gradient, -advantages / 10, rtol=1e-6)


def test_bug_case_b96_second_update_sees_the_rollout_log_probs():
    key = jax.random.key(0)
    logits = jax.random.normal(key, (6, 5))
    tokens = jnp.arange(6) % 5
    rows = jnp.arange(6)
    advantages, ones = f32([1, -1, 1, -1, 1, -1]), jnp.ones(6, jnp.float32)
    rollout_logprobs = jax.nn.log_softmax(logits)[rows, tokens]

    def loss(logits):
        logprobs = jax.nn.log_softmax(logits)[rows, tokens]
        return clipped_surrogate(logprobs, rollout_logprobs, advantages, ones, token_count=6, **CLIP)

    gradient, first = jax.grad(loss, has_aux=True)(logits)
    _, second = loss(logits - 10.0 * gradient)
    assert first.ratio_mean == 1.0 and first.clip_high_fraction == 0.0
    assert second.ratio_max > 1.28 and second.clip_high_fraction > 0 and second.clip_low_fraction > 0


def test_bug_case_b97_per_sequence_values_are_refused_also_when_b_equals_t():
    square, row = jnp.ones((4, 4), jnp.float32), jnp.ones(4, jnp.float32)
    # ValueError of the function itself, or TypeError of the shape checker that tests put in front of it.
    for arguments in [(square, square, row, square), (square, square, square, row), (square, row, square, square)]:
        with pytest.raises((ValueError, TypeError), match="shape"):
            clipped_surrogate(*arguments, token_count=16, **CLIP)
    with pytest.raises((ValueError, TypeError), match="shape"):
        kl_k3(square, row)


def test_bug_case_b97_a_row_depends_on_its_own_mask_only():
    ratio = np.full((4, 4), 1.1)
    mask = np.triu(np.ones((4, 4)))
    whole = [float(surrogate(ratio[i : i + 1], -np.ones((1, 4)), mask[i : i + 1])[0]) for i in range(4)]
    np.testing.assert_allclose(whole, 1.1, rtol=1e-6)


def test_k3_matches_float64_over_all_magnitudes():
    d = np.concatenate([sign * np.logspace(-12, 1.5, 200) for sign in (1, -1)]).astype(np.float32)
    actual = np.asarray(kl_k3(jnp.zeros_like(d), f32(d)), np.float64)
    wide = d.astype(np.float64)
    near = np.abs(wide) < 1e-3
    expected = np.where(near, wide**2 / 2 + wide**3 / 6 + wide**4 / 24, np.expm1(wide) - wide)
    # Worst just above the series: expm1 of 1e-2 rounded to 1e-7 relative, beside a value of 5e-5.
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    assert (actual > 0).all()


def test_k3_is_exactly_zero_where_equal_and_has_the_right_gradient():
    x = f32([-0.5, -3.0])
    assert (np.asarray(kl_k3(x, x)) == 0).all()
    d = np.asarray([1e-4, -1e-4, 5e-3, 0.5, -2.0])
    gradient = jax.grad(lambda logprobs: kl_k3(logprobs, f32(d)).sum())(jnp.zeros(5, jnp.float32))
    # exp(d) is rounded at 1, so above the series the gradient carries an absolute error of 6e-8.
    np.testing.assert_allclose(gradient, -np.expm1(d), rtol=2e-5)


def test_k3_estimates_the_kl_divergence():
    p, q = np.asarray([0.7, 0.2, 0.1]), np.asarray([0.5, 0.25, 0.25])
    per_token = np.asarray(kl_k3(f32(np.log(p)), f32(np.log(q))))
    np.testing.assert_allclose((p * per_token).sum(), (p * np.log(p / q)).sum(), rtol=1e-5)
