"""Experts in the update: replay of the generator's routing, load metrics, the balance loss."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.functional import graph_of, initialise
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.numerics.logprobs import token_logprobs
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec, global_counts, objective
from draftco_jax.training.update import Optimizers, init_state, make_update

POLICY = dataclasses.replace(
    NemotronHConfig.tiny(), num_hidden_layers=4, block_types=("attention", "moe", "mamba", "moe")
)
DRAFT = Eagle3Config.for_target(POLICY, passes=1)
KEY = jax.random.key(0)  # no family here draws anything
COEFFICIENT = 0.3


def spec_of(**changes) -> ObjectiveSpec:
    return ObjectiveSpec(
        policy_graph=graph_of(POLICY.build),
        draft_graph=None,
        draft_cfg=None,
        algorithm=GrpoConfig(**changes),
        sampling=SamplingConfig(),
        chunk_tokens=64,
        draft_length=2,
    )


@pytest.fixture(scope="module")
def generator():
    params = initialise(POLICY.build, jax.random.key(1))[1]
    return jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim >= 2 else leaf, params)


@pytest.fixture(scope="module")
def forward():
    graph = graph_of(POLICY.build)

    def run(params, batch):
        policy = graph.merge(params)
        output = policy(batch.tokens, batch.positions, batch.segment_ids)
        logits = policy.logits(output.hidden[:, :-1])
        return token_logprobs(logits, batch.tokens[:, 1:], SamplingConfig()), output.routing

    return jax.jit(run)


@pytest.fixture(scope="module")
def rollouts(lay_out, generator, forward):
    """The batch with the generator's own log-probs and routing; the last token of a document was never read."""
    batch = lay_out("packed")
    batch = batch._replace(tokens=batch.tokens % POLICY.vocab_size)
    logprobs, routing = forward(generator, batch)
    own = jnp.pad(logprobs, ((0, 0), (1, 0))) * batch.label_mask
    ahead = jnp.pad(batch.segment_ids[:, 1:], ((0, 0), (0, 1)))
    read = (batch.segment_ids > 0) & (ahead == batch.segment_ids)
    experts = jnp.where(read[..., None, None], routing.ids, -1).astype(jnp.int16)
    return batch._replace(label_logprobs=own, experts=experts)


@pytest.fixture(scope="module")
def evaluate():
    """(params, batch, coefficient) -> (loss, metrics), gradient."""

    def run(params, batch, **changes):
        def loss(params):
            counts = global_counts(batch, None, KEY)
            return objective({"policy": params}, batch, counts, jnp.float32(0), None, None, spec_of(**changes), KEY)

        return jax.value_and_grad(loss, has_aux=True)(params)

    return jax.jit(run, static_argnames=("router_balance_coefficient",))


ROUTERS = ("[1]", "[3]")  # the layers with experts, as in paths of the parameters


def turned(params, routers=ROUTERS):
    """Other corrections of the choice, which weigh nothing: what differs is the choice alone."""
    shift = 0.3 * np.random.default_rng(7).normal(size=POLICY.n_routed_experts)

    def turn(path, leaf):
        name = jax.tree_util.keystr(path)
        here = name.endswith("['e_score_correction_bias']") and any(router in name for router in routers)
        return leaf + jnp.asarray(shift, leaf.dtype) if here else leaf

    return jax.tree_util.tree_map_with_path(turn, params)


def test_replay_makes_the_trainers_logprobs_the_generators_where_routing_would_turn(
    generator, forward, rollouts, evaluate
):
    trainer = turned(generator)
    (_, without), _ = evaluate(trainer, rollouts._replace(experts=None))
    (_, replayed), _ = evaluate(trainer, rollouts)
    print(without["agreement/logprob_diff_max"], replayed["agreement/logprob_diff_max"])
    assert without["agreement/logprob_diff_max"] > 0.01
    assert replayed["agreement/logprob_diff_max"] < 1e-5  # a few ulp of log-probs below 10
    assert "experts/replay_changed_fraction" not in without

    # What a router would choose on the generator's own states: turn that one alone, and look at its layer.
    read = np.asarray(rollouts.experts >= 0).all(axis=-1)
    own = np.sort(np.asarray(forward(generator, rollouts)[1].ids), axis=-1)
    changed = []
    for layer, router in enumerate(ROUTERS):
        other = np.sort(np.asarray(forward(turned(generator, (router,)), rollouts)[1].ids), axis=-1)
        changed.append((own != other).any(axis=-1)[..., layer][read[..., layer]].mean())
    assert 0 < min(changed) < max(changed) < 1, "each layer must show"
    np.testing.assert_allclose(replayed["experts/replay_changed_fraction"], np.mean(changed), rtol=1e-6)


def test_the_same_router_changes_nothing_and_is_changed_by_nothing(generator, rollouts, evaluate):
    (loss, metrics), gradient = evaluate(generator, rollouts)
    (alone, _), free = evaluate(generator, rollouts._replace(experts=None))
    assert float(metrics["experts/replay_changed_fraction"]) == 0.0
    assert float(loss) == pytest.approx(float(alone), rel=1e-6)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(free), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * max(1.0, float(jnp.abs(other).max())))


def test_metrics_are_means_over_layers_of_counts_by_hand(generator, forward, rollouts, evaluate):
    (_, metrics), _ = evaluate(generator, rollouts)
    ids = np.asarray(forward(generator, rollouts)[1].ids)[np.asarray(rollouts.segment_ids) > 0]  # [n, M, k]
    load = np.stack([np.bincount(ids[:, m].ravel(), minlength=4) for m in range(ids.shape[1])])
    share = load / load.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(metrics["experts/load_max"], share.max(axis=1).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["experts/load_min"], share.min(axis=1).mean(), rtol=1e-6)
    assert 0 < metrics["experts/entropy"] <= np.log(4) + 1e-6


def test_the_balance_loss_is_added_with_its_coefficient_and_reaches_the_router(generator, rollouts, evaluate):
    (loss, metrics), gradient = evaluate(generator, rollouts)
    (more, same), with_balance = evaluate(generator, rollouts, router_balance_coefficient=COEFFICIENT)
    assert float(same["policy/loss"]) == float(metrics["policy/loss"])
    expected = float(loss) + COEFFICIENT * float(metrics["experts/balance_loss"])
    assert float(more) == pytest.approx(expected, rel=1e-6)
    moved = [
        jax.tree_util.keystr(path)
        for (path, one), other in zip(
            jax.tree_util.tree_flatten_with_path(gradient)[0], jax.tree.leaves(with_balance), strict=True
        )
        if float(jnp.abs(one - other).max()) > 1e-5
    ]
    assert any("['gate']['kernel']" in name for name in moved)


def test_with_replay_and_balance_the_policy_does_not_depend_on_lambda_bit_for_bit(generator, rollouts):
    draft_graph, draft = initialise(DRAFT.build, jax.random.key(2))
    spec = dataclasses.replace(
        spec_of(router_balance_coefficient=COEFFICIENT), draft_graph=draft_graph, draft_cfg=DRAFT
    )
    optimizers = Optimizers(optax.sgd(0.1), optax.sgd(0.1))
    update, state = make_update(spec, optimizers), init_state(generator, draft, optimizers)
    without, with_loss = (update(state, rollouts, jnp.float32(weight))[0] for weight in (0.0, 1.0))
    jax.tree.map(np.testing.assert_array_equal, without.policy, with_loss.policy)
    largest = lambda one, other: max(  # noqa: E731
        float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True)
    )
    assert largest(generator, with_loss.policy) > 1e-4 and largest(draft, with_loss.draft) > 1e-4
