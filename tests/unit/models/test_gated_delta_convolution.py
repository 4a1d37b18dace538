"""The short convolution of recurrent mixers: against a loop, packed against alone, cached against packed."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.models.recurrent import ShortConvolution, convolve_after, convolve_packed, documents, window_after

RNG = np.random.default_rng(0)
LENGTHS = (5, 1, 2, 7)
SEGMENTS = np.array([[1] * 5 + [2] + [3] * 2 + [0] * 2 + [4] * 7 + [0]], np.int32)
X = RNG.normal(size=(1, 18, 3)).astype(np.float32)
WEIGHT, BIAS = (RNG.normal(size=shape).astype(np.float32) for shape in ((3, 4), (3,)))
ULPS = 1e-6  # four products of size 1 summed in float32, against float64


def by_hand(x):
    """The formula, token by token and tap by tap, in float64, of one document [T, C]."""
    y = np.tile(BIAS.astype(np.float64), (len(x), 1))
    for t in range(len(x)):
        for i in range(4):
            if t - (3 - i) >= 0:
                y[t] += WEIGHT[:, i].astype(np.float64) * x[t - (3 - i)]
    return y


def packed(x=X):
    x, weight, bias, segments = (jnp.asarray(a) for a in (x, WEIGHT, BIAS, SEGMENTS))
    return np.asarray(convolve_packed(x, weight, bias, segments, WHOLE_ROWS))


def test_bug_case_b51_each_document_is_convolved_by_itself():
    y = packed()
    for segment, length in enumerate(LENGTHS, 1):
        here = SEGMENTS[0] == segment
        assert here.sum() == length
        np.testing.assert_allclose(y[0, here], by_hand(X[0, here]), rtol=0, atol=ULPS)


def test_padding_is_finite_and_reaches_no_document_even_where_it_is_nan():
    y, spoiled = packed(), packed(np.where(SEGMENTS[:, :, None] == 0, np.float32(np.nan), X))
    np.testing.assert_array_equal(y, spoiled)


def test_starts_are_first_tokens_of_documents_and_never_padding():
    found = documents(jnp.asarray(SEGMENTS), WHOLE_ROWS)
    assert np.flatnonzero(np.asarray(found.starts)[0]).tolist() == [0, 5, 6, 10]
    np.testing.assert_array_equal(found.real, SEGMENTS > 0)


def test_cached_tokens_continue_from_what_was_kept():
    """Rows that keep 0, 1 and all 3 of the tokens: the next tokens are as if only those had been read."""
    x = RNG.normal(size=(3, 9, 3)).astype(np.float32)
    weight, bias = jnp.asarray(WEIGHT), jnp.asarray(BIAS)
    y, inputs = convolve_after(jnp.asarray(x[:, :3]), jnp.zeros((3, 3, 3)), weight, bias)
    kept = np.array([0, 1, 3], np.int32)
    after, _ = convolve_after(jnp.asarray(x[:, 3:]), window_after(inputs, jnp.asarray(kept), 4), weight, bias)
    for row, count in enumerate(kept):
        text = np.concatenate([x[row, :count], x[row, 3:]])
        np.testing.assert_allclose(y[row], by_hand(x[row, :3]), rtol=0, atol=ULPS)
        np.testing.assert_allclose(after[row], by_hand(text)[count:], rtol=0, atol=ULPS)


def test_module_states_its_arrays_and_refuses_another_window():
    module = ShortConvolution({"b": 3, "a": 2}, 4, rngs=nnx.Rngs(0), bias=True, axis="channels")
    assert module.channels == 5
    for part, channels in ((module.b, 3), (module.a, 2)):
        assert part.weight.shape == (channels, 4) and part.bias.shape == (channels,)
        weights = np.asarray(part.weight[...])
        assert -0.5 <= weights.min() < 0 < weights.max() <= 0.5
    assert ShortConvolution({"a": 3}, 4, rngs=nnx.Rngs(0), bias=False, axis="channels").a.bias is None
    with pytest.raises(ValueError, match="must hold 3 inputs"):
        module.step(jnp.zeros((1, 2, 5)), jnp.zeros((1, 2, 5)))
    with pytest.raises(ValueError, match="width=0 must be >= 1"):
        ShortConvolution({"a": 3}, 0, rngs=nnx.Rngs(0), bias=False, axis="channels")


def test_parts_are_convolved_and_split_in_the_order_they_are_stated():
    module = ShortConvolution({"b": 2, "a": 3}, 4, rngs=nnx.Rngs(1), bias=True, axis="channels")
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 6, 5)), jnp.float32)
    together, _ = module.step(x, jnp.zeros((1, 3, 5)))
    found = module.split(together)
    for part, columns, own in ((module.b, slice(0, 2), found[0]), (module.a, slice(2, 5), found[1])):
        alone, _ = convolve_after(x[..., columns], jnp.zeros((1, 3, own.shape[-1])), part.weight[...], part.bias[...])
        np.testing.assert_array_equal(own, alone)
