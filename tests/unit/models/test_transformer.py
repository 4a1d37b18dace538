"""Tests of packed rows, taps, cached steps and low precision. Values against transformers are in tests/golden."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config

ROWS, TOKENS = 4, 16
LENGTHS = (7, 5, 4, 9)  # three documents fill row 0; the last lies in row 1 before padding
PACKED = ((0, 0), (0, 7), (0, 12), (1, 0))
ALONE = ((0, 0), (1, 0), (2, 0), (3, 0))


def lay_out(documents, places):
    """Documents of values at (row, start), zeros elsewhere; and their positions and segment ids."""
    values = np.zeros((ROWS, TOKENS, *documents[0].shape[1:]), documents[0].dtype)
    positions, segments = np.zeros((2, ROWS, TOKENS), np.int32)
    for document, (row, start) in zip(documents, places, strict=True):
        cells = slice(start, start + len(document))
        values[row, cells], positions[row, cells] = document, np.arange(len(document))
        segments[row, cells] = segments[row].max() + 1
    return values, positions, segments


def cut(rows, places):
    """The documents, taken out of their rows."""
    return [np.asarray(rows[r, s : s + n]) for n, (r, s) in zip(LENGTHS, places, strict=True)]


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(2)
    return [rng.integers(0, 29, n).astype(np.int32) for n in LENGTHS]


@pytest.fixture(scope="module")
def run(tiny):
    """(tokens, positions, segments, coefficients) -> states, gradients of the coefficients' sum over them."""

    def weighted(params, tokens, positions, segments, coefficients):
        hidden, taps, _ = tiny.graph.merge(params)(tokens, positions, segments, tap_layers=(0, 1))
        states = jnp.concatenate([hidden, taps], axis=-1)
        return jnp.sum(states * coefficients), states

    compiled = jax.jit(jax.grad(weighted, has_aux=True))

    def call(*arrays):
        gradients, states = compiled(tiny.params, *arrays)
        return states, gradients

    return call


def test_packed_ragged_documents_equal_the_documents_alone_in_values_and_gradients(run, documents):
    rng = np.random.default_rng(3)
    coefficients = [rng.normal(size=(n, 48)).astype(np.float32) for n in LENGTHS]
    packed, alone = (run(*lay_out(documents, places), lay_out(coefficients, places)[0]) for places in (PACKED, ALONE))
    for in_pack, by_itself in zip(cut(packed[0], PACKED), cut(alone[0], ALONE), strict=True):
        np.testing.assert_allclose(in_pack, by_itself, rtol=0, atol=2e-6)  # 8 ulp of values up to 3
    for in_pack, by_itself in zip(*map(jax.tree.leaves, (packed[1], alone[1])), strict=True):
        np.testing.assert_allclose(in_pack, by_itself, rtol=1e-5, atol=1e-5)


def test_bug_case_b51_no_token_reads_a_later_one_or_another_document(run, documents):
    zeros = np.zeros((ROWS, TOKENS, 48), np.float32)
    tokens, positions, segments = lay_out(documents, PACKED)
    before = np.asarray(run(tokens, positions, segments, zeros)[0])
    for row, column in ((0, 3), (0, 9), (0, 15), (1, 0), (1, 8), (1, 12)):
        changed = tokens.copy()
        changed[row, column] = (tokens[row, column] + 1) % 29
        after = np.asarray(run(changed, positions, segments, zeros)[0])
        differs = (before != after).any(axis=-1)
        may_differ = np.zeros_like(differs)
        may_differ[row] = (segments[row] == segments[row, column]) & (np.arange(TOKENS) >= column)
        assert differs[row, column]
        assert not (differs & ~may_differ).any()


def test_taps_come_in_the_order_asked_for_and_none_has_width_zero(tiny, documents):
    tokens, positions, segments = (jnp.asarray(a) for a in lay_out(documents, PACKED))
    policy = tiny.graph.merge(tiny.params)
    shapes = jax.eval_shape(lambda: policy(tokens, positions, segments, tap_layers=(1,))[1])
    assert shapes.shape == (ROWS, TOKENS, 16)
    shapes = jax.eval_shape(lambda: policy(tokens, positions, segments)[1])
    assert shapes.shape == (ROWS, TOKENS, 0)


def test_bfloat16_weights_give_finite_states_and_float32_logits(tiny, documents):
    """Whole rows and cached steps; 8 bits over two layers leave an error of 2 % of the spread of the logits."""
    build = partial(tiny.cfg.build, compute=ComputeConfig(dtype="bfloat16", parameter_dtype="bfloat16"))
    graphs = {"low": graph_of(build), "exact": tiny.graph}
    low = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tiny.params, abstract_params(build))
    tokens, positions, segments = (jnp.asarray(a) for a in lay_out(documents, ALONE))

    @partial(jax.jit, static_argnames="kind")
    def both_ways(params, kind):
        policy = graphs[kind].merge(params)
        hidden, taps, _ = policy(tokens, positions, segments, tap_layers=(0,))
        stepped, _, cache, _ = policy.step(
            tokens, jnp.zeros(ROWS, jnp.int32), policy.empty_cache(ROWS, TOKENS), tap_layers=()
        )
        return hidden, taps, cache.layers[0].keys, policy.logits(hidden), policy.logits(stepped)

    *states, logits, stepped = both_ways(low, "low")
    assert [state.dtype for state in states] == [jnp.bfloat16] * 3
    assert logits.dtype == stepped.dtype == jnp.float32
    # Padding of a short row is out of the comparison: a step sees it as text, a whole row does not.
    real = segments > 0
    exact = both_ways(tiny.params, "exact")[3]
    for found in (logits, stepped):
        assert np.isfinite(found).all()
        error = np.sqrt(np.mean((found - exact)[real] ** 2))
        assert error < 0.05 * np.std(exact[real])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_name_and_value(change, name):
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match=name):
        Qwen3Config(**(sizes | heads | change))
