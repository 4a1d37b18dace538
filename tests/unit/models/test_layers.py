"""Tests of the shared layers, attention and the cache against plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.models.attention import attend, packed_causal_mask
from draftco_jax.models.functional import abstract_params, graph_of, initialise, split
from draftco_jax.models.kv_cache import empty_cache, visible_slots, write
from draftco_jax.models.layers import GatedMLP, LinearGroup, RMSNorm, parameter, rotary_angles, rotate


def test_attention_heads_read_their_own_group():
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, 2, 5, 8)).astype(np.float32)
    mask = rng.random((2, 3, 5)) < 0.6
    mask[..., 0] = True
    out = jax.jit(attend)(queries, keys, values, mask)
    for b, t, n in np.ndindex(2, 3, 4):
        seen = mask[b, t]
        scores = keys[b, n // 2, seen].astype(np.float64) @ queries[b, t, n] / np.sqrt(8)
        weights = np.exp(scores - scores.max())
        expected = weights / weights.sum() @ values[b, n // 2, seen]
        np.testing.assert_allclose(out[b, t, n], expected, rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_stays_finite_in_value_and_gradient():
    def total(x, mask):
        heads_first = jnp.swapaxes(x, 1, 2)
        return jnp.sum(attend(x, heads_first, heads_first, mask) ** 2)

    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 2, 4)), jnp.bfloat16)
    value, gradient = jax.jit(jax.value_and_grad(total))(x, jnp.zeros((1, 3, 3), bool))
    assert np.isfinite(float(value)) and np.isfinite(np.asarray(gradient, np.float32)).all()


def test_packed_mask_is_causal_inside_documents():
    mask = packed_causal_mask(jnp.array([[1, 1, 2, 2, 0]]))[0].astype(int)
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("start", [[1, 4], [3]])
def test_cache_rows_are_written_at_their_own_places_and_nowhere_else(start):
    rng = np.random.default_rng(2)
    layer = empty_cache(1, len(start), 3, 6, 4, 1e4, jnp.dtype(jnp.float32)).layers[0]
    keys, values = (jnp.asarray(a, jnp.float32) for a in rng.normal(size=(2, len(start), 2, 3, 4)))
    written = jax.jit(write)(layer, keys, values, jnp.array(start, jnp.int32))
    for buffer, rows in ((written.keys, keys), (written.values, values)):
        expected = np.zeros((len(start), 3, 6, 4), np.float32)
        for row, at in enumerate(start):
            expected[row, :, at : at + 2] = np.swapaxes(rows[row], 0, 1)
        np.testing.assert_array_equal(buffer, expected)


def test_a_query_sees_the_slots_up_to_its_own():
    seen = visible_slots(5, jnp.array([0, 2], jnp.int32), 2).sum(axis=-1)
    np.testing.assert_array_equal(seen, [[1, 2], [3, 4]])


def test_norm_statistics_are_float32_also_for_bfloat16_input():
    x = np.random.default_rng(3).normal(size=(4, 300)) * 100
    low = jnp.asarray(x, jnp.bfloat16)
    norm = RMSNorm(300, eps=1e-6, rngs=nnx.Rngs(0))
    exact = np.asarray(low, np.float64)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-6)
    found = norm(low)
    assert found.dtype == jnp.bfloat16
    # One rounding to 8 bits; statistics in bfloat16 would be off by a per cent or more after 300 terms.
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8)


def test_cached_angles_are_those_of_the_positions():
    cache = empty_cache(1, 2, 1, 9, 8, 1e4, jnp.dtype(jnp.float32))
    start = jnp.array([0, 5], jnp.int32)
    expected = rotary_angles(start[:, None] + jnp.arange(3)[None], 8, 1e4)
    for found, angle in zip(cache.angles_at(start, 3), expected, strict=True):
        np.testing.assert_allclose(found, angle, rtol=1e-6, atol=1e-7)


def test_rotated_products_depend_on_the_distance_only():
    q, k = (jnp.asarray(a, jnp.float32) for a in np.random.default_rng(4).normal(size=(2, 1, 1, 1, 8)))

    @jax.jit
    def product(at_q, at_k):
        turn = lambda x, p: rotate(x, rotary_angles(p[None, None], 8, 1e4))  # noqa: E731
        return jnp.sum(turn(q, at_q) * turn(k, at_k))

    at = lambda *positions: product(*(jnp.int32(p) for p in positions))  # noqa: E731
    np.testing.assert_allclose(at(9, 4), at(105, 100), rtol=1e-4)
    np.testing.assert_allclose(at(3, 3), float(jnp.sum(q * k)), rtol=1e-5)
    assert abs(float(at(9, 4)) - float(at(9, 5))) > 1e-2


def test_fused_projections_equal_separate_ones():
    build = lambda rngs: LinearGroup(6, {"a": 4, "b": 3}, {"a": "mlp", "b": "mlp"}, rngs=rngs)  # noqa: E731
    graph, params = initialise(build, jax.random.key(5))
    x = jnp.asarray(np.random.default_rng(5).normal(size=(2, 6)), jnp.float32)
    module = graph.merge(params)
    apart = module(x)
    module.fuse()
    for one, other in zip(module(x), apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert set(split(module)[1]) == {"kernel"}


def test_every_array_is_stated_once_with_its_axes():
    with pytest.raises(ValueError, match="axes"):
        parameter(nnx.Rngs(0), (2, 3), ("embed",), nnx.initializers.ones)


def test_abstract_trees_are_those_of_real_modules():
    build = lambda rngs: GatedMLP(4, 4, rngs=rngs)  # noqa: E731
    graph, params = initialise(build, jax.random.key(0))
    shape_of = lambda leaf: (leaf.shape, leaf.dtype)  # noqa: E731
    assert jax.tree.map(shape_of, abstract_params(build)) == jax.tree.map(shape_of, params)
    assert graph_of(build).graphdef == graph.graphdef


def test_a_graph_without_its_constants_is_refused():
    class WithTable(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Variable(jnp.arange(3))

    with pytest.raises(ValueError, match="constants"):
        graph_of(WithTable)
