"""Tests of publish: new buffers, equal outputs, both models under one version."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.eagle3.checkpoint import graph_with_map
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.functional import ModelGraph, abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.transformer import count_parameters
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Publisher

KEPT = np.array([1, 2, 5, 8, 12, 13, 17, 20], np.int32)


class Pair(NamedTuple):
    """Train-side structures and weights of a policy and its draft."""

    policy_graph: ModelGraph
    draft_graph: ModelGraph
    policy: dict[str, Any]
    draft: dict[str, Any]
    publisher: Publisher


@pytest.fixture(scope="module")
def pair() -> Pair:
    policy_cfg = Qwen3Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    draft_cfg = Eagle3Config.for_target(policy_cfg, draft_vocab_size=KEPT.size)
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[0] ** -0.5, jnp.float32)  # noqa: E731
    policy, draft = (jax.tree.map(draw, abstract_params(cfg.build)) for cfg in (policy_cfg, draft_cfg))
    graphs = graph_of(policy_cfg.build), graph_with_map(draft_cfg, KEPT)
    return Pair(*graphs, policy, draft, Publisher(*graphs))


def addresses(tree):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


def copies(tree):
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def test_published_models_give_the_outputs_of_the_trained_ones(pair):
    published = pair.publisher.publish(pair.policy, pair.draft, PolicyVersion(3))
    rollout_graphs = pair.publisher.rollout_graphs(pair.policy, pair.draft)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 23, (2, 9)), jnp.int32)
    positions, segments = jnp.broadcast_to(jnp.arange(9)[None], (2, 9)), jnp.ones_like(tokens)

    def outputs(policy_graph, draft_graph, policy, draft):
        policy, draft = policy_graph.merge(policy), draft_graph.merge(draft)
        hidden, taps, _ = policy(tokens, positions, segments, tap_layers=(0,))
        states = draft.passes([policy.embed(tokens)] * 2, taps, positions, segments)
        laws = [draft.to_target_vocabulary(jax.nn.softmax(draft.logits(state))) for state in states]
        return policy.logits(hidden), *laws

    trained = jax.jit(lambda p, d: outputs(pair.policy_graph, pair.draft_graph, p, d))(pair.policy, pair.draft)
    rolled = jax.jit(lambda p, d: outputs(*rollout_graphs, p, d))(published.policy, published.draft)
    for one, other in zip(rolled, trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert float(jnp.std(one)) > 1e-2


def test_one_version_is_stamped_on_both(pair):
    published = pair.publisher.publish(pair.policy, pair.draft, PolicyVersion(7))
    assert published.version == PolicyVersion(7)
    assert published.draft is not None
    assert count_parameters(published.policy) == count_parameters(pair.policy)
    assert count_parameters(published.draft) == count_parameters(pair.draft)


def test_bug_case_b44_published_trees_share_no_buffer_with_training_or_with_each_other(pair):
    # A draft whose final norm and head rows are the very arrays of the policy.
    policy, draft = copies(pair.policy), copies(pair.draft)
    draft["norm"] = policy["norm"]
    published = pair.publisher.publish(policy, draft, PolicyVersion(0))
    sides = addresses(published.policy), addresses(published.draft), addresses(policy) | addresses(draft)
    assert sum(map(len, sides)) == len(set().union(*sides))


def test_what_is_published_outlives_the_train_state(pair):
    policy, draft = copies(pair.policy), copies(pair.draft)
    published = pair.publisher.publish(policy, draft, PolicyVersion(0))
    before = jax.tree.map(np.array, (published.policy, published.draft))
    for leaf in jax.tree.leaves((policy, draft)):
        leaf.delete()
    jax.tree.map(np.testing.assert_array_equal, (published.policy, published.draft), before)


def test_bug_case_b42_every_leaf_of_both_models_is_refreshed(pair):
    first = pair.publisher.publish(pair.policy, pair.draft, PolicyVersion(0))
    moved = jax.tree.map(lambda leaf: leaf + 1.0, (pair.policy, pair.draft))
    second = pair.publisher.publish(*moved, PolicyVersion(1))
    for old, new in ((first.policy, second.policy), (first.draft, second.draft)):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(b, a + 1.0), old, new)


def test_bug_cases_b22_and_b44_each_models_head_is_its_own(pair):
    first = pair.publisher.publish(pair.policy, pair.draft, PolicyVersion(0))
    kernel = pair.draft["lm_head"]["kernel"]
    np.testing.assert_array_equal(first.draft["lm_head"]["kernel"], kernel)
    refreshed = pair.publisher.publish(pair.policy, pair.draft | {"lm_head": {"kernel": kernel + 1}}, PolicyVersion(1))
    np.testing.assert_array_equal(refreshed.draft["lm_head"]["kernel"], kernel + 1)
    jax.tree.map(np.testing.assert_array_equal, refreshed.policy, first.policy)
    policy = pair.policy | {"lm_head": {"kernel": pair.policy["lm_head"]["kernel"] + 1}}
    other_way = pair.publisher.publish(policy, pair.draft, PolicyVersion(2))
    jax.tree.map(np.testing.assert_array_equal, other_way.draft, first.draft)
    assert (other_way.policy["lm_head"]["kernel"] != first.policy["lm_head"]["kernel"]).all()


def test_a_policy_without_a_draft_is_published_alone(pair):
    publisher = Publisher(pair.policy_graph, None)
    published = publisher.publish(pair.policy, None, PolicyVersion(0))
    assert published.draft is None and publisher.rollout_graphs(pair.policy, None)[1] is None
    expected = pair.publisher.publish(pair.policy, pair.draft, PolicyVersion(0)).policy
    jax.tree.map(np.testing.assert_array_equal, published.policy, expected)
