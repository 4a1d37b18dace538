"""Tests of the joint objective: alignment, denominators, packing, and where gradients go."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.losses.draft import expected_accepted_length
from draftco_jax.losses.kl import kl_k3
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.training.objective import Counts, GrpoConfig, global_counts, labels_of, objective, policy_terms
from draftco_jax.types import PackedBatch

KEY = jax.random.key(0)  # this family draws nothing


def counts_of(batch, setup):
    return global_counts(batch, setup.draft_cfg, KEY)


def assert_close(one, other, rtol=1e-5, atol=1e-6):
    """float32 sums in another order."""
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def of_rows(batch, rows):
    """The same shapes with the other rows empty."""
    keep = jnp.isin(jnp.arange(batch.tokens.shape[0]), jnp.array(rows))[:, None]
    return jax.tree.map(lambda a: a * keep.astype(a.dtype), batch)


def add(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


@pytest.fixture(scope="module")
def counts(setup, batch):
    return counts_of(batch, setup)


@pytest.fixture(scope="module")
def whole(gradient, batch, counts):
    return gradient(batch, counts)


def logprobs_by_hand(setup, batch):
    """Log-prob of each token from the logits one index earlier, tempered as the sampling is; 0 at index 0."""
    policy = setup.spec.policy_graph.merge(setup.policy)
    hidden, *_ = jax.jit(policy)(batch.tokens, batch.positions, batch.segment_ids)
    logits = np.asarray(policy.logits(hidden), np.float64) / setup.spec.sampling.temperature
    laws = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = np.zeros(batch.tokens.shape)
    for row, column in np.ndindex(*batch.tokens.shape):
        if column > 0:
            found[row, column] = laws[row, column - 1, batch.tokens[row, column]]
    return found


def test_the_policys_loss_reads_each_token_from_the_index_before_it(setup, batch, whole):
    (_, metrics), _ = whole
    logprobs, mask = logprobs_by_hand(setup, batch), np.asarray(batch.label_mask)
    ratio = np.exp((logprobs - batch.label_logprobs) * mask)
    advantages = np.asarray(batch.label_advantages)
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    np.testing.assert_allclose(metrics["policy/loss"], -(surrogate * mask).sum() / mask.sum(), rtol=1e-5)
    gap = np.abs(logprobs - batch.label_logprobs) * mask
    np.testing.assert_allclose(metrics["agreement/logprob_diff_max"], gap.max(), rtol=1e-5)


def test_on_policy_rollouts_agree_with_the_trainer(setup, batch, gradient, counts):
    own = jnp.asarray(logprobs_by_hand(setup, batch) * np.asarray(batch.label_mask), jnp.float32)
    (_, metrics), _ = gradient(batch._replace(label_logprobs=own), counts)
    assert metrics["agreement/kl_k3"] < 1e-10
    assert metrics["agreement/logprob_diff_max"] < 5e-6
    expected = -float((batch.label_advantages * batch.label_mask).sum() / batch.label_mask.sum())
    np.testing.assert_allclose(metrics["policy/loss"], expected, rtol=1e-5)


def test_bug_case_b93_micro_batches_with_global_counts_add_up(setup, batch, gradient, counts, whole):
    parts = [of_rows(batch, [0, 4]), of_rows(batch, [1]), of_rows(batch, [2, 3])]
    assert_close(add(*(counts_of(part, setup) for part in parts)), counts)
    results = [gradient(part, counts) for part in parts]
    (loss, metrics), gradients = whole
    np.testing.assert_allclose(sum(loss for (loss, _), _ in results), loss, rtol=1e-6)
    for name in ("policy/loss", "draft/loss", "policy/entropy", "agreement/kl_k3"):
        np.testing.assert_allclose(sum(m[name] for (_, m), _ in results), metrics[name], rtol=1e-5)
    assert_close(add(*(gradients for _, gradients in results)), gradients)


def test_the_order_of_rows_does_not_matter(batch, gradient, counts, whole):
    (loss, metrics), gradients = gradient(jax.tree.map(lambda a: a[jnp.array([3, 1, 4, 2, 0])], batch), counts)
    np.testing.assert_allclose(loss, whole[0][0], rtol=1e-6)
    assert_close(metrics, whole[0][1])
    assert_close(gradients, whole[1])


def test_bug_case_b15_packed_documents_equal_one_document_a_row_for_policy_and_draft(setup, lay_out, gradient, whole):
    alone = lay_out("alone")
    (loss, metrics), gradients = gradient(alone, counts_of(alone, setup))
    np.testing.assert_allclose(loss, whole[0][0], rtol=1e-6)
    assert_close(metrics, whole[0][1])
    assert_close(gradients, whole[1])


def test_the_draft_loss_weight_scales_the_drafts_gradient_and_only_it(batch, gradient, counts, whole):
    (loss, metrics), gradients = whole
    np.testing.assert_allclose(loss, metrics["policy/loss"] + metrics["draft/loss"], rtol=1e-6)
    (_, _), doubled = gradient(batch, counts, 2.0)
    jax.tree.map(np.testing.assert_array_equal, doubled["policy"], gradients["policy"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2.0 * b), doubled["draft"], gradients["draft"])
    (_, _), off = gradient(batch, counts, 0.0)
    jax.tree.map(np.testing.assert_array_equal, off["policy"], gradients["policy"])
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(off["draft"]))


def test_bug_case_b07_the_draft_loss_alone_has_exactly_no_gradient_in_the_policy(batch, gradient, counts):
    # Without advantages the policy's own loss has none either.
    _, gradients = gradient(batch._replace(label_advantages=jnp.zeros_like(batch.label_advantages)), counts)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradients["policy"]))
    assert any((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(gradients["draft"]))


def test_bug_case_b90_labels_taken_out_leave_numerator_and_denominator(setup, batch, gradient):
    """A cut answer that is not trained on: the same loss as a batch in which it is not a label at all."""
    masked = batch._replace(label_mask=batch.label_mask * (batch.segment_ids != 2).astype(jnp.float32))
    counts = counts_of(masked, setup)
    assert counts.policy_tokens == masked.label_mask.sum() < batch.label_mask.sum()
    garbage = masked._replace(
        label_logprobs=jnp.where(masked.label_mask > 0, masked.label_logprobs, jnp.nan),
        label_advantages=jnp.where(masked.label_mask > 0, masked.label_advantages, jnp.inf),
    )
    clean, dirty = gradient(masked, counts), gradient(garbage, counts)
    assert_close(dirty[0][0], clean[0][0])
    assert_close(dirty[1], clean[1])


@pytest.mark.parametrize("anything", [90.0, np.inf, np.nan])
def test_a_token_that_is_not_trained_on_may_be_anything_to_the_reference_policy(setup, batch, anything):
    """exp overflows past 88 nats: 0 * inf of a prompt token or of padding would be the NaN of every gradient."""
    spec = dataclasses.replace(setup.spec, algorithm=GrpoConfig(kl_coefficient=0.25))
    policy = spec.policy_graph.merge(setup.policy)
    hidden = jax.random.normal(KEY, (*batch.tokens.shape, setup.policy_cfg.hidden_size))

    def gradient(elsewhere):
        labels = labels_of(batch, WHOLE_ROWS, jnp.full(batch.tokens.shape, -3.0))
        labels = labels._replace(reference_logprobs=jnp.where(labels.mask > 0, -3.0, jnp.float32(elsewhere)))
        count = Counts(jnp.sum(labels.mask), jnp.float32(0.0))
        loss = lambda hidden: policy_terms(policy, hidden, labels, count, spec)[0]  # noqa: E731
        return jax.value_and_grad(loss)(hidden)

    jax.tree.map(np.testing.assert_array_equal, gradient(anything), gradient(-3.0))


def test_a_batch_without_labels_gives_zero_and_not_nan(setup, batch, gradient):
    empty = batch._replace(label_mask=jnp.zeros_like(batch.label_mask))
    (loss, metrics), gradients = gradient(empty, counts_of(empty, setup))
    assert loss == 0
    assert all(np.isfinite(value) for value in metrics.values())
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradients))


def test_bug_case_b09_what_is_switched_off_asks_for_nothing_and_the_penalty_asks_for_a_reference(setup, batch):
    """No draft: no taps. No penalty: no reference. With it, the k3 of each label towards the reference."""
    spec = dataclasses.replace(setup.spec, draft_graph=None, draft_cfg=None, algorithm=GrpoConfig(kl_coefficient=0.25))
    counts = Counts(jnp.sum(batch.label_mask), jnp.float32(0.0))
    run = jax.jit(lambda policy, reference: objective(
        {"policy": policy}, batch, counts, jnp.float32(1.0), reference, None, spec, KEY
    ))  # fmt: skip
    plain, _ = run(setup.policy, None)
    same, at_home = run(setup.policy, setup.policy)
    assert at_home["policy/kl_reference"] == 0 and same == plain
    other = jax.tree.map(lambda leaf: 1.1 * leaf, setup.policy)
    loss, metrics = run(setup.policy, other)
    logprobs, anchor = (logprobs_by_hand(setup._replace(policy=params), batch) for params in (setup.policy, other))
    k3 = np.asarray(kl_k3(jnp.float32(logprobs), jnp.float32(anchor))) * batch.label_mask
    np.testing.assert_allclose(metrics["policy/kl_reference"], k3.sum() / batch.label_mask.sum(), rtol=1e-4)
    np.testing.assert_allclose(loss, plain + 0.25 * metrics["policy/kl_reference"], rtol=1e-5)


def test_bug_cases_b17_and_b18_no_residual_holds_a_vocabulary_of_every_token(setup):
    rows, tokens, vocab = 2, 64, 997
    policy_cfg = dataclasses.replace(setup.policy_cfg, vocab_size=vocab)
    draft_cfg = Eagle3Config.for_target(policy_cfg, passes=2)
    spec = dataclasses.replace(
        setup.spec,
        policy_graph=graph_of(policy_cfg.build),
        draft_graph=graph_of(draft_cfg.build),
        draft_cfg=draft_cfg,
        chunk_tokens=16,
    )
    shape = lambda dtype: jax.ShapeDtypeStruct((rows, tokens), dtype)  # noqa: E731
    batch = PackedBatch(*[shape(jnp.int32)] * 3, *[shape(jnp.float32)] * 4, shape(jnp.int32))
    params = {"policy": abstract_params(policy_cfg.build), "draft": abstract_params(draft_cfg.build)}

    def saved(params, batch):
        counts = global_counts(batch, draft_cfg, KEY)
        loss = lambda p: objective(p, batch, counts, jnp.float32(1.0), None, None, spec, KEY)[0]  # noqa: E731
        return jax.vjp(loss, params)[1]

    sizes = [leaf.size for leaf in jax.tree.leaves(jax.eval_shape(saved, params, batch))]
    assert 0 < max(sizes) < rows * tokens * vocab / 3


def test_tau_prob_counts_no_pass_beyond_the_drafted_length():
    acceptances, masks = jnp.full((3, 1, 2), 0.5), jnp.ones((3, 1, 2))
    for draft_length, expected in ((1, 1.5), (2, 1.75), (3, 1.875), (9, 1.875)):
        total, anchors = expected_accepted_length(acceptances[:draft_length], masks[:draft_length])
        assert float(total / anchors) == expected
