"""Tests of what comes before RL: fine-tuning on demonstrations, then a draft for the fixed policy."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import TrainingContext
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.training import from_policy
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.fine_tune import fine_tune
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec, global_counts, objective
from draftco_jax.training.optimizer import OptimizerConfig, make_optimizer
from draftco_jax.training.pretrain_draft import (
    PretrainSpec,
    init_state,
    keep_rows,
    make_mass_outside,
    make_step,
    token_counts,
)
from draftco_jax.types import PackedBatch


@pytest.fixture(scope="module")
def demonstrations():
    """Texts in which each token follows from the one before it: x -> 5 x + 2 mod 23, first token given."""
    tokens = np.zeros((5, 12), np.int32)
    tokens[:, 0] = [3, 8, 14, 19, 21]
    for column in range(1, 12):
        tokens[:, column] = (5 * tokens[:, column - 1] + 2) % 23
    ones, mask = np.ones_like(tokens), np.ones(tokens.shape, np.float32)
    mask[:, 0] = 0
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)
    zeros = np.zeros_like(mask)
    return PackedBatch(*(jnp.asarray(a) for a in (tokens, positions, ones, mask, zeros, zeros, zeros, positions)))


@pytest.fixture(scope="module")
def fine_tuned(setup, demonstrations):
    """Policy and losses."""
    losses = []
    policy = fine_tune(
        setup.spec.policy_graph,
        setup.policy,
        itertools.repeat(demonstrations),
        OptimizerConfig(learning_rate=1e-2),
        steps=60,
        on_step=lambda step, loss: losses.append((step, float(loss))),
    )
    return policy, losses


def test_fine_tuning_learns_the_demonstrations(fine_tuned):
    _, losses = fine_tuned
    assert [step for step, _ in losses] == list(range(1, 61))
    assert losses[0][1] > 2.5 and losses[-1][1] < 0.5


@pytest.fixture(scope="module")
def full(setup):
    """A draft of the whole vocabulary: config, graph, weights."""
    cfg = Eagle3Config.for_target(setup.policy_cfg, passes=1)
    rng = np.random.default_rng(5)
    draw = lambda leaf: jnp.asarray(0.1 * rng.normal(size=leaf.shape) + (leaf.ndim == 1), jnp.float32)  # noqa: E731
    return cfg, graph_of(cfg.build), jax.tree.map(draw, abstract_params(cfg.build))


def test_pretraining_raises_acceptance_and_bug_case_b16_its_loss_is_that_of_the_joint_update(
    setup, fine_tuned, full, demonstrations
):
    policy, _ = fine_tuned
    cfg, graph, draft = full
    draft, seen = from_policy(draft, policy), []
    before = jax.tree.map(np.array, policy)
    context = TrainingContext(SamplingConfig(), 32, 4)
    spec = PretrainSpec(policy_graph=setup.spec.policy_graph, draft_cfg=cfg, kept=None, context=context)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), 60)
    step, state = make_step(spec, optimizer), init_state(jax.tree.map(jnp.copy, draft), optimizer)
    for _ in range(60):
        given = state
        state, metrics = step(given, policy, demonstrations)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        seen.append({name: float(value) for name, value in metrics.items()})
    assert int(state.step) == 60 and state.policy is None
    first, last = [1.0 - seen[i]["draft/tv_position_1"] for i in (0, -1)]
    assert last > first + 0.3 and last > 0.6
    jax.tree.map(np.testing.assert_array_equal, policy, before)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (state.draft, draft)), strict=True))

    spec = ObjectiveSpec(
        policy_graph=setup.spec.policy_graph,
        draft_graph=graph,
        draft_cfg=cfg,
        algorithm=GrpoConfig(),
        sampling=SamplingConfig(),
        chunk_tokens=32,
        draft_length=4,
    )
    key = jax.random.key(0)
    counts = global_counts(demonstrations, cfg, key)
    joint = jax.jit(lambda p: objective(p, demonstrations, counts, jnp.float32(1.0), None, None, spec, key)[1])
    metrics = joint({"policy": policy, "draft": draft})
    # The same sums in another program: float32 rounding.
    for name in ("draft/loss", "draft/loss_position_1", "draft/tv_position_1", "draft/tau_prob"):
        np.testing.assert_allclose(float(metrics[name]), seen[0][name], rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_started_from_the_policy_has_copies_of_its_head_and_final_norm(setup, full, tied):
    _, _, draft = full
    rng = np.random.default_rng(6)
    head = jnp.asarray(rng.normal(size=(16, 23)), jnp.float32)
    policy = setup.policy if tied else setup.policy | {"lm_head": {"kernel": head}}
    started = from_policy(draft, policy)
    np.testing.assert_array_equal(started["lm_head"]["kernel"], setup.policy["embed_tokens"].T if tied else head)
    np.testing.assert_array_equal(started["norm"]["weight"], policy["norm"]["weight"])
    jax.tree.map(np.testing.assert_array_equal, started["midlayer"], draft["midlayer"])
    pointers = lambda tree: {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}  # noqa: E731
    copied = {name: started[name] for name in ("lm_head", "norm")}
    assert not pointers(copied) & (pointers(policy) | pointers(draft))


def test_a_reduced_vocabulary_cannot_take_the_policys_head(setup):
    with pytest.raises(ValueError, match=r"\(16, 13\).*\(16, 23\)"):
        from_policy(setup.draft, setup.policy)


def test_a_draft_of_a_reduced_vocabulary_starts_from_the_heads_columns_of_its_own_ids(setup):
    kept = np.asarray(setup.spec.draft_graph.constants["draft_to_target"])
    started = from_policy(setup.draft, keep_rows(setup.policy, kept))
    np.testing.assert_array_equal(started["lm_head"]["kernel"], np.asarray(setup.policy["embed_tokens"]).T[:, kept])
    assert keep_rows(setup.policy, None) is setup.policy


def test_tokens_are_counted_where_the_policy_sampled_them(batch):
    counts = token_counts(batch, 23)
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.label_mask)
    assert counts.sum() == mask.sum() == 18
    expected = [
        sum(int(t == token and m > 0) for t, m in zip(tokens.flat, mask.flat, strict=True)) for token in range(23)
    ]
    np.testing.assert_array_equal(counts, expected)


def test_the_mass_outside_a_vocabulary_is_that_of_the_laws_that_predict_labels(setup, batch):
    kept = np.asarray(setup.spec.draft_graph.constants["draft_to_target"])
    measure = make_mass_outside(setup.spec.policy_graph, kept, setup.spec.sampling, 32)
    total, count = measure(setup.policy, batch)

    @jax.jit
    def laws_of(policy, batch):
        model = setup.spec.policy_graph.merge(policy)
        hidden, *_ = model(batch.tokens, batch.positions, batch.segment_ids)
        return jax.nn.softmax(model.logits(hidden) / jnp.float32(0.9))

    laws = np.asarray(laws_of(setup.policy, batch), np.float64)
    outside = 1.0 - laws[..., kept].sum(axis=-1)
    # The law that predicts the token at t stands at t - 1; no document starts with a label here.
    labels = np.argwhere(np.asarray(batch.label_mask) > 0)
    np.testing.assert_allclose(total, sum(outside[r, t - 1] for r, t in labels), rtol=1e-5)  # sums of float32 laws
    assert count == len(labels)
