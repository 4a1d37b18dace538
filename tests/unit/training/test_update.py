"""Tests that policy and draft share a program and nothing else."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from draftco_jax.drafts.eagle3.checkpoint import load_draft, save_draft
from draftco_jax.models.hf_weights import load_policy, save_policy
from draftco_jax.training.update import Optimizers, TrainState, init_state, make_update

STEPS, POLICY_RATE, DRAFT_RATE = 5, 1e-3, 4e-3


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def largest_change(one, other):
    return max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))


@pytest.mark.parametrize("twin", [False, True])
def test_the_policys_path_is_the_same_bit_for_bit_with_and_without_the_draft_loss(setup, start, trained, twin):
    frozen = setup.draft if twin else None
    without, with_loss = trained(0.0, frozen), trained(1.0, frozen)
    assert_equal(without.policy, with_loss.policy)
    assert_equal(without.policy_optimizer, with_loss.policy_optimizer)
    assert largest_change(start.policy, with_loss.policy) > POLICY_RATE
    assert largest_change(start.draft, with_loss.draft) > DRAFT_RATE
    assert_equal(start.draft, without.draft)


def test_the_policys_path_is_that_of_a_program_without_a_draft_up_to_rounding(setup, trained, batch):
    """Other programs round the gradients in another order; with the twin in the program as well as with no draft.

    Adam divides by the root of the second moment, so a gradient that is all rounding would move a weight by up to the
    learning rate; here gradients are large beside their rounding of 1e-7, and the bound is a thousandth of one step.
    (Where this was written the three programs agree bit for bit.)
    """
    spec = dataclasses.replace(setup.spec, draft_graph=None, draft_cfg=None)
    optimizers = Optimizers(setup.optimizers.policy, None)
    update = make_update(spec, optimizers)
    state = init_state(setup.policy, setup.draft, optimizers)
    assert state.draft is None and state.draft_optimizer is None
    for _ in range(STEPS):
        state, metrics = update(state, batch, jnp.float32(1.0))
    assert not [name for name in metrics if "draft" in name]
    for other in (trained(1.0), trained(1.0, setup.draft)):
        assert largest_change(state.policy, other.policy) < 1e-3 * POLICY_RATE


def test_a_draft_of_nan_leaves_the_policy_as_it_is(setup, start, trained, update, batch):
    broken = start._replace(draft=jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), start.draft))
    for weight in (0.0, 1.0):
        state = broken
        for _ in range(STEPS):
            state, _ = update(state, batch, weight)
        assert_equal(state.policy, trained(1.0).policy)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.policy))


def test_each_group_has_its_own_clip(start, update, batch):
    """A draft gradient of norm 1e6 is cut to its own limit, and the policy takes the very step it takes without it."""
    usual, metrics = update(start, batch, 1.0)
    huge, huge_metrics = update(start, batch, 1e6)
    assert metrics["policy/gradient_norm"] == huge_metrics["policy/gradient_norm"]
    assert huge_metrics["draft/gradient_norm"] > 1e5
    assert_equal(usual.policy, huge.policy)
    first_moment = huge.draft_optimizer[1][0].mu
    np.testing.assert_allclose(optax.tree.norm(first_moment), 0.1 * 1.0, rtol=1e-5)  # (1 - beta1) * clip_norm


def test_each_group_has_its_own_learning_rate(start, update, batch):
    # The first step of Adam is the learning rate, whatever the gradient.
    state, _ = update(start, batch, 1.0)
    np.testing.assert_allclose(largest_change(state.policy, start.policy), POLICY_RATE, rtol=1e-2)
    np.testing.assert_allclose(largest_change(state.draft, start.draft), DRAFT_RATE, rtol=1e-2)
    assert int(state.step) == 1


def test_a_state_taken_apart_and_put_together_continues_bit_for_bit(start, update, trained, batch):
    state = start
    for step in range(STEPS):
        state, _ = update(state, batch, 1.0)
        if step == 1:
            leaves, structure = jax.tree.flatten(jax.device_get(state))
            state = TrainState(**jax.tree.unflatten(structure, leaves)._asdict())
    assert_equal(state, trained(1.0))
    assert state.policy_optimizer[1][0].mu.keys() == state.policy.keys()
    assert state.draft_optimizer[1][0].mu.keys() == state.draft.keys()
    assert int(state.policy_optimizer[1][0].count) == int(state.draft_optimizer[1][0].count) == STEPS


def test_the_frozen_twin_is_measured_on_the_same_rollouts_and_not_trained(setup, start, update, batch):
    _, metrics = update(start, batch, 1.0, setup.draft)
    for name in ("tau_prob", "tv_position_1", "tv_position_2"):  # the draft is the twin before its first step
        np.testing.assert_allclose(metrics[f"draft/{name}"], metrics[f"frozen_draft/{name}"], rtol=1e-6)
    assert "frozen_draft/loss_position_1" not in metrics
    assert all(np.ndim(value) == 0 and value.dtype == jnp.float32 for value in metrics.values())


def test_bug_cases_b60_and_b64_live_weights_of_a_tied_policy_and_a_draft_with_its_own_head_are_exported(
    setup, trained, tmp_path
):
    state = trained(1.0)
    save_policy(tmp_path / "policy", setup.policy_cfg, state.policy)
    save_draft(tmp_path / "draft", setup.draft_cfg, setup.spec.draft_graph, state.draft)
    policy_cfg, policy = load_policy(tmp_path / "policy")
    draft_cfg, graph, draft = load_draft(tmp_path / "draft")
    assert (policy_cfg, draft_cfg) == (setup.policy_cfg, setup.draft_cfg)
    assert_equal(policy, state.policy)
    assert_equal(draft, state.draft)
    assert_equal(graph.constants, setup.spec.draft_graph.constants)
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["tie_word_embeddings"] is True
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["tie_word_embeddings"] is False
