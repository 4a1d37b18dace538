"""Tests of the terms of the two laws: against dense float64, with all gradients, and what they may hold in memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from draftco_jax.losses.chunked import map_tokens
from draftco_jax.losses.law_pair import LawPairTerms, law_pair_terms
from draftco_jax.numerics.sampling import SamplingConfig, law

N, F, D, V, W = 12, 5, 6, 37, 23
DIFFERENTIABLE = ("soft_cross_entropy", "hard_cross_entropy", "l1", "overlap")
LABELS = np.array([0, 36, 7, 7, 20, 35, 1, 2, 3, 30, 31, 12], np.int32)


@pytest.fixture(scope="module")
def arrays():
    """Features, teacher states and heads; a shuffled map of 23 of the 37 ids."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "features": normal(N, F),
        "full": normal(F, V),
        "cut": normal(F, W),
        "hidden": normal(N, D),
        "head": normal(D, V),
        "kept": rng.permutation(V)[:W].astype(np.int32),
    }


def case(arrays, cut):
    """(features, kernel, hidden, head), kept."""
    kernel, kept = (arrays["cut"], jnp.asarray(arrays["kept"])) if cut else (arrays["full"], None)
    return tuple(jnp.asarray(a) for a in (arrays["features"], kernel, arrays["hidden"], arrays["head"])), kept


def dense_f64(args, kept, temperature):
    """Every term by its definition, float64."""
    features, kernel, hidden, head = (np.asarray(a, np.float64) for a in args)
    ids = np.arange(V) if kept is None else np.asarray(kept)
    z, teacher = features @ kernel / temperature, hidden @ head / temperature
    log_q, p = log_softmax(z, axis=-1), softmax(teacher, axis=-1)
    q = np.zeros_like(p)
    q[:, ids] = np.exp(log_q)
    full_log_q = np.full_like(p, -np.inf)
    full_log_q[:, ids] = log_q
    label_kept = np.isin(LABELS, ids)
    with np.errstate(invalid="ignore"):
        hard = np.where(label_kept, -full_log_q[np.arange(N), LABELS], 0.0)
    return LawPairTerms(
        soft_cross_entropy=-(softmax(teacher[:, ids], axis=-1) * log_q).sum(-1),
        hard_cross_entropy=hard,
        l1=np.abs(p - q).sum(-1),
        overlap=np.minimum(p, q).sum(-1),
        mode_kept=np.isin(p.argmax(-1), ids),
        label_kept=label_kept,
        label_is_mode=q.argmax(-1) == LABELS,
    )


def dense_jax(features, kernel, hidden, head, kept):
    """The differentiable terms by their definitions, for jax.grad."""
    ids = jnp.arange(V) if kept is None else kept
    log_q, teacher = jax.nn.log_softmax(features @ kernel), hidden @ head
    p = jax.nn.softmax(teacher)
    spread = jnp.zeros((V, ids.shape[0]), jnp.float32).at[ids, jnp.arange(ids.shape[0])].set(1.0)
    q = jnp.exp(log_q) @ spread.T
    label_log_q = jnp.sum((spread[LABELS]) * log_q, axis=-1)
    soft = -jnp.sum(jax.nn.softmax(teacher[:, ids]) * log_q, axis=-1)
    return soft, -label_log_q, jnp.sum(jnp.abs(p - q), axis=-1), jnp.sum(jnp.minimum(p, q), axis=-1)


def call(args, kept, *, tile, sampling=None):
    return law_pair_terms(*args, jnp.asarray(LABELS), kept=kept, sampling=sampling or SamplingConfig(), tile=tile)


# One tile with and without room, tiles that leave a last one of 2 or 7 fresh columns.
@pytest.mark.parametrize(
    ("cut", "tile", "temperature"), [(False, 64, 1.0), (False, 5, 0.7), (True, 37, 1.6), (True, 8, 1.0)]
)
def test_every_term_is_its_definition(arrays, cut, tile, temperature):
    args, kept = case(arrays, cut)
    found = call(args, kept, tile=tile, sampling=SamplingConfig(temperature=temperature))
    expected = dense_f64(args, kept, temperature)
    assert found.unfiltered_overlap is None
    for name in LawPairTerms._fields[:-1]:
        # float32 sums of tens of terms near 1
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=2e-6, err_msg=name)
    if cut:
        assert 0 < expected.mode_kept.sum() < N and 0 < expected.label_kept.sum() < N


@pytest.fixture(scope="module", params=[False, True], ids=["full", "cut"])
def jacobians(request, arrays):
    """Per-token gradients of each term by the written-out rule (tiled) and by jax.grad of the dense definitions."""
    args, kept = case(arrays, request.param)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=N), jnp.float32)

    def tiled(*args):
        terms = call(args, kept, tile=8)
        return jnp.stack([jnp.sum(weights * getattr(terms, name)) for name in DIFFERENTIABLE])

    def dense(*args):
        return jnp.stack([jnp.sum(weights * term) for term in dense_jax(*args, kept)])

    return jax.jit(jax.jacrev(tiled, argnums=(0, 1, 2, 3)))(*args), jax.jit(jax.jacrev(dense, argnums=(0, 1)))(*args)


