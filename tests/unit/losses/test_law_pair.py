"""Tests of the terms of the two laws: against dense float64, with all gradients, and what they may hold in memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from draftco_jax.losses.law_pair import LawPairTerms, Teacher, law_pair_terms
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


def call(args, kept, *, tile, sampling=None, chunk=N, labels=LABELS, **more):
    """Terms where each label has a state of its own, the one at its place."""
    features, kernel, hidden, head = args
    teacher = None if hidden is None else Teacher(hidden, head, jnp.arange(len(labels), dtype=jnp.int32))
    rule = {"kept": kept, "sampling": sampling or SamplingConfig(), "tile": tile, "chunk_tokens": chunk}
    return law_pair_terms(features, kernel, teacher, jnp.asarray(labels), **rule, **more)


# One tile with and without room, tiles that leave a last one of 2 or 7 fresh columns; chunks that leave 2 of 12 labels.
@pytest.mark.parametrize(
    ("cut", "tile", "temperature", "chunk"),
    [(False, 64, 1.0, 64), (False, 5, 0.7, 5), (True, 37, 1.6, 12), (True, 8, 1.0, 5)],
)
def test_every_term_is_its_definition(arrays, cut, tile, temperature, chunk):
    args, kept = case(arrays, cut)
    rule = {"tile": tile, "sampling": SamplingConfig(temperature=temperature), "chunk": chunk}
    found = jax.jit(lambda args: call(args, kept, **rule))(args)
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
        terms = call(args, kept, tile=8, chunk=5)
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

    found, expected = jax.jit(lambda x: (jax.grad(cooled)(x), jax.grad(doubled)(x)))(args[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


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
    fn = lambda x: call((x, *args[1:]), kept, tile=8, labels=np.full(N, -1, np.int32))  # noqa: E731
    terms = fn(args[0])
    for value in (terms.hard_cross_entropy, terms.label_kept, terms.label_is_mode):
        assert (np.asarray(value) == 0).all()
    assert (np.asarray(jax.grad(lambda x: jnp.sum(fn(x).hard_cross_entropy))(args[0])) == 0).all()


def test_bug_case_b20_draft_a_label_outside_the_draft_vocabulary_counts_as_a_miss():
    # Identity heads: the state is the logits. Draft ids 0, 1, 2 of 4; the last token's mode and label is id 3.
    hidden = 30.0 * jnp.eye(4, dtype=jnp.float32)
    labels = np.arange(4, dtype=np.int32)
    head, kept = jnp.eye(4, dtype=jnp.float32), jnp.arange(3, dtype=jnp.int32)
    terms = call((hidden, head[:, :3], hidden, head), kept, tile=2, labels=labels)
    np.testing.assert_array_equal(terms.mode_kept, [1, 1, 1, 0])
    np.testing.assert_array_equal(terms.label_kept, [1, 1, 1, 0])
    assert jnp.mean(terms.label_is_mode) == 0.75
    np.testing.assert_allclose(jnp.mean(terms.overlap), 0.75, atol=1e-6)
    # The three that are sayable and right cost nothing of any kind; the fourth costs its whole mass.
    np.testing.assert_allclose(terms.l1, [0, 0, 0, 2], atol=1e-6)


BIG_N, BIG_V, BIG_TILE = 64, 4096, 256


def big_loss(features, kernel, hidden, head, labels, *, tile, chunk):
    terms = call((features, kernel, hidden, head), None, tile=tile, chunk=chunk, labels=labels)
    return jnp.sum(sum(terms[:4])), terms


@pytest.fixture(scope="module")
def big():
    rng = np.random.default_rng(2)
    shapes = ((BIG_N, 8), (8, BIG_V), (BIG_N, 8), (8, BIG_V))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return *arrays, jnp.asarray(rng.integers(0, BIG_V, BIG_N), jnp.int32)


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


@pytest.mark.parametrize("chunk", [BIG_N, 16])
def test_bug_case_b18_draft_residuals_are_the_arguments_and_numbers(big, chunk):
    """No logits, no copy of a head for each chunk, no state of the policy for each label."""
    loss = lambda x, k: big_loss(x, k, *big[2:], tile=BIG_TILE, chunk=chunk)[0]  # noqa: E731
    _, vjp = jax.vjp(loss, *big[:2])
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "size"))
    assert sizes[-4:] == [8 * BIG_N, 8 * BIG_N, 8 * BIG_V, 8 * BIG_V]  # features, the policy's states, both heads
    assert all(size <= BIG_N for size in sizes[:-4])


@pytest.fixture(scope="module")
def shared():
    """Three labels for each of 12 states, in any order, so that the law is found once a state; and the same by hand."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    at = rng.permutation(np.repeat(np.arange(N, dtype=np.int32), 3))
    return {
        "features": normal(3 * N, F),
        "kernel": normal(F, W),
        "teacher": Teacher(normal(N, D), normal(D, V), jnp.asarray(at)),
        "labels": jnp.asarray(rng.integers(0, V, 3 * N), jnp.int32),
        "kept": jnp.asarray(rng.permutation(V)[:W], jnp.int32),
    }


