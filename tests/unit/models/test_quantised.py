"""Int8 weights: codes and scales by hand, and a quantised policy beside one whose weights are scale times code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.models.functional import Params, graph_of, initialise
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.quantised import dequantised, quantise, times
from draftco_jax.models.quantised_decoder import QuantisedDecoder
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.transformer import to_rollout_layout


def test_codes_and_scales_by_hand():
    """Columns: exact multiples; halves, which go to the even code; a column of zeros."""
    weights = jnp.asarray([[127.0, 254.0, 0.0], [-127.0, 5.0, 0.0], [3.0, -7.0, 0.0]])
    values, scales = quantise(weights, summed=0)
    assert values.dtype == jnp.int8 and scales.dtype == jnp.float32
    np.testing.assert_array_equal(scales, [1, 2, 1])
    np.testing.assert_array_equal(values, [[127, 127, 0], [-127, 2, 0], [3, -4, 0]])
    by_rows = quantise(weights.T, summed=1)
    np.testing.assert_array_equal(by_rows.values, values.T)
    np.testing.assert_array_equal(by_rows.scales, scales)


def test_an_entry_is_off_by_half_a_scale_at_most_and_the_largest_by_nothing():
    weights = np.random.default_rng(0).normal(size=(5, 64, 7)) * np.logspace(-6, 6, 7)
    values, scales = (np.asarray(part, np.float64) for part in quantise(jnp.asarray(weights, jnp.float32), summed=1))
    off = np.abs(weights - values * scales[:, None])
    assert (off <= scales[:, None] * (0.5 + 1e-5)).all() and off.max() > 0.4 * scales.max()
    assert np.abs(values).max() == 127
    largest = np.abs(weights).argmax(axis=1)[:, None]
    assert (np.take_along_axis(off, largest, axis=1)[:, 0] < 1e-4 * scales).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_of_the_scaled_codes(dtype):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, 96)), dtype)
    values, scales = quantise(jnp.asarray(rng.normal(size=(96, 5)), jnp.float32), summed=0)
    exact = np.asarray(x, np.float64) @ (np.asarray(values, np.float64) * np.asarray(scales, np.float64))
    found = times(x, values, scales)
    assert found.dtype == jnp.float32  # also of bfloat16 rows: the sum is not rounded
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def scaled_codes(params: Params) -> Params:
    """The float policy that a quantised one is: matrices as s * q, of the arrays that are to be quantised and of no
    others."""

    def code(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = [key.key for key in path]
        whole = names[-1] == "embed_tokens"
        small = leaf.ndim < 2 or "gate" in names or "shared_expert_gate" in names or "conv1d" in names
        if small and not whole:
            return leaf
        summed = leaf.ndim - 1 if whole else leaf.ndim - 2
        return dequantised(*quantise(leaf, summed), summed)

    return jax.tree_util.tree_map_with_path(code, params)


QWEN35 = Qwen35MoeConfig.tiny()
NEMOTRON = NemotronHConfig.tiny()
POLICIES = {
    "tied": replace(Qwen3Config.tiny(hidden_size=16, intermediate_size=32), tie_word_embeddings=True),
    "qwen3_5_moe": replace(QWEN35, num_hidden_layers=2, layer_types=("linear_attention", "full_attention")),
    "nemotron_h": replace(NEMOTRON, num_hidden_layers=3, block_types=("mamba", "attention", "moe")),
}


@pytest.mark.parametrize("name", ["tied", "qwen3_5_moe", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_a_quantised_policy_is_the_policy_with_scaled_codes_for_weights(name):
    """Three cached tokens after two; projections, experts, embedding and head are coded, all else is as it was."""
    cfg = POLICIES[name]
    _, params = initialise(cfg.build, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim >= 2 else leaf, params)
    graph = graph_of(cfg.build)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, cfg.vocab_size, (2, 5)), jnp.int32)

    def read(policy):
        cache = policy.empty_cache(2, 8, 3)
        start = jnp.zeros(2, jnp.int32)
        first = policy.step(tokens[:, :2], start, cache, tap_layers=(), lengths=start + 2)
        second = policy.step(tokens[:, 2:], start + 2, first.cache, tap_layers=())
        return policy.logits(second.hidden), policy.tables("float32")

    @jax.jit
    def both(params):
        module = graph.merge(params)
        to_rollout_layout(module)
        quantised = QuantisedDecoder(module)
        kinds = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(quantised, nnx.Param))}
        assert kinds == {jnp.dtype("int8"), jnp.dtype("float32")}
        reference = graph.merge(scaled_codes(params))
        to_rollout_layout(reference)
        return read(quantised), read(reference), read(graph.merge(params))

    found, wanted, exact = both(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, wanted)
    assert np.abs(found[0] - exact[0]).max() > 1e-3, "the codes must be seen in the logits"