@pytest.mark.parametrize("term", range(4), ids=DIFFERENTIABLE)
def test_gradients_are_those_of_the_definitions(jacobians, term):
    found, expected = jacobians
    for one, other in zip(found[:2], expected, strict=True):
        assert np.abs(other[term]).max() > 0.01
        np.testing.assert_allclose(
            one[term], other[term], rtol=0, atol=2e-6
        )  # float32, sums of 12 x 37 numbers below 5


def test_bug_case_b07_draft_the_teacher_gets_exactly_no_gradient(jacobians):
    for gradient in jacobians[0][2:]:
        assert (np.asarray(gradient) == 0).all()


def test_half_the_temperature_is_twice_both_states(arrays):
    args, kept = case(arrays, True)

    def cooled(x):
        return jnp.sum(sum(call((x, *args[1:]), kept, tile=8, sampling=SamplingConfig(temperature=0.5))[:4]))

    def doubled(x):
        return jnp.sum(sum(call((2.0 * x, args[1], 2.0 * args[2], args[3]), kept, tile=8)[:4]))

    np.testing.assert_allclose(jax.grad(cooled)(args[0]), jax.grad(doubled)(args[0]), rtol=0, atol=2e-6)


def test_bug_case_b03_draft_equal_to_the_teacher_under_a_shuffled_map(arrays):
    # The teacher's states see kept ids only: the last coordinate pushes the others to exp(-60).
    head = np.concatenate([arrays["head"], np.full((1, V), -60.0, np.float32)])
    head[-1, arrays["kept"]] = 0.0
    hidden = np.concatenate([arrays["hidden"], np.ones((N, 1), np.float32)], axis=1)
    kernel = head[:, arrays["kept"]]
    args = tuple(jnp.asarray(a) for a in (hidden, kernel, hidden, head))
    terms = call(args, jnp.asarray(arrays["kept"]), tile=8)
    p = softmax(hidden.astype(np.float64) @ kernel, axis=-1)
    np.testing.assert_allclose(terms.soft_cross_entropy, -(p * np.log(p)).sum(-1), rtol=2e-6)
    np.testing.assert_allclose(terms.overlap, np.ones(N), rtol=2e-6)
    np.testing.assert_allclose(terms.l1, np.zeros(N), atol=2e-6)
    assert terms.mode_kept.sum() == N


def test_bug_case_b09_draft_without_a_teacher_only_the_label_counts(arrays):
    args, kept = case(arrays, True)
    alone = lambda x, k: call((x, k, None, None), kept, tile=8)  # noqa: E731
    terms, full = alone(*args[:2]), call(args, kept, tile=8)
    for name in ("hard_cross_entropy", "label_kept", "label_is_mode"):
        np.testing.assert_array_equal(getattr(terms, name), getattr(full, name))
    for name in ("soft_cross_entropy", "l1", "overlap", "mode_kept"):
        assert (np.asarray(getattr(terms, name)) == 0).all()
    found = jax.grad(lambda x, k: jnp.sum(alone(x, k).hard_cross_entropy), argnums=(0, 1))(*args[:2])
    expected = jax.grad(lambda x, k: jnp.sum(call((x, k, *args[2:]), kept, tile=8).hard_cross_entropy), argnums=(0, 1))(
        *args[:2]
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), found, expected)


