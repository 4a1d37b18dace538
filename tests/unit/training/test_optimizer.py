"""Tests of one optimizer group: schedule, clip, precision, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from draftco_jax.training.optimizer import OptimizerConfig, apply_gradients, learning_rate_schedule, make_optimizer


def rates(total, steps, **changes):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, **changes), total)
    with jax.numpy_dtype_promotion("standard"):  # the schedules of optax divide integers by floats
        return [float(schedule(step)) for step in steps]


def test_schedules():
    np.testing.assert_allclose(rates(10, [0, 5, 99]), [1, 1, 1])
    np.testing.assert_allclose(rates(10, [0, 1, 2, 9], warmup_steps=2), [0.5, 1, 1, 1])
    np.testing.assert_allclose(rates(10, [0, 5, 10, 20], schedule="cosine"), [1, 0.55, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates(12, [0, 1, 6, 11], schedule="cosine", warmup_steps=2), [0.5, 1, 0.55, 0.1])


@pytest.fixture(scope="module")
def step():
    """One step with a clip of 1, decay 0.1 and learning rate 0.01, on parameters of any dtype."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, weight_decay=0.1), total_steps=1)
    compiled = jax.jit(lambda g, p: apply_gradients(optimizer, g, optimizer.init(p), p))
    return compiled


def test_one_step_by_hand_with_the_gradient_clipped_to_norm_one(step):
    params, gradients = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([30.0, 40.0])}
    new, state = step(gradients, params)
    moments = state[1][0]
    np.testing.assert_allclose(moments.mu["w"], 0.1 * np.array([0.6, 0.8]), rtol=1e-6)
    np.testing.assert_allclose(moments.nu["w"], 0.02 * np.array([0.36, 0.64]), rtol=1e-5)
    # Bias correction makes the first step the sign; then decoupled decay.
    np.testing.assert_allclose(new["w"], [1 - 0.01 * (1 + 0.1), -2 - 0.01 * (1 - 0.2)], rtol=1e-5)


def test_a_gradient_below_the_clip_is_left_alone(step):
    _, state = step({"w": jnp.array([0.3, 0.4])}, {"w": jnp.zeros(2)})
    np.testing.assert_allclose(state[1][0].mu["w"], [0.03, 0.04], rtol=1e-6)


def test_moments_are_float32_for_bfloat16_parameters(step):
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    new, state = step({"w": jnp.full(3, 1e-3, jnp.bfloat16)}, params)
    moments = state.inner[1][0]
    assert moments.mu["w"].dtype == moments.nu["w"].dtype == jnp.float32
    assert new["w"].dtype == jnp.bfloat16 and (new["w"] < params["w"]).all()


def test_bfloat16_parameters_are_the_rounding_of_what_float32_ones_become():
    """A step of 1e-4 is a small part of the spacing of bfloat16 at 1: added to the parameter it would be lost."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4), total_steps=1)
    step = jax.jit(lambda g, s, p: apply_gradients(optimizer, g, s, p))
    gradients = {"kernel": jnp.array([1.0, -1.0, 0.5]), "norm": {"weight": jnp.ones(2)}}
    exact = {"kernel": jnp.array([1.0, 1.5, -2.0]), "norm": {"weight": jnp.ones(2)}}
    low = {"kernel": exact["kernel"].astype(jnp.bfloat16), "norm": {"weight": exact["norm"]["weight"]}}
    exact_state, low_state = optimizer.init(exact), optimizer.init(low)
    for _ in range(120):
        exact, exact_state = step(gradients, exact_state, exact)
        low, low_state = step(gradients, low_state, low)
    assert low["kernel"].dtype == jnp.bfloat16 and low["norm"]["weight"].dtype == jnp.float32
    np.testing.assert_array_equal(low["kernel"], exact["kernel"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(low["norm"]["weight"], exact["norm"]["weight"])
    assert (low["kernel"] != jnp.array([1.0, 1.5, -2.0], jnp.bfloat16)).all()


def test_what_an_update_gives_up_is_nowhere_twice():
    """A float32 parameter beside bfloat16 ones, a router's, is its own float32 copy in value only."""
    params = {"kernel": jnp.ones(3, jnp.bfloat16), "gate": jnp.full(3, 0.5, jnp.float32)}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.5), 10)
    state = optimizer.init(params)
    assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))}) == 10
    step = jax.jit(lambda params, state: apply_gradients(optimizer, params, state, params), donate_argnums=(0, 1))
    for _ in range(2):
        given = params, state
        params, state = step(*given)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert float(params["gate"][0]) < 0.5


def test_only_matrices_decay():
    names = ("kernel", "embed_tokens", "gate_up_proj", "weight", "bias", "A_log", "D", "dt_bias", "sinks")
    params = {name: jnp.ones((2, 2)) for name in (*names, "e_score_correction_bias", "down_proj_bias")}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), total_steps=1)
    new, _ = apply_gradients(optimizer, jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    changed = {name for name, value in new.items() if (value != 1).all()}
    assert changed == {"kernel", "embed_tokens", "gate_up_proj"}


def test_the_clip_is_over_the_whole_group():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0, clip_norm=2.0), total_steps=1)
    gradients = {"a": jnp.full(3, 4.0), "b": jnp.full(1, 4.0)}
    _, state = jax.jit(lambda g: optimizer.update(g, optimizer.init(g), g))(gradients)
    np.testing.assert_allclose(optax.tree.norm(state[1][0].mu), 0.1 * 2.0, rtol=1e-6)


@pytest.mark.parametrize(
    "changes", [
        {"learning_rate": -1.0},
        {"warmup_steps": -1},
        {"clip_norm": 0.0},
        {"beta1": 1.5},
        {"beta2": 1.0},
        {"epsilon": -1.0},
    ],
)  # fmt: skip
def test_values_no_run_can_use_are_refused(changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        OptimizerConfig(**({"learning_rate": 1.0} | changes))
