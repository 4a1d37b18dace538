"""Tests of the losses of single labels, of their weights and of what they are divided by."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.losses.draft import (
    DraftLossConfig,
    advantage_weights,
    d_pace_weights,
    label_probability,
    per_label_loss,
    reward_weights,
    scale_labels,
    weighted_loss,
)
from draftco_jax.losses.law_pair import LawPairTerms

STEPS, ROWS, ANCHORS = 3, 2, 5
TERMS = ("soft_cross_entropy", "hard_cross_entropy", "l1", "total_variation", "end_to_end_tv", "lk_alpha", "lk_lambda")


def f32(values):
    return jnp.asarray(values, jnp.float32)


@pytest.fixture(scope="module")
def labels():
    """(soft, hard, l1, overlap, mode_kept, label_kept) and masks, numpy float64 [3, 2, 5]."""
    rng = np.random.default_rng(0)
    shape = (STEPS, ROWS, ANCHORS)
    overlap = rng.uniform(0.2, 0.95, shape)
    soft, hard = rng.uniform(0.5, 3.0, (2, *shape))
    mode_kept, label_kept = (rng.uniform(size=(2, *shape)) < 0.7).astype(float)
    masks = (rng.uniform(size=shape) < 0.7).astype(float)
    masks[1, 0, 0], masks[2, 0, 0] = 0.0, 1.0  # a gap inside a product
    return {
        "soft": soft,
        "hard": hard,
        "l1": 2 * (1 - overlap),
        "overlap": overlap,
        "mode_kept": mode_kept,
        "label_kept": label_kept,
        "masks": masks,
    }


def terms_of(labels):
    values = {name: f32(labels[name]) for name in ("l1", "overlap", "mode_kept", "label_kept")}
    hit = jnp.zeros_like(values["l1"])
    return LawPairTerms(
        soft_cross_entropy=f32(labels["soft"]), hard_cross_entropy=f32(labels["hard"]), label_is_mode=hit, **values
    )


def by_hand(name, x, *, frozen=None):
    """The definition of one term in float64; `frozen` is the overlap that the mix of lk_lambda is made of."""
    live, a = x["masks"] > 0, x["overlap"]
    frozen = a if frozen is None else frozen
    soft = np.where(x["mode_kept"] > 0, x["soft"], 0)
    reached = np.ones_like(a)
    for j, r, t in itertools.product(range(STEPS), range(ROWS), range(ANCHORS)):
        for i in range(j + 1):
            reached[j, r, t] *= a[i, r, t] if live[i, r, t] else 1.0
    mix = 0.8 * np.exp(-1.5 * frozen)
    value = {
        "soft_cross_entropy": soft,
        "hard_cross_entropy": np.where(x["label_kept"] > 0, x["hard"], 0),
        "l1": x["l1"],
        "total_variation": 1 - a,
        "end_to_end_tv": 1 - reached,
        "lk_alpha": -np.log(a),
        "lk_lambda": mix * soft + (1 - mix) * (1 - a),
    }[name]
    return np.where(live, value, 0)


def config(name, weight=1.0):
    return DraftLossConfig(**{name: weight}, lk_scale=0.8, lk_decay=1.5)


@pytest.mark.parametrize("name", TERMS)
def test_each_term_is_its_definition(labels, name):
    found = per_label_loss(terms_of(labels), f32(labels["masks"]), config(name, 0.5))
    np.testing.assert_allclose(found, 0.5 * by_hand(name, labels), rtol=0, atol=1e-6)  # float32 of numbers below 3


@pytest.mark.parametrize("name", TERMS)
def test_gradient_of_each_term_is_that_of_its_definition(labels, name):
    """Central differences in float64 of a weighted sum, by every input of every label."""
    weights = np.random.default_rng(1).normal(size=(STEPS, ROWS, ANCHORS))
    masks = f32(labels["masks"])
    loss = lambda terms: jnp.sum(f32(weights) * per_label_loss(terms, masks, config(name)))  # noqa: E731
    found = jax.grad(loss)(terms_of(labels))
    step, fields = 1e-6, {"soft": "soft_cross_entropy", "hard": "hard_cross_entropy", "l1": "l1", "overlap": "overlap"}
    for key, field in fields.items():
        expected = np.zeros_like(labels[key])
        for index in np.ndindex(expected.shape):
            ends = []
            for sign in (1, -1):
                moved = labels[key].copy()
                moved[index] += sign * step
                ends.append((weights * by_hand(name, labels | {key: moved}, frozen=labels["overlap"])).sum())
            expected[index] = (ends[0] - ends[1]) / (2 * step)
        # float32 of numbers up to 1 / 0.2 times a normal weight
        np.testing.assert_allclose(getattr(found, field), expected, rtol=1e-5, atol=2e-6, err_msg=field)


def test_terms_add_up(labels):
    terms, masks = terms_of(labels), f32(labels["masks"])
    both = per_label_loss(terms, masks, DraftLossConfig(soft_cross_entropy=0.1, l1=0.9))
    expected = 0.1 * by_hand("soft_cross_entropy", labels) + 0.9 * by_hand("l1", labels)
    np.testing.assert_allclose(both, expected, rtol=0, atol=1e-6)


def test_end_to_end_tv_is_one_minus_the_mean_share_of_rounds_that_get_there(labels):
    masks = np.ones_like(labels["masks"])
    per_label = per_label_loss(terms_of(labels), f32(masks), DraftLossConfig(end_to_end_tv=1.0))
    loss = weighted_loss(per_label, f32(masks), float(masks.sum()))
    np.testing.assert_allclose(loss, 1 - np.cumprod(labels["overlap"], axis=0).mean(), rtol=1e-6)


def test_the_mix_of_lk_lambda_can_be_that_of_the_step(labels):
    measured = f32([0.9, 0.5, 0.1])
    found = per_label_loss(
        terms_of(labels), f32(labels["masks"]), DraftLossConfig(lk_lambda=1.0), step_acceptance=measured
    )
    mix = np.exp(-np.array([0.9, 0.5, 0.1]))[:, None, None]
    soft = labels["mode_kept"] * labels["soft"]
    expected = labels["masks"] * (mix * soft + (1 - mix) * (1 - labels["overlap"]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_hopeless_label_costs_a_bounded_price_in_lk_alpha():
    zero, one = f32([[[0.0]]]), f32([[[1.0]]])
    loss = lambda a: jnp.sum(  # noqa: E731
        per_label_loss(LawPairTerms(zero, zero, zero, a, zero, zero, zero), one, DraftLossConfig(lk_alpha=1.0))
    )
    value, gradient = jax.value_and_grad(loss)(zero)
    np.testing.assert_allclose(value, -np.log(1e-8), rtol=1e-6)
    assert gradient == 0


@pytest.mark.parametrize("name", TERMS)
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(labels, name):
    masks = f32(labels["masks"])
    dirty = jax.tree.map(lambda x: jnp.where(masks > 0, x, jnp.nan), terms_of(labels))

    def loss(terms):
        return weighted_loss(per_label_loss(terms, masks, config(name)), masks, jnp.sum(masks))

    expected, found = jax.value_and_grad(loss)(terms_of(labels)), jax.value_and_grad(loss)(dirty)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for gradient in jax.tree.leaves(found[1]):
        assert (np.asarray(gradient)[labels["masks"] == 0] == 0).all()


def test_under_filters_losses_take_the_overlap_that_has_a_gradient(labels):
    filtered = terms_of(labels)._replace(
        overlap=jnp.zeros((STEPS, ROWS, ANCHORS)), unfiltered_overlap=f32(labels["overlap"])
    )
    found = per_label_loss(filtered, f32(labels["masks"]), DraftLossConfig(total_variation=1.0))
    np.testing.assert_allclose(found, by_hand("total_variation", labels), rtol=0, atol=1e-6)


def test_bug_case_b09_draft_terms_of_weight_zero_are_not_looked_at(labels):
    nan = jnp.full((STEPS, ROWS, ANCHORS), jnp.nan, jnp.float32)
    terms = LawPairTerms(nan, f32(labels["hard"]), nan, nan, nan, f32(labels["label_kept"]), nan)
    cfg = DraftLossConfig(hard_cross_entropy=1.0)
    assert not cfg.needs_teacher
    found = per_label_loss(terms, f32(labels["masks"]), cfg)
    np.testing.assert_allclose(found, by_hand("hard_cross_entropy", labels), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in TERMS if name != "hard_cross_entropy"])
def test_every_other_term_needs_the_teacher(name):
    assert DraftLossConfig(**{name: 0.1}, hard_cross_entropy=1.0).needs_teacher


# Two documents and one token of none in row 0; one document in row 1.
DOCUMENTS = np.array([[1, 1, 1, 2, 0], [3, 3, 3, 3, 3]], np.int32)
SPLITS = {"whole": [[0, 1]], "one row each": [[0], [1]]}


@pytest.fixture(scope="module")
def weighing():
    """Weights with fractions, some where there is no document, and a per-label loss."""
    rng = np.random.default_rng(3)
    weights = rng.uniform(0.1, 1.0, (STEPS, ROWS, ANCHORS)) * (rng.uniform(size=(STEPS, ROWS, ANCHORS)) < 0.8)
    assert weights[:, DOCUMENTS == 0].sum() > 0
    return weights, rng.uniform(0.5, 3.0, (STEPS, ROWS, ANCHORS))


def normalised_by_hand(normaliser, weights, losses):
    weights = weights * (DOCUMENTS > 0)
    sums = [[(weights * x * (DOCUMENTS == d)).sum() for x in (losses, np.ones_like(losses))] for d in (1, 2, 3)]
    total = (weights * losses).sum()
    return {
        "valid_labels": total / weights.sum(),
        "all_positions": total / 9,
        "per_sequence": np.mean([a / b for a, b in sums]),
        "sequences": total / 3,
    }[normaliser]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("normaliser", ["valid_labels", "all_positions", "per_sequence", "sequences"])
def test_bug_case_b16_bug_case_b93_draft_loss_and_gradient_do_not_depend_on_the_split(weighing, normaliser, split):
    """Denominators of the parts add up, whatever is counted."""
    weights, losses = (f32(x) for x in weighing)
    parts = []
    for rows in SPLITS[split]:
        documents = jnp.asarray(DOCUMENTS[rows])
        positions = jnp.sum((documents > 0).astype(jnp.float32))
        scaled = scale_labels(
            weights[:, np.array(rows)], documents, normaliser=normaliser, positions=positions, max_documents=5
        )
        parts.append((rows, *scaled))
    denominator = sum(part[2] for part in parts)

    def loss(losses):
        return sum(weighted_loss(losses[:, np.array(rows)], scaled, denominator) for rows, scaled, _ in parts)

    value, gradient = jax.value_and_grad(loss)(losses)
    expected = normalised_by_hand(normaliser, *weighing)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    step = 1e-3  # the loss is linear in each label, so any step is exact
    moved = weighing[1].copy()
    moved[1, 0, 2] += step
    slope = (normalised_by_hand(normaliser, weighing[0], moved) - expected) / step
    np.testing.assert_allclose(gradient[1, 0, 2], slope, rtol=1e-5)


def test_per_sequence_gives_a_long_answer_no_more_weight_than_a_short_one():
    documents = jnp.asarray([[1, 2, 2, 2]], jnp.int32)
    weights, losses = jnp.ones((1, 1, 4), jnp.float32), f32([[[4.0, 1.0, 1.0, 1.0]]])
    loss = {}
    for normaliser in ("per_sequence", "valid_labels"):
        scaled, count = scale_labels(weights, documents, normaliser=normaliser, positions=f32(4.0), max_documents=4)
        loss[normaliser] = float(weighted_loss(losses, scaled, count))
    assert loss == pytest.approx({"per_sequence": 2.5, "valid_labels": 1.75}, rel=1e-6)


@pytest.mark.parametrize("normaliser", ["valid_labels", "per_sequence", "sequences"])
def test_no_labels_give_zero(normaliser):
    none = jnp.zeros((1, 1, 4), jnp.float32)
    documents = jnp.asarray([[1, 1, 0, 0]], jnp.int32)
    scaled, count = scale_labels(none, documents, normaliser=normaliser, positions=f32(2.0), max_documents=4)
    assert count == 0
    assert weighted_loss(none + 7.0, scaled, count) == 0.0


def test_d_pace_by_hand_with_a_gap():
    # One anchor, four steps, the third not live; smoothed confidences 0.5 + 0.5 c = 0.6, 0.75, -, 0.9.
    confidence, masks = f32([[[0.2]], [[0.5]], [[np.nan]], [[0.8]]]), f32([[[1]], [[1]], [[0]], [[1]]])
    found = d_pace_weights(confidence, masks, alpha=0.5)
    reached = 0.6, 0.6 * 0.75, 0.6 * 0.75 * 0.9
    expected = [sum(reached), reached[1] + reached[2], 0.0, reached[2]]
    np.testing.assert_allclose(found[:, 0, 0], expected, rtol=1e-6)


def test_weights_get_no_gradient(labels):
    terms, masks = terms_of(labels), f32(labels["masks"])

    def weighed(hard, rewards):
        confidence = label_probability(terms._replace(hard_cross_entropy=hard))
        sample = reward_weights(rewards, floor=0.1) * advantage_weights(rewards, scale=1.0)
        return jnp.sum(d_pace_weights(confidence, masks, alpha=0.5)) * jnp.sum(sample)

    value, gradients = jax.value_and_grad(weighed, argnums=(0, 1))(terms.hard_cross_entropy, f32([0.2, 0.7]))
    assert value > 0
    assert all((np.asarray(g) == 0).all() for g in gradients)


def test_confidence_is_the_probability_of_the_label_and_zero_where_the_draft_lacks_it(labels):
    expected = labels["label_kept"] * np.exp(-labels["hard"])
    np.testing.assert_allclose(label_probability(terms_of(labels)), expected, rtol=1e-6)


def test_sample_weights_by_hand():
    np.testing.assert_allclose(reward_weights(f32([-1.0, 0.0, 0.5, 1.0, 3.0]), floor=0.2), [0.2, 0.2, 0.6, 1.0, 1.0])
    found = advantage_weights(f32([-4.0, -1.0, 0.0, 0.5, 9.0]), scale=0.5)
    np.testing.assert_allclose(found, np.exp([-0.5, -0.5, 0.0, 0.25, 0.5]), rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "soft_cross_entropy=0.0 must be > 0 where all other terms are 0"),
        ({"lk_scale": 0.5}, "soft_cross_entropy=0.0 must be > 0"),
        ({"l1": -0.1}, "l1=-0.1 must be finite and >= 0"),
        ({"lk_alpha": float("nan")}, "lk_alpha=nan must be finite"),
        ({"l1": 1.0, "lk_decay": float("inf")}, "lk_decay=inf must be finite"),
        ({"l1": 1.0, "d_pace_alpha": 1.5}, "d_pace_alpha=1.5 must be in"),
        ({"l1": 1.0, "reward_floor": -1.0}, "reward_floor=-1.0 must be in"),
        ({"l1": 1.0, "lk_scale": 0.0}, "lk_scale=0.0 must be in"),
        ({"l1": 1.0, "lk_scale": 2.0}, "lk_scale=2.0 must be in"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        DraftLossConfig(**values)
    assert "; " in str(caught.value) and "\n" not in str(caught.value)
