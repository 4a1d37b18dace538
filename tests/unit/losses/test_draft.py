"""Tests of the per-token terms of draft losses, and of their means over passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.losses.draft import acceptance, expected_accepted_length, pass_weighted_mean, soft_cross_entropy


@pytest.fixture(scope="module")
def logits():
    """Teacher and student over 7 ids at 5 tokens."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(5, 7)) * 2, jnp.float32) for _ in range(2))


def cross_entropy(teacher_logits, draft_logits):
    return jnp.sum(soft_cross_entropy(jax.nn.log_softmax(teacher_logits), jax.nn.log_softmax(draft_logits)))


def test_value_is_the_cross_entropy_and_its_gradient_is_q_minus_p(logits):
    teacher, student = logits
    value, gradient = jax.value_and_grad(cross_entropy, argnums=1)(teacher, student)
    log_p, log_q = (np.asarray(a, np.float64) for a in logits)
    log_p, log_q = (a - np.log(np.exp(a).sum(axis=-1, keepdims=True)) for a in (log_p, log_q))
    np.testing.assert_allclose(value, -(np.exp(log_p) * log_q).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.exp(log_q) - np.exp(log_p), rtol=0, atol=1e-6)


def test_a_perfect_student_costs_the_teachers_entropy_and_learns_nothing(logits):
    teacher, _ = logits
    value, gradient = jax.value_and_grad(cross_entropy, argnums=1)(teacher, teacher)
    law = np.asarray(jax.nn.softmax(teacher), np.float64)
    np.testing.assert_allclose(value, -(law * np.log(law)).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.zeros((5, 7)), rtol=0, atol=1e-6)


def test_bug_case_b07_the_teacher_gets_exactly_no_gradient(logits):
    teacher, student = logits
    gradient = jax.grad(cross_entropy)(teacher, student)
    assert (np.asarray(gradient) == 0).all()


def test_ids_the_teacher_rules_out_cost_nothing_wherever_the_student_stands():
    teacher = jnp.log(jnp.array([[0.5, 0.5, 0.0]], jnp.float32))
    for last in (-jnp.inf, -50.0):
        student = jnp.array([[-0.6931472, -0.6931472, last]], jnp.float32)
        value, gradient = jax.value_and_grad(lambda q: jnp.sum(soft_cross_entropy(teacher, q)))(student)
        np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
        np.testing.assert_array_equal(gradient, [[-0.5, -0.5, 0.0]])


def test_acceptance_is_one_minus_the_total_variation(logits):
    p, q = (jax.nn.softmax(a) for a in logits)
    np.testing.assert_allclose(acceptance(p, q), 1 - 0.5 * np.abs(p - q).sum(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(acceptance(p, p), np.ones(5), rtol=1e-6)
    one_hot = jnp.eye(7, dtype=jnp.float32)[:2]
    np.testing.assert_array_equal(acceptance(one_hot, one_hot[::-1]), [0.0, 0.0])


def f32(values):
    return jnp.asarray(values, jnp.float32)


def test_passes_share_one_denominator():
    values, masks = f32([[1, 2, 3], [4, 5, 6]]), f32([[1, 1, 0], [0, 1, 0]])
    loss = pass_weighted_mean(values, masks, (1.0, 0.5), f32(2.5))
    np.testing.assert_allclose(loss, (1 + 2 + 0.5 * 5) / 2.5, rtol=1e-6)


def test_garbage_under_the_mask_reaches_neither_value_nor_gradient():
    masks = f32([[1, 0]])
    mean = lambda v: pass_weighted_mean(v, masks, (1.0,), f32(1.0))  # noqa: E731
    value, gradient = jax.value_and_grad(mean)(f32([[2.0, np.nan]]))
    assert value == 2.0
    np.testing.assert_array_equal(gradient, [[1, 0]])


def test_no_labels_give_zero():
    assert pass_weighted_mean(f32([[7.0]]), f32([[0.0]]), (1.0,), f32(0.0)) == 0.0


def test_expected_accepted_length_by_hand():
    # Three anchors; the second loses its pass 1 (end of the document), the third is no anchor at all.
    acceptances = f32([[0.5, 0.8, 0.9], [0.4, 1.0, 0.9]])
    masks = f32([[1, 1, 0], [1, 0, 1]])
    total, anchors = expected_accepted_length(acceptances, masks)
    np.testing.assert_allclose(total, (1 + 0.5 + 0.5 * 0.4) + (1 + 0.8), rtol=1e-6)
    assert anchors == 2