def spread(shared, *, each, **changes):
    """Terms and gradients; each: with a state for each label, whose law is then found for each."""
    given = shared | changes
    teacher = given["teacher"]
    if each:
        teacher = Teacher(teacher.states[teacher.at], teacher.head, jnp.arange(3 * N, dtype=jnp.int32))
    weights = jnp.asarray(np.random.default_rng(4).normal(size=(4, 3 * N)), jnp.float32)

    def loss(features, kernel):
        rule = {"kept": given["kept"], "sampling": SamplingConfig(temperature=0.7), "tile": 8, "chunk_tokens": 7}
        terms = law_pair_terms(features, kernel, teacher, given["labels"], **rule)
        return jnp.sum(weights * jnp.stack(terms[:4])), terms

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(given["features"], given["kernel"])


def test_labels_that_share_a_state_have_the_law_of_it(shared):
    found, expected = spread(shared, each=False), spread(shared, each=True)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)  # float32: the sums of a state in another chunk


@pytest.mark.parametrize("frozen", [2, F])
def test_frozen_rows_of_a_head_get_no_gradient_and_the_others_theirs(arrays, frozen):
    args, kept = case(arrays, True)
    gradients = [
        jax.grad(lambda k, r=rows: jnp.sum(call((args[0], k, *args[2:]), kept, tile=8, frozen_rows=r).l1))(args[1])
        for rows in (0, frozen)
    ]
    assert (np.asarray(gradients[1][:frozen]) == 0).all() and np.abs(gradients[0][:frozen]).max() > 0.01
    np.testing.assert_allclose(gradients[1][frozen:], gradients[0][frozen:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [8, V])
def test_a_policy_that_hardly_ever_says_a_draft_id_still_has_a_law_of_them(arrays, tile):
    """Draft ids lie 150 nats below the others, whose sum would swallow theirs."""
    args, kept = case(arrays, True)
    low = jnp.zeros((1, V), jnp.float32).at[0, kept].set(-150.0)
    hidden = jnp.concatenate([args[2], jnp.ones((N, 1), jnp.float32)], axis=1)
    terms = call((*args[:2], hidden, jnp.concatenate([args[3], low])), kept, tile=tile)
    expected = dense_f64(args, kept, 1.0)  # the law among draft ids is the same
    np.testing.assert_allclose(terms.soft_cross_entropy, expected.soft_cross_entropy, rtol=2e-5)  # logits of 150
    np.testing.assert_allclose(terms.l1, np.full(N, 2.0), rtol=2e-6)
    assert (np.asarray(terms.mode_kept) == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": SamplingConfig(temperature=0.0)}, "temperature=0 must be > 0"),
        ({"tile": 0}, "tile=0 must be >= 1"),
        ({"chunk_tokens": 0}, "chunk_tokens=0 must be >= 1"),
        ({"draft_kernel": jnp.zeros((F, W), jnp.float32)}, "without a map; pass kept"),
    ],
)
def test_what_is_refused(arrays, change, message):
    (features, kernel, hidden, head), _ = case(arrays, False)
    teacher = Teacher(hidden, head, jnp.arange(N, dtype=jnp.int32))
    given = {"draft_features": features, "draft_kernel": kernel, "teacher": teacher, "labels": jnp.asarray(LABELS)}
    given |= {"kept": None, "sampling": SamplingConfig(), "tile": 8, "chunk_tokens": N} | change
    with pytest.raises(ValueError, match=message):
        law_pair_terms(**given)
