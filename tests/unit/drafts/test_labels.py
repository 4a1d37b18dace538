"""Labels of families whose steps start at every index: which states they learn from, and that chunks change nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import PackedRows
from draftco_jax.context_parallel.packed_rows import WHOLE_ROWS
from draftco_jax.drafts import labels as module
from draftco_jax.drafts.base import TrainingContext
from draftco_jax.drafts.labels import Ahead, step_terms
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

ROWS, TOKENS, STEPS = 2, 16, 3
F, W, D, V = 5, 19, 6, 31


@pytest.mark.parametrize("packed", [WHOLE_ROWS, PackedRows(ranks=2, context_axis="context")], ids=["whole", "zigzag"])
@pytest.mark.parametrize(("tokens", "reach"), [(16, 4), (6, 2), (10, 1)])
def test_a_span_is_the_longest_stretch_of_its_tokens(packed, tokens, reach):
    size = int(packed.places(jnp.int32(tokens - 1), reach, tokens)) + 1 + reach
    places = np.asarray(packed.places(jnp.arange(tokens), reach, tokens))
    places = np.concatenate([places + row * size for row in range(4)])
    for count in range(1, 3 * tokens):
        longest = max(int(places[i + count - 1] - places[i]) for i in range(len(places) - count + 1))
        assert packed.span(count, reach, tokens) == longest


@pytest.fixture(scope="module")
def given():
    """Features, head, the policy's states and head, and rows of two documents and padding."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    ids = jnp.asarray(np.repeat([[1] * 7 + [2] * 5 + [0] * 4], ROWS, axis=0), jnp.int32)
    tokens = jnp.asarray(rng.integers(0, V, (ROWS, TOKENS)), jnp.int32)
    zeros = jnp.zeros((ROWS, TOKENS), jnp.float32)
    batch = PackedBatch(tokens, ids, ids, zeros, zeros, zeros, zeros, ids)
    kept = jnp.asarray(rng.permutation(V)[:W], jnp.int32)
    return normal(ROWS, TOKENS, STEPS, F), normal(F, W), normal(ROWS, TOKENS, D), normal(D, V), batch, kept


def with_gradients(given, *, chunk, sampling):
    features, kernel, hidden, head, batch, kept = given
    context = TrainingContext(sampling, chunk, STEPS, 7)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(4, STEPS, ROWS, TOKENS)), jnp.float32)

    def loss(features, kernel):
        terms = step_terms(features, kernel, hidden, head, Ahead(batch, STEPS + 1, WHOLE_ROWS), context, kept=kept)
        return jnp.sum(weights * jnp.stack([*terms[:3], terms.unfiltered_overlap])), terms

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(features, kernel)


# 96 labels; 24 are 9 indices at most, so 8 + 4 + 3 states; a last chunk of 11 whose first label is no first step.
@pytest.mark.parametrize("chunk", [24, 85, 96])
def test_states_met_once_for_all_their_labels_change_nothing(given, monkeypatch, chunk):
    sampling, spans = SamplingConfig(temperature=0.7, top_p=0.8), []
    terms_of = module.law_pair_terms

    def alone(*args: Any, span: int, **more: Any) -> Any:
        spans.append(span)
        return terms_of(*args, **more)

    found = with_gradients(given, chunk=chunk, sampling=sampling)
    monkeypatch.setattr(module, "law_pair_terms", alone)
    expected = with_gradients(given, chunk=chunk, sampling=sampling)
    assert min(spans[0], ROWS * (TOKENS + STEPS + 1)) < chunk  # or there is nothing to compare
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)  # float32: products of other sizes


def test_each_label_is_that_of_its_step_and_its_state(given):
    features, kernel, hidden, head, batch, _ = given
    z, tokens = np.asarray(features @ kernel), np.asarray(batch.tokens)
    log_q = np.asarray(jax.nn.log_softmax(z))
    p = np.asarray(jax.nn.softmax(hidden @ head[:, :W], axis=-1))
    context = TrainingContext(SamplingConfig(), 24, STEPS, 7)
    terms = step_terms(features, kernel, hidden, head[:, :W], Ahead(batch, STEPS + 1, WHOLE_ROWS), context)
    for k, row, t in ((0, 0, 0), (1, 1, 3), (2, 1, 7)):  # inside their documents
        label = tokens[row, t + 2 + k]
        hard = -log_q[row, t, k, label] if label < W else 0.0
        np.testing.assert_allclose(terms.hard_cross_entropy[k, row, t], hard, rtol=1e-5)
        overlap = np.minimum(np.exp(log_q[row, t, k]), p[row, t + 1 + k]).sum()
        np.testing.assert_allclose(terms.overlap[k, row, t], overlap, rtol=1e-5)


def test_a_span_that_is_too_small_is_not_silent(given, monkeypatch):
    monkeypatch.setattr(Ahead, "span", lambda self, count, steps: 5)
    sampling = SamplingConfig(top_p=0.8)
    (_, terms), _ = with_gradients(given, chunk=24, sampling=sampling)
    assert np.isnan(np.asarray(terms.l1)).any() and np.isnan(np.asarray(terms.overlap)).any()