@pytest.mark.parametrize("cut", [False, True], ids=["full", "cut"])
def test_overlap_under_filters_is_that_of_the_filtered_laws(arrays, cut):
    args, kept = case(arrays, cut)
    sampling = SamplingConfig(temperature=0.8, top_k=6, top_p=0.7)
    found, plain = call(args, kept, tile=8, sampling=sampling), dense_f64(args, kept, 0.8)
    p = np.asarray(law(args[2] @ args[3], sampling))
    q = np.zeros_like(p)
    q[:, np.arange(V) if kept is None else np.asarray(kept)] = law(args[0] @ args[1], sampling)
    np.testing.assert_allclose(found.overlap, np.minimum(p, q).sum(-1), rtol=2e-6, atol=2e-6)
    assert np.abs(np.minimum(p, q).sum(-1) - plain.overlap).max() > 0.1
    np.testing.assert_allclose(found.unfiltered_overlap, plain.overlap, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(found.l1, plain.l1, rtol=2e-6, atol=2e-6)
    total = lambda x: jnp.sum(call((x, *args[1:]), kept, tile=8, sampling=sampling).overlap)  # noqa: E731
    assert (np.asarray(jax.grad(total)(args[0])) == 0).all()


def test_bug_case_b10_draft_hidden_states_times_100_in_bfloat16_stay_finite(arrays):
    args, kept = case(arrays, True)
    features, kernel, hidden, head = (a.astype(jnp.bfloat16) for a in args)

    def total(x, k):
        terms = call((x, k, 100.0 * hidden, head), kept, tile=8)
        return jnp.sum(sum(terms[:4])), terms

    (_, terms), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(100.0 * features, kernel)
    for value in jax.tree.leaves((terms, gradients)):
        assert np.isfinite(np.asarray(value, np.float32)).all()
    assert all(term.dtype == jnp.float32 for term in terms[:-1])
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 2
    # The logits are in the hundreds: a wrong draft must say so, not be cut off at some bound.
    assert terms.hard_cross_entropy.max() > 200


def test_unlearnable_labels_have_no_value_and_no_gradient(arrays):
    args, kept = case(arrays, True)
    labels = jnp.full(N, -1, jnp.int32)
    fn = lambda x: law_pair_terms(x, *args[1:], labels, kept=kept, sampling=SamplingConfig(), tile=8)  # noqa: E731
    terms = fn(args[0])
    for value in (terms.hard_cross_entropy, terms.label_kept, terms.label_is_mode):
        assert (np.asarray(value) == 0).all()
    assert (np.asarray(jax.grad(lambda x: jnp.sum(fn(x).hard_cross_entropy))(args[0])) == 0).all()


def test_bug_case_b20_draft_a_label_outside_the_draft_vocabulary_counts_as_a_miss():
    # Identity heads: the state is the logits. Draft ids 0, 1, 2 of 4; the last token's mode and label is id 3.
    hidden = 30.0 * jnp.eye(4, dtype=jnp.float32)
    labels = jnp.arange(4, dtype=jnp.int32)
    head, kept = jnp.eye(4, dtype=jnp.float32), jnp.arange(3, dtype=jnp.int32)
    terms = law_pair_terms(hidden, head[:, :3], hidden, head, labels, kept=kept, sampling=SamplingConfig(), tile=2)
    np.testing.assert_array_equal(terms.mode_kept, [1, 1, 1, 0])
    np.testing.assert_array_equal(terms.label_kept, [1, 1, 1, 0])
    assert jnp.mean(terms.label_is_mode) == 0.75
    np.testing.assert_allclose(jnp.mean(terms.overlap), 0.75, atol=1e-6)
    # The three that are sayable and right cost nothing of any kind; the fourth costs its whole mass.
    np.testing.assert_allclose(terms.l1, [0, 0, 0, 2], atol=1e-6)


BIG_N, BIG_V, BIG_TILE = 64, 4096, 256


def big_loss(features, kernel, hidden, head, labels, *, tile, chunk):
    fn = lambda x, h, y: law_pair_terms(x, kernel, h, head, y, kept=None, sampling=SamplingConfig(), tile=tile)  # noqa: E731
    terms = map_tokens(fn, (features, hidden, labels), chunk_tokens=chunk)
    return jnp.sum(sum(terms[:4])), terms


@pytest.fixture(scope="module")
def big():
    rng = np.random.default_rng(2)
    shapes = ((1, BIG_N, 8), (8, BIG_V), (1, BIG_N, 8), (8, BIG_V))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return *arrays, jnp.asarray(rng.integers(0, BIG_V, (1, BIG_N)), jnp.int32)


def test_bug_case_b17_draft_tiles_equal_dense_and_hold_less(big):
    results, temporary = [], []
    for tile in (BIG_V, BIG_TILE):
        fn = jax.value_and_grad(partial(big_loss, tile=tile, chunk=BIG_N), argnums=(0, 1), has_aux=True)
        compiled = jax.jit(fn).lower(*big).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        results.append(jax.tree.leaves(compiled(*big)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)  # sums of 4096 float32 in another order
    logits = BIG_N * BIG_V * 4
    assert temporary[0] > logits
    assert temporary[1] < logits / 2


@pytest.mark.parametrize("chunk", [None, BIG_N, 16])
def test_bug_case_b18_draft_no_residual_holds_the_vocabulary_of_every_token(big, chunk):
    """Without chunks (None) it is the written-out rule alone that keeps logits out."""

    def alone(features, kernel):
        features, hidden, labels = features[0], big[2][0], big[4][0]
        sampling = SamplingConfig()
        terms = law_pair_terms(features, kernel, hidden, big[3], labels, kept=None, sampling=sampling, tile=BIG_TILE)
        return jnp.sum(sum(terms[:4]))

    chunked = lambda x, k: big_loss(x, k, *big[2:], tile=BIG_TILE, chunk=chunk)[0]  # noqa: E731
    _, vjp = jax.vjp(alone if chunk is None else chunked, *big[:2])
    sizes = [leaf.size for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "size")]
    assert sizes and max(sizes) == 8 * BIG_V  # the heads themselves; a chunk's logits are 16 * 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": SamplingConfig(temperature=0.0)}, "temperature=0 must be > 0"),
        ({"tile": 0}, "tile=0 must be >= 1"),
        ({"teacher_kernel": None}, "must be given together"),
        ({"draft_kernel": jnp.zeros((F, W), jnp.float32)}, "without a map; pass kept"),
    ],
)
def test_what_is_refused(arrays, change, message):
    args, _ = case(arrays, False)
    given = dict(zip(("draft_features", "draft_kernel", "teacher_hidden", "teacher_kernel"), args, strict=True))
    given |= {"labels": jnp.asarray(LABELS), "kept": None, "sampling": SamplingConfig(), "tile": 8} | change
    with pytest.raises(ValueError, match=message):
        law_pair_terms(**given)
