"""Tests of the confidence head of DSpark: its target, what its loss reaches, and that it stays finite."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import TrainingContext
from draftco_jax.drafts.blocks.anchors import select_anchors
from draftco_jax.drafts.blocks.training import denominator, look_ahead
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.dspark.training import binary_cross_entropy, blocks_loss
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.numerics.sampling import SamplingConfig

CFG = DSparkConfig(
    tap_layers=(0, 1),
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    mask_token_id=0,
    block_size=3,
    markov_rank=5,
)
KEY = jax.random.key(2)
CONTEXT = TrainingContext(SamplingConfig(temperature=0.6), chunk_tokens=64, draft_length=3)


def split_head(gradients):
    """Gradients of the body, and of the confidence head."""
    return {k: v for k, v in gradients.items() if k != "confidence_head"}, gradients["confidence_head"]


@pytest.fixture(scope="module")
def gradients(make_case, lay_out_target):
    """Gradient of the whole loss at changes of the config."""
    batch, target = lay_out_target("packed")
    case = make_case(CFG)

    def of(**changes):
        cfg = replace(CFG, **changes)
        graph = make_case(cfg).graph
        loss = lambda p: blocks_loss(  # noqa: E731
            graph.merge(p), target, batch, denominator=denominator(batch, cfg, KEY), key=KEY, context=CONTEXT
        )[0]
        return split_head(jax.jit(jax.grad(loss))(case.params))

    return of


def test_bug_case_b08_the_confidence_loss_reaches_its_own_head_only(gradients):
    (body, head), (without, untouched) = gradients(), gradients(confidence_loss_weight=0.0)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(head))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(untouched))
    for one, other in zip(jax.tree.leaves(body), jax.tree.leaves(without), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * float(np.abs(one).max()))  # two programs
    official, _ = gradients(confidence_cut_inputs=False)
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (body, official)), strict=True)]
    assert max(moved) > 1e-3, "without the cut it does reach the body"


def test_bug_case_b08_states_and_markov_table_get_exactly_nothing(make_case):
    case, rng = make_case(CFG), np.random.default_rng(0)
    states, previous = jnp.asarray(rng.normal(size=(2, 3, 3, 16)), jnp.float32), jnp.ones((2, 3, 3), jnp.int32)

    def total(params, states, graph=case.graph):
        return jnp.sum(graph.merge(params).confidence(states, previous))

    of_params, of_states = jax.grad(total, argnums=(0, 1))(case.params, states)
    body, head = split_head(of_params)
    assert not np.any(of_states) and not any(np.any(leaf) for leaf in jax.tree.leaves(body))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(head))


def test_the_confidence_target_is_the_acceptance_at_temperature_one(make_case, lay_out_target):
    """Where the head says exactly the acceptance at temperature 1 its error is 0, whatever rollouts draw at."""
    batch, target = lay_out_target("packed")
    uniform = target._replace(hidden=0.0 * target.hidden)  # the policy's law is uniform at every temperature
    case = make_case(CFG)
    params = jax.tree.map(lambda leaf: 0.0 * leaf, case.params)  # and so is the draft's
    params["confidence_head"]["proj"]["bias"] = jnp.asarray([30.0])  # acceptance 1

    @jax.jit
    def run(params, target):
        draft = case.graph.merge(params)
        return blocks_loss(draft, target, batch, denominator=jnp.float32(1.0), key=KEY, context=CONTEXT)[1].extra

    np.testing.assert_allclose(run(params, uniform)["confidence_abs_error"], 0.0, atol=1e-6)
    params["confidence_head"]["proj"]["bias"] = jnp.asarray([0.0])
    np.testing.assert_allclose(run(params, uniform)["confidence_loss"], np.log(2.0), rtol=1e-6)

    # A policy that is not uniform: 1 - TV at temperature 1, against which 0.5 has this error.
    anchors, keep = select_anchors(KEY, look_ahead(batch, CFG), CFG)
    found = []
    for row in range(5):
        for anchor in np.asarray(anchors)[row][np.asarray(keep)[row]]:
            for at in range(anchor + 1, anchor + 4):
                same = at < 14 and batch.segment_ids[row, at] == batch.segment_ids[row, anchor]
                if not same or not batch.label_mask[row, at]:
                    break
                z = np.asarray(target.hidden[row, at - 1] @ target.head, np.float64)
                p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
                found.append(abs(0.5 - np.minimum(p, 1 / 19).sum()))
    np.testing.assert_allclose(run(params, target)["confidence_abs_error"], np.mean(found), rtol=1e-5)


def test_bug_case_b10_binary_cross_entropy_of_a_large_logit_is_that_logit():
    logits, targets = jnp.asarray([60.0, -60.0, 60.0, 0.0, 300.0]), jnp.asarray([0.0, 1.0, 1.0, 0.25, 0.5])
    np.testing.assert_allclose(
        binary_cross_entropy(logits, targets), [60.0, 60.0, 0.0, np.log(2.0), 150.0], rtol=1e-6, atol=1e-6
    )
    slope = jax.grad(lambda z: jnp.sum(binary_cross_entropy(z, targets)))(logits)
    expected = 1 / (1 + np.exp(-np.asarray(logits, np.float64))) - np.asarray(targets)
    np.testing.assert_allclose(slope, expected, atol=1e-6)


def test_bug_case_b10_forty_steps_in_bfloat16_on_features_a_hundred_times_too_large_stay_bounded(
    make_case, lay_out_target
):
    batch, target = lay_out_target("packed")
    cfg = replace(CFG, loss=DraftLossConfig(hard_cross_entropy=0.1, l1=0.9))
    case = make_case(cfg)
    half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731
    hundred = lambda a: jnp.asarray(100.0, a.dtype) * a  # noqa: E731
    target = half(target._replace(taps=hundred(target.taps), hidden=hundred(target.hidden)))
    count = denominator(batch, cfg, KEY)

    def loss(params):
        total, report = blocks_loss(
            case.graph.merge(params), target, batch, denominator=count, key=KEY, context=CONTEXT
        )
        return total, report.extra["confidence_loss"]

    def step(params, _):
        gradients, value = jax.grad(loss, has_aux=True)(params)
        rate = jnp.asarray(0.02, jnp.bfloat16)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value

    _, values = jax.jit(lambda p: jax.lax.scan(step, p, length=40))(half(case.params))
    assert np.isfinite(values).all()
    assert values.max() <= 1.5 * values[0] < 5.0 and values[-1] < values[0]
