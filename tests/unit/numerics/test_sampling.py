"""Laws over tokens and draws from them, against slow float64 references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.numerics.sampling import (
    ACCEPT,
    COMMIT,
    PROPOSE,
    SamplingConfig,
    draw,
    law,
    log_law,
    prefix_sum,
    request_uniforms,
    support,
)

LAST = 1 - 2**-23  # the largest value of jax.random.uniform in float32
DRAW = jax.jit(draw)


def reference_support(logits: np.ndarray, top_k: int, top_p: float, min_p: float = 0.0) -> set[int]:
    """Best first, ties towards the smaller id; until k ids or mass p (of what top-k left) are reached, or the ratio."""
    best_first = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    weights = np.exp(np.float64(logits)[best_first] - logits.max())
    weights /= weights.sum()
    kept, mass = set(), 0.0
    for token, weight in zip(best_first, weights, strict=True):
        if mass >= top_p or weight < min_p * weights[0]:
            break
        kept.add(token)
        mass += weight
    return kept


def reference_law(logits: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    if sampling.greedy:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = np.float64(logits) / sampling.temperature
    kept = reference_support(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    weights = np.where(np.isin(np.arange(len(logits)), list(kept)), np.exp(scaled - scaled.max()), 0)
    return weights / weights.sum()


SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=0.0),
    SamplingConfig(top_k=3),
    SamplingConfig(top_k=100),
    SamplingConfig(top_p=0.8),
    SamplingConfig(temperature=1.7, top_k=5, top_p=0.6),
    SamplingConfig(temperature=0.7, min_p=0.05),
    SamplingConfig(temperature=1.7, top_k=6, top_p=0.9, min_p=0.2),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_law_equals_a_slow_reference(sampling):
    logits = np.random.default_rng(0).normal(0, 2, (4, 25, 9)).astype(np.float32)
    expected = np.apply_along_axis(reference_law, -1, logits, sampling)
    laws = np.asarray(law(jnp.asarray(logits), sampling))
    np.testing.assert_array_equal(laws > 0, expected > 0)
    np.testing.assert_allclose(laws, expected, atol=1e-6)
    np.testing.assert_allclose(np.exp(log_law(jnp.asarray(logits), sampling)), expected, atol=1e-6)


@pytest.mark.parametrize("top_k", [0, 1, 2, 4])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.26, 1e-6, 1e-40])
def test_support_equals_a_slow_reference_with_ties(top_k, top_p):
    rng = np.random.default_rng(1)
    # Few distinct values, so most rows hold ties; log 2 apart, so that masses meet no threshold but by design.
    logits = np.float32(rng.integers(-2, 2, (200, 6)) * np.log(2.0))
    kept = np.asarray(support(jnp.asarray(logits), SamplingConfig(top_k=top_k, top_p=top_p)))
    expected = np.array([np.isin(np.arange(6), list(reference_support(row, top_k, top_p))) for row in logits])
    np.testing.assert_array_equal(kept, expected)
    assert kept.any(axis=1).all()


def test_ties_are_broken_towards_the_smaller_id():
    flat = jnp.zeros((1, 5))
    np.testing.assert_array_equal(support(flat, SamplingConfig(top_k=2))[0], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(support(flat, SamplingConfig(top_p=0.5))[0], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(law(flat, SamplingConfig(temperature=0.0))[0], [1, 0, 0, 0, 0])


def test_bug_case_b26_top_k_of_one_is_the_greedy_law():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(50, 7)), jnp.float32)
    np.testing.assert_array_equal(
        law(logits, SamplingConfig(temperature=0.1, top_k=1)), law(logits, SamplingConfig(temperature=0.0))
    )


def test_top_p_is_measured_after_top_k():
    # Of (.4, .3, .2, .1), top-k 2 leaves (4/7, 3/7), of which 4/7 is not yet 0.6; of the whole law .4 + .3 is.
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))
    np.testing.assert_allclose(law(logits, SamplingConfig(top_k=2, top_p=0.6))[0], [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(logits, SamplingConfig(top_k=2, top_p=0.55))[0], [1, 0, 0, 0], atol=1e-6)


def test_min_p_is_a_share_of_the_largest_tempered_probability():
    # Tempered by 2, (.64, .16, .04, .16) is as (.8, .4, .2, .4): the ratios are 1, 1/2, 1/4, 1/2.
    logits = jnp.log(jnp.asarray([[0.64, 0.16, 0.04, 0.16]]))
    found = law(logits, SamplingConfig(temperature=2.0, min_p=0.4))[0]
    np.testing.assert_allclose(found, [0.5, 0.25, 0, 0.25], atol=1e-6)
    found = law(logits, SamplingConfig(temperature=1.0, min_p=0.4))[0]
    np.testing.assert_allclose(found, [1, 0, 0, 0], atol=1e-6)
    # Top-k takes one of the two that tie, and what it leaves is measured by the same largest probability.
    found = law(logits, SamplingConfig(temperature=2.0, top_k=2, min_p=0.4))[0]
    np.testing.assert_allclose(found, [2 / 3, 1 / 3, 0, 0], atol=1e-6)


def test_min_p_alone_sorts_nothing():
    logits = jnp.zeros((2, 5))
    traced = {p: str(jax.make_jaxpr(lambda x, p=p: log_law(x, p))(logits)) for p in SAMPLINGS if p.filtered}
    assert {p: "sort" in text for p, text in traced.items()} == {p: p.top_k > 0 or p.top_p < 1 for p in traced}
    assert all(text.count(" sort[") <= 1 for text in traced.values())


def test_a_kept_token_stays_in_the_support_and_no_other_comes_in():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(50, 7)), jnp.float32)
    sampling = SamplingConfig(top_k=2, top_p=0.5)
    keep = jnp.asarray(np.random.default_rng(4).integers(0, 7, 50), jnp.int32)
    expected = np.array(support(logits, sampling))
    assert not expected[np.arange(50), keep].all()
    expected[np.arange(50), keep] = True
    np.testing.assert_array_equal(support(logits, sampling, keep), expected)


def test_greedy_log_law_is_one_hot():
    logits = jnp.asarray([[0.1, 3.0, -2.0], [5.0, 5.0, 4.0]])
    result = np.asarray(log_law(logits, SamplingConfig(temperature=0.0)))
    np.testing.assert_array_equal(result, [[-np.inf, 0, -np.inf], [0, -np.inf, -np.inf]])
    assert result.dtype == np.float32


def test_laws_are_float32_whatever_comes_in():
    logits = jnp.asarray([[2.0, 1.5, 1.0, 0.5]], jnp.bfloat16)
    for sampling in SAMPLINGS:
        assert law(logits, sampling).dtype == log_law(logits, sampling).dtype == jnp.float32
    # A public report (B24): softmax of these in bfloat16 gives .4570 for the first token, the law says .4551.
    np.testing.assert_allclose(law(logits, SamplingConfig())[0, 0], 0.4551, atol=5e-5)


def test_bug_case_b24_law_and_log_law_name_one_law_to_rounding():
    # The draft's q is a law, the target's p the exp of a log law: alike to a few ulp.
    logits = jnp.asarray(np.random.default_rng(5).normal(0, 3, (200, 33)), jnp.float32)
    for sampling in SAMPLINGS:
        np.testing.assert_allclose(law(logits, sampling), jnp.exp(log_law(logits, sampling)), atol=2e-7, rtol=2e-6)


@pytest.mark.parametrize(
    "field, value",
    [("temperature", -0.1), ("temperature", float("inf")), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0),
     ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.0), ("min_p", float("nan"))],
)  # fmt: skip
def test_settings_that_name_no_law_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        SamplingConfig(**{field: value})


def stressful_weights(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows with many zeros, at either end too, and weights of very different size."""
    weights = np.exp(rng.normal(0, 6, (rows, vocab)))
    weights[rng.random((rows, vocab)) < rng.choice([0.1, 0.5, 0.95], (rows, 1))] = 0
    weights[np.arange(rows) % 2 == 0, -(vocab // 3) :] = 0
    empty = weights.sum(axis=1) == 0
    weights[empty, rng.integers(0, vocab, empty.sum())] = 1
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("vocab", [2, 7, 255, 257, 3000])
def test_an_id_of_weight_zero_is_never_drawn(vocab):
    rng = np.random.default_rng(vocab)
    weights = stressful_weights(rng, 2000, vocab)
    uniforms = np.concatenate([[0, 2**-23, 2**-24, LAST, 1 - 2**-24, 1 - 2**-22, 0.5], rng.random(5)])
    for uniform in np.float32(uniforms):
        ids = np.asarray(DRAW(jnp.asarray(weights), jnp.full(2000, uniform)))
        assert (np.take_along_axis(weights, ids[:, None], axis=1) > 0).all(), f"u={uniform}"
        assert ids.dtype == np.int32


def test_the_ends_of_the_uniform_draw_the_first_and_the_last_id_with_weight():
    weights = jnp.asarray([[0, 0.25, 0.5, 0.25, 0]])
    assert draw(weights, jnp.zeros(1)) == 1
    assert draw(weights, jnp.full(1, LAST)) == 3


@pytest.mark.parametrize("vocab", [5, 300])
def test_the_law_of_a_draw_is_its_weights(vocab):
    # The share of a grid of uniforms that draws each id. A cell's ends are sums of float32 weights, and the grid adds
    # at most one point at each end.
    points = 2**18 if vocab < 256 else 2**14
    rng = np.random.default_rng(vocab)
    weights = np.float32(rng.dirichlet(np.ones(vocab)))
    weights[rng.integers(0, vocab, vocab // 4)] = 0
    grid = (jnp.arange(points, dtype=jnp.float32) + 0.5) / points
    ids = np.asarray(DRAW(jnp.broadcast_to(jnp.asarray(weights), (points, vocab)), grid))
    shares = np.bincount(ids, minlength=vocab) / points
    assert np.abs(shares - weights / weights.sum(dtype=np.float64)).max() < 2 / points


def test_weights_need_no_normalisation_and_ids_grow_with_the_uniform():
    rng = np.random.default_rng(6)
    weights = np.float32(rng.dirichlet(np.ones(6), 50))
    uniforms = np.sort(np.float32(rng.random(50)))
    one = DRAW(jnp.broadcast_to(jnp.asarray(weights[0]), (50, 6)), jnp.asarray(uniforms))
    assert (np.diff(one) >= 0).all()
    np.testing.assert_array_equal(
        DRAW(jnp.asarray(weights), jnp.asarray(uniforms)), DRAW(jnp.asarray(weights * 4), jnp.asarray(uniforms))
    )


@pytest.mark.parametrize("vocab", [1, 8, 256, 257, 2000])
def test_prefix_sums_short_and_long(vocab):
    x = np.random.default_rng(vocab).random((3, 2, vocab)).astype(np.float32)
    np.testing.assert_allclose(prefix_sum(jnp.asarray(x)), np.cumsum(np.float64(x), axis=-1), rtol=1e-5)


@pytest.fixture(scope="module")
def uniforms():
    return jax.jit(request_uniforms, static_argnums=1)


def test_request_uniforms_do_not_depend_on_capacity_or_batch(uniforms):
    keys = jax.random.split(jax.random.key(0), 6)
    table = np.asarray(uniforms(keys, 20))
    assert table.shape == (6, 20, 3) and table.dtype == np.float32
    for length in (1, 19):
        np.testing.assert_array_equal(uniforms(keys, length), table[:, :length])
    np.testing.assert_array_equal(uniforms(keys[2:3], 20), table[2:3])
    order = np.array([5, 0, 3])
    np.testing.assert_array_equal(uniforms(keys[order], 20), table[order])


def test_request_uniforms_are_uniform_and_distinct_over_requests_positions_and_streams(uniforms):
    table = np.asarray(uniforms(jax.random.split(jax.random.key(1), 500), 40))
    assert table.min() >= 0 and table.max() < 1
    assert len(np.unique(table)) > 0.99 * table.size  # 60 000 draws from 2^23 values: about 200 repeats
    # The mean of n uniforms is within 5 standard deviations, 5 / sqrt(12 n), with probability 1 - 6e-7.
    assert abs(table.mean() - 0.5) < 5 / np.sqrt(12 * table.size)
    streams = table.reshape(-1, 3)
    correlations = np.corrcoef(streams.T)[[PROPOSE, PROPOSE, ACCEPT], [ACCEPT, COMMIT, COMMIT]]
    assert np.abs(correlations).max() < 5 / np.sqrt(len(streams))
