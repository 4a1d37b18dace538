"""Tests that mapping over chunks of tokens changes no value and no gradient, and keeps no logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.losses.chunked import map_tokens

ROWS, WIDTH, VOCAB = 2, 6, 211


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(ROWS, 15, WIDTH)), rng.normal(size=(WIDTH, VOCAB))
    return tuple(jnp.asarray(a, jnp.float32) for a in (hidden, kernel, rng.normal(size=(ROWS, 15))))


def terms(kernel, hidden, scale):
    """Something per token that goes through the vocabulary, of two shapes."""
    logits = hidden @ kernel
    return jax.nn.logsumexp(logits, axis=-1) * scale, jnp.max(logits, axis=-1, keepdims=True) - logits[:, :2]


def total(kernel, hidden, scale, chunk):
    fn = lambda h, s: terms(kernel, h, s)  # noqa: E731
    first, second = map_tokens(fn, (hidden, scale), chunk_tokens=chunk)
    return jnp.sum(first**2) + jnp.sum(jnp.sin(second)), (first, second)


def dense(kernel, hidden, scale):
    first, second = terms(kernel, hidden.reshape(-1, WIDTH), scale.reshape(-1))
    first, second = first.reshape(scale.shape), second.reshape(*scale.shape, 2)
    return jnp.sum(first**2) + jnp.sum(jnp.sin(second)), (first, second)


# 30 tokens: one chunk with and without room to spare, chunks that divide, a last chunk of 2, single tokens.
@pytest.mark.parametrize("chunk", [30, 64, 10, 7, 1])
def test_values_and_gradients_do_not_depend_on_the_chunk(data, chunk):
    hidden, kernel, scale = data
    differentiate = lambda fn, **fixed: jax.jit(  # noqa: E731
        jax.value_and_grad(lambda k, h, s: fn(k, h, s, **fixed), argnums=(0, 1, 2), has_aux=True)
    )
    expected = differentiate(dense)(kernel, hidden, scale)
    found = differentiate(total, chunk=chunk)(kernel, hidden, scale)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [8, 1024])
def test_bug_case_b18_no_residual_holds_the_vocabulary_of_every_token(chunk):
    """What the backward pass is given: inputs, not logits, whether there is one chunk or many."""
    tokens = 64
    hidden = jax.ShapeDtypeStruct((ROWS, tokens, WIDTH), jnp.float32)
    kernel = jax.ShapeDtypeStruct((WIDTH, VOCAB), jnp.float32)
    scale = jax.ShapeDtypeStruct((ROWS, tokens), jnp.float32)
    saved = jax.eval_shape(
        lambda k, h, s: jax.vjp(lambda k, h: total(k, h, s, chunk)[0], k, h)[1], kernel, hidden, scale
    )
    largest = max(leaf.size for leaf in jax.tree.leaves(saved))
    assert 0 < largest < ROWS * tokens * VOCAB / 8
    # The dense form does keep them: the inspection sees what it is meant to see.
    kept = jax.eval_shape(lambda k, h, s: jax.vjp(lambda k, h: dense(k, h, s)[0], k, h)[1], kernel, hidden, scale)
    assert max(leaf.size for leaf in jax.tree.leaves(kept)) >= ROWS * tokens * VOCAB


def test_bug_case_b17_peak_memory_grows_by_states_not_by_logits():
    def temporaries(tokens):
        hidden = jnp.zeros((1, tokens, WIDTH), jnp.float32)
        gradient = jax.jit(jax.grad(lambda k, h: total(k, h, h[..., 0], 32)[0], argnums=(0, 1)))
        memory = gradient.lower(jnp.zeros((WIDTH, VOCAB), jnp.float32), hidden).compile().memory_analysis()
        return memory.temp_size_in_bytes

    growth = temporaries(1024) - temporaries(512)
    # 512 more tokens: a few arrays of WIDTH floats each, while the logits alone would be 512 * 211 * 4 bytes.
    assert growth < 512 * VOCAB * 4 / 4


def test_a_chunk_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        map_tokens(lambda x: x, (jnp.zeros((1, 2)),), chunk_tokens=0)
